"""Share of a micro-batch in the loss of its mini-batch, and its metrics.

Legend: `T` packed tokens, `R` rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raylearner.config.schema import LearnerSection
from raylearner.learner.batch.metric import Mean, Metrics, summary
from raylearner.learner.batch.rows import Rows
from raylearner.learner.batch.whole_batch import WholeBatch
from raylearner.learner.model.critic import value_share
from raylearner.learner.model.mesh import BatchLayout
from raylearner.learner.model.policy import Scores
from raylearner.learner.objective import diagnostics
from raylearner.learner.objective.aggregation import aggregate, aggregate_rows
from raylearner.learner.objective.behavior_losses import DecoupledPpo, Reinforce
from raylearner.learner.objective.corrections import correct
from raylearner.learner.objective.covariance_losses import ClipCov, KlCov, select_tokens
from raylearner.learner.objective.importance import (
    Correction,
    CorrectionInputs,
    importance_weights,
    interpolated_proximal,
    log_ratios,
)
from raylearner.learner.objective.kl import kl_loss
from raylearner.learner.objective.loss import LossInputs, LossOutput
from raylearner.learner.objective.losses import POLICY_LOSSES, entropy_bonus
from raylearner.learner.objective.prepare import (
    PreparedBatch,
    PreparedMicroBatch,
    PreparedMiniBatch,
)
from raylearner.types import PolicyVersion

REPORTED_CAP = 2.0
"""Bound of reported importance weights where no correction sets one."""


def loss_share(
    config: LearnerSection,
    prepared: PreparedMicroBatch,
    scores: Scores,
    *,
    batch: PreparedBatch,
    mini_batch: PreparedMiniBatch,
    policy_version: PolicyVersion,
    kl_coefficient: float,
    selected: Tensor | None,  # [T] bool
) -> tuple[Tensor, Metrics]:
    """Return the share, divided by counts over all ranks so that shares add up to the loss.

    A sequence of the aggregation is an episode: its segments share one vote.
    """
    inputs, correction = _inputs(
        config, prepared, scores, batch=batch, policy_version=policy_version
    )
    formula = POLICY_LOSSES[config.loss.kind]
    output = formula(replace(inputs, selected_tokens=selected), config.loss)
    share = _aggregated(config, prepared, output, batch=batch, mini_batch=mini_batch)
    metrics: Metrics = {
        **({} if correction is None else correction.metrics),
        **output.metrics,
        **summary("advantage", inputs.advantages, inputs.mask),
    }

    def tokens(values: Tensor) -> Tensor:
        return _aggregated(
            config,
            prepared,
            LossOutput(values=values),
            batch=batch,
            mini_batch=mini_batch,
        )

    bonus, found = entropy_bonus(scores.entropy, inputs.mask)
    metrics |= found
    if config.entropy_coefficient:
        share = share + config.entropy_coefficient * tokens(bonus)
    kl = config.kl
    if kl is not None and kl.place == "loss" and prepared.reference_logprobs is not None:
        values, found = kl_loss(
            scores.logprobs,
            prepared.reference_logprobs,
            inputs.mask,
            kl,
            proximal_logprobs=inputs.proximal_logprobs,
        )
        share, metrics = share + kl_coefficient * tokens(values), metrics | found
    if config.critic is not None and scores.state_values is not None:
        values, found = critic_share(
            config,
            prepared,
            scores.state_values,
            batch=batch,
            mini_batch=mini_batch,
        )
        share, metrics = share + config.critic.coefficient * values, metrics | found
    return share, metrics


def critic_share(
    config: LearnerSection,
    prepared: PreparedMicroBatch,
    state_values: Tensor,
    *,
    batch: PreparedBatch,
    mini_batch: PreparedMiniBatch,
) -> tuple[Tensor, Metrics]:
    """Return the share of the value loss, of either kind of critic, before its coefficient."""
    assert config.critic is not None
    assert prepared.values is not None
    assert prepared.targets is not None
    assert prepared.is_target is not None
    copies = batch.table.copies
    return value_share(
        config.critic,
        state_values,
        old_values=prepared.values,
        targets=prepared.targets,
        is_target=prepared.is_target,
        rows=prepared.micro.rows,
        num_targets=mini_batch.num_targets,
        row_copies=None if copies is None else copies[prepared.micro.episodes],
    )


def select_update_tokens(
    config: LearnerSection,
    mini_batch: PreparedMiniBatch,
    logprobs: list[Tensor],  # [T] each, the current policy's
    *,
    batch: PreparedBatch,
    layout: BatchLayout,
    policy_version: PolicyVersion,
    seed: int,
) -> list[Tensor]:
    """Return the tokens of an update, over all ranks, that a covariance loss selects: `[T]` each."""
    assert isinstance(config.loss, ClipCov | KlCov)
    inputs = [
        _inputs(
            config,
            p,
            Scores(logprobs=current, entropy=torch.zeros_like(current)),
            batch=batch,
            policy_version=policy_version,
        )[0].without_masked()
        for p, current in zip(mini_batch.micro_batches, logprobs, strict=True)
    ]
    whole = WholeBatch.gather(
        [p.micro for p in mini_batch.micro_batches],
        of_tokens=[
            {
                "mask": i.mask,
                "logprobs": i.logprobs,
                "proximal": i.proximal_logprobs,
                "advantages": i.advantages,
            }
            for i in inputs
        ],
        of_rows=[{} for _ in inputs],
        group=layout.data,
    )
    tokens = whole.of_tokens
    together = LossInputs(
        logprobs=tokens["logprobs"],
        proximal_logprobs=tokens["proximal"],
        behavior_logprobs=tokens["proximal"],
        advantages=tokens["advantages"],
        mask=tokens["mask"] > 0,
        rows=whole.rows,
        rewards=batch.table.rewards[whole.episodes],
    )
    selected = select_tokens(together, config.loss, seed=seed)
    return [found.bool() for found in whole.scatter(selected.double())]


def off_policy_metrics(
    config: LearnerSection,
    starts: Sequence[tuple[PreparedMicroBatch, Tensor]],  # with the learner's log-probabilities [T]
    *,
    policy_version: PolicyVersion,
) -> Metrics:
    """Return the distance of the learner, at the start of the step, from the policies that sampled.

    The micro-batches of an update are measured together, since each measurement takes many small kernels.

    `logprob_gap` is over all sampled tokens, `on_policy_gap` over those of the learner's own
    version, where only engine and learner can differ.
    """
    micros = [prepared.micro for prepared, _ in starts]
    logprobs = torch.cat([start.detach() for _, start in starts])
    behavior = torch.cat([micro.behavior_logprobs for micro in micros])
    mask = torch.cat([prepared.mask for prepared, _ in starts])
    is_sampled = torch.cat([micro.sampled_mask for micro in micros])
    is_on_policy = torch.cat([micro.on_policy_mask for micro in micros])
    versions = torch.cat([micro.token_versions for micro in micros])
    rows = Rows.join([micro.rows for micro in micros])
    on_policy = diagnostics.logprob_gap(logprobs, behavior, is_on_policy)
    metrics: Metrics = {
        **diagnostics.logprob_gap(logprobs, behavior, is_sampled),
        **diagnostics.off_policy(logprobs, behavior, mask, rows),
        **diagnostics.staleness(versions, mask, rows, policy_version=policy_version),
        "on_policy_gap/mean": on_policy["logprob_gap/mean"],
        "on_policy_gap/max": on_policy["logprob_gap/max"],
        "on_policy_fraction": Mean.of(is_on_policy, is_sampled),
    }
    log_ratio = log_ratios(logprobs, behavior, mask)
    metrics |= diagnostics.weight_shares(log_ratio, mask)
    is_reported = isinstance(config.loss, Reinforce) or any(c.weighs for c in config.corrections)
    if not is_reported:
        cap = config.loss.behavior_cap if isinstance(config.loss, DecoupledPpo) else REPORTED_CAP
        weights = importance_weights(
            log_ratio,
            mask,
            rows,
            level="token",
            mode="truncate",
            low=None,
            high=cap,
        )
        metrics |= weights.metrics
    return metrics


def _inputs(
    config: LearnerSection,
    prepared: PreparedMicroBatch,
    scores: Scores,
    *,
    batch: PreparedBatch,
    policy_version: PolicyVersion,
) -> tuple[LossInputs, Correction | None]:
    micro, mask = prepared.micro, prepared.mask
    decided_on = prepared.base_mask  # also where rejected tokens leave the counts
    behavior, current = micro.behavior_logprobs, scores.logprobs.detach()
    if config.proximal == "behavior":
        proximal, corrected = behavior, current
    elif config.proximal == "interpolated":
        proximal = corrected = interpolated_proximal(
            current, behavior, micro.token_versions, policy_version=policy_version
        )
    else:
        start = prepared.start_logprobs
        proximal = corrected = current if start is None else start
    correction = correct(
        config.corrections,
        CorrectionInputs(
            log_ratio=log_ratios(corrected, behavior, decided_on),
            mask=decided_on,
            rows=micro.rows,
            advantages=prepared.advantages,
        ),
        batch.batch_values,
    )
    inputs = LossInputs(
        logprobs=scores.logprobs,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=prepared.advantages,
        mask=mask,
        rows=micro.rows,
        ratio_mask=prepared.base_mask,
        weights=None if correction is None else correction.weights.to(current.dtype),
        entropy=scores.entropy,
        rewards=batch.table.rewards[micro.episodes],
    )
    return inputs, correction


def _aggregated(
    config: LearnerSection,
    prepared: PreparedMicroBatch,
    output: LossOutput,
    *,
    batch: PreparedBatch,
    mini_batch: PreparedMiniBatch,
) -> Tensor:
    micro, table = prepared.micro, batch.table
    values = output.values
    if table.copies is not None:
        copies = table.copies[micro.episodes].to(values.dtype)
        values = values * (copies if output.level == "row" else micro.rows.spread(copies))
    if output.level == "row":
        return aggregate_rows(
            values,
            prepared.mask,
            micro.rows,
            num_rows=mini_batch.num_episodes,
            row_weights=table.num_rows[micro.episodes].clamp(min=1).to(values.dtype).reciprocal(),
        )
    return aggregate(
        values,
        prepared.mask,
        micro.rows,
        mode=config.aggregation,
        num_tokens=mini_batch.num_tokens,
        num_rows=mini_batch.num_episodes,
        scale=config.aggregation_scale,
        row_num_tokens=table.num_tokens[micro.episodes],
    )
