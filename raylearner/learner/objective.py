"""What a micro-batch adds to the loss of its mini-batch, as the configuration says, and what it measures.

Legend: `T` packed tokens, `R` rows, `E` episodes of the whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from raylearner.config.schema import AdvantageSection, LearnerSection
from raylearner.learner import advantages
from raylearner.learner.aggregation import aggregate
from raylearner.learner.corrections import importance_weights, log_ratios
from raylearner.learner.diagnostics import logprob_gap
from raylearner.learner.losses import LossInputs, decoupled_ppo, entropy_bonus
from raylearner.learner.metric import Mean, Metrics
from raylearner.learner.micro_batch import MicroBatch
from raylearner.types import LearnerBatch, MiniBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTable:
    """What every rank knows of every episode of the batch."""

    advantages: Tensor  # [E]
    num_tokens: Tensor  # [E] trained tokens over all segments

    @classmethod
    def of(
        cls,
        batch: LearnerBatch,
        section: AdvantageSection,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "EpisodeTable":
        rewards, groups = torch.tensor(batch.rewards), torch.tensor(batch.groups)
        if section.kind == "rloo":
            values = advantages.rloo(rewards, groups)
        else:
            values = advantages.grpo(
                rewards, groups, scale=section.normalize, epsilon=section.epsilon
            )
        return cls(
            advantages=values.to(device, dtype),
            num_tokens=torch.tensor(batch.num_episode_tokens).to(device),
        )


def loss_share(
    config: LearnerSection,
    micro: MicroBatch,
    *,
    logprobs: Tensor,  # [T]
    entropy: Tensor,  # [T]
    proximal_logprobs: Tensor,  # [T]
    table: EpisodeTable,
    mini: MiniBatch,
) -> tuple[Tensor, Metrics]:
    """Divided by counts over all ranks, so that shares add up to the loss of the mini-batch.

    A sequence of the aggregation is an episode: its segments share one vote.
    """
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=micro.behavior_logprobs,
        advantages=micro.rows.spread(table.advantages[micro.episodes]),
        mask=micro.train_mask,
        rows=micro.rows,
        entropy=entropy,
    )
    output = decoupled_ppo(
        inputs,
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        dual_clip=None,
        behavior_cap=config.loss.behavior_weight_cap,
        behavior_mode="cap",
    )
    row_num_tokens = table.num_tokens[micro.episodes]
    share = output.aggregate(
        inputs,
        mode=config.aggregation,
        num_tokens=mini.num_trained_tokens,
        num_rows=mini.num_episodes,
        row_num_tokens=row_num_tokens,
    )
    bonus, entropy_metrics = entropy_bonus(entropy, micro.train_mask)
    if config.entropy_coefficient:
        share = share + config.entropy_coefficient * aggregate(
            bonus,
            micro.train_mask,
            micro.rows,
            mode=config.aggregation,
            num_tokens=mini.num_trained_tokens,
            num_rows=mini.num_episodes,
            row_num_tokens=row_num_tokens,
        )
    return share, {**output.metrics, **entropy_metrics}


def off_policy_metrics(
    config: LearnerSection,
    micro: MicroBatch,
    proximal_logprobs: Tensor,  # [T]
) -> Metrics:
    """How far the learner, at the start of the step, is from what sampled the tokens.

    `logprob_gap` is over all sampled tokens, `on_policy_gap` over those of the learner's own
    version, where only engine and learner can differ.
    """
    log_ratio = log_ratios(proximal_logprobs, micro.behavior_logprobs, micro.train_mask)
    weights = importance_weights(
        log_ratio, micro.train_mask, micro.rows, high=config.loss.behavior_weight_cap
    )
    on_policy = logprob_gap(proximal_logprobs, micro.behavior_logprobs, micro.on_policy_mask)
    return {
        **weights.metrics,
        **logprob_gap(proximal_logprobs, micro.behavior_logprobs, micro.sampled_mask),
        "on_policy_gap/mean": on_policy["logprob_gap/mean"],
        "on_policy_gap/max": on_policy["logprob_gap/max"],
        "on_policy_fraction": Mean.of(micro.on_policy_mask, micro.sampled_mask),
    }
