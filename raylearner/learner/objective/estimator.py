"""Advantages and value targets of a whole batch, as the configuration says.

Legend: `E` episodes, `R` rows and `T` tokens of the whole batch (see `whole_batch`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raylearner.config.advantage import (
    AdvantageSection,
    BilevelGaeAdvantage,
    CriticAdvantage,
    DrGrpoAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    GigpoAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    OpoAdvantage,
    OtbAdvantage,
    PassAtKAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RemaxAdvantage,
    RewardShaping,
    RlooAdvantage,
    TurnGaeAdvantage,
    VtraceAdvantage,
)
from raylearner.learner.batch.pack import LearnerBatch
from raylearner.learner.batch.rows import Rows, dense_ids, select, terminal_rewards
from raylearner.learner.batch.whole_batch import WholeBatch
from raylearner.learner.objective import advantages, returns
from raylearner.learner.objective.masked import whiten

STD_EPSILON = 1e-8
"""Added to the standard deviation of normalized rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTable:
    """What every rank knows of every episode of the batch."""

    rewards: Tensor  # [E] float64, NaN where none applies
    groups: Tensor  # [E] int64
    num_tokens: Tensor  # [E] trained tokens over all segments
    num_rows: Tensor  # [E] segments that train
    greedy_rewards: Tensor  # [E] NaN where no greedy episode was played
    parts: Tensor  # [E, K] rewards by function, unweighted
    part_weights: Tensor  # [K]
    copies: Tensor | None = None  # [E] how often each was drawn; None for once

    @classmethod
    def of(
        cls,
        batch: LearnerBatch,
        shaping: RewardShaping,
        *,
        reward_weights: Mapping[str, float],
        device: torch.device | str,
    ) -> "EpisodeTable":
        """`reward_weights` by function; one that is not named weighs 1."""

        def tensor(array: object) -> Tensor:
            return torch.tensor(array).to(device)  # a copy: what comes through Ray is read-only

        rewards = tensor(batch.rewards)
        # An episode without a reward, such as one that failed, has no part of it either.
        is_scored = ~rewards.isnan()
        parts = [torch.where(is_scored, tensor(part), torch.nan) for part in batch.parts.values()]
        parts = [Shaper.of(part, shaping).shape(part) for part in parts]
        shaper = Shaper.of(rewards, shaping)
        return cls(
            rewards=shaper.shape(rewards),
            groups=tensor(batch.groups),
            num_tokens=tensor(batch.num_episode_tokens),
            num_rows=tensor(batch.num_episode_rows),
            greedy_rewards=shaper.shape(tensor(batch.greedy_rewards)),
            parts=torch.stack(parts, dim=1) if parts else rewards.new_zeros((len(rewards), 0)),
            part_weights=rewards.new_tensor(
                [reward_weights.get(name, 1.0) for name in batch.parts]
            ),
        )


@dataclass(frozen=True, slots=True)
class Shaper:
    """`learner.reward` as a function: clip, then subtract a mean and divide by a deviation."""

    low: float
    high: float
    mean: Tensor  # []
    scale: Tensor  # []

    @classmethod
    def of(cls, rewards: Tensor, shaping: RewardShaping) -> "Shaper":
        """Statistics are those of the clipped `rewards [E]` that are not NaN (ddof 1)."""
        low = -math.inf if shaping.clip_low is None else shaping.clip_low
        high = math.inf if shaping.clip_high is None else shaping.clip_high
        mean, scale = rewards.new_zeros(()), rewards.new_ones(())
        known = rewards[~rewards.isnan()].clamp(low, high)
        if shaping.normalize and len(known):
            mean = known.mean()
            scale = (known.std() if len(known) > 1 else known.new_zeros(())) + STD_EPSILON
        return cls(low, high, mean, scale)

    def shape(self, rewards: Tensor) -> Tensor:
        """Any rewards on the scale of those that the statistics came from; NaN stays: `[E]`."""
        return (rewards.clamp(self.low, self.high) - self.mean) / self.scale


def episode_advantages(section: AdvantageSection, table: EpisodeTable, penalty: Tensor) -> Tensor:
    """One advantage per episode, after `penalty [E]` is taken from its reward: `[E]`."""
    rewards, groups = table.rewards - penalty, table.groups
    match section:
        case GrpoAdvantage():
            return advantages.grpo(
                rewards,
                groups,
                scale=section.normalize,
                epsilon=section.epsilon,
                group_of_one=section.group_of_one,
            )
        case DrGrpoAdvantage():
            return advantages.dr_grpo(rewards, groups, group_of_one=section.group_of_one)
        case RlooAdvantage():
            return advantages.rloo(
                rewards,
                groups,
                normalize=section.normalize,
                epsilon=section.epsilon,
                group_of_one=section.group_of_one,
            )
        case ReinforcePlusPlusBaselineAdvantage():
            return advantages.reinforce_plus_plus_baseline(
                rewards,
                groups,
                num_tokens=table.num_tokens,
                group_of_one=section.group_of_one,
                epsilon=section.epsilon,
            )
        case OpoAdvantage():
            return advantages.opo(
                rewards, groups, num_tokens=table.num_tokens, group_of_one=section.group_of_one
            )
        case GpgAdvantage():
            return advantages.gpg(
                rewards, groups, divisor=section.divisor, group_of_one=section.group_of_one
            )
        case GdpoAdvantage():
            return advantages.gdpo(
                table.parts,
                groups,
                weights=table.part_weights,
                num_tokens=table.num_tokens if section.statistics == "tokens" else None,
                scale=section.normalize,
                epsilon=section.epsilon,
                group_of_one=section.group_of_one,
            )
        case PassAtKAdvantage():
            return advantages.pass_at_k(
                rewards, groups, scale=section.normalize, epsilon=section.epsilon
            )
        case _:
            raise AssertionError(f"{section.kind} has an advantage per token")


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What an estimator says of each token of the whole batch."""

    advantages: Tensor  # [T] 0 where nothing trains or no reward applies
    targets: Tensor  # [T] what the critic should have said
    is_target: Tensor  # [T] bool, where it should have said it


def token_advantages(
    section: AdvantageSection,
    table: EpisodeTable,
    whole: WholeBatch,
    penalty: Tensor,  # [T]
) -> TokenAdvantages:
    """Advantages and value targets of every token, 0 where the episode has no reward.

    `penalty` is taken from the reward of each token. `whole` holds `values` and `bootstrap` for
    critics, `log_ratio` for V-trace, `logprobs` and `squared_probs` for OTB, with `weights` if the
    loss weighs tokens by a ratio.
    """
    # What cannot be scored is in no statistic.
    mask = whole.mask & whole.rows.spread(scorable(section, table)[whole.episodes])
    rewards = select(_outcomes(section, table, whole, mask) - penalty, mask)
    estimated, targets = _estimate(section, table, whole, rewards, mask)
    is_target = mask
    if isinstance(section, CriticAdvantage) and section.normalize:
        estimated = whiten(estimated, mask)
    if isinstance(section, TurnGaeAdvantage):
        is_target = returns.turn_starts(mask, whole.rows, whole.of_tokens["turns"].long())
    return TokenAdvantages(select(estimated, mask), select(targets, is_target), is_target)


def scorable(section: AdvantageSection, table: EpisodeTable) -> Tensor:
    """Which episodes have all that their advantage is made of; others do not train: `[E] bool`."""
    has_reward = ~table.rewards.isnan()
    if isinstance(section, RemaxAdvantage):
        return has_reward & ~table.greedy_rewards.isnan()
    return has_reward


def _outcomes(
    section: AdvantageSection, table: EpisodeTable, whole: WholeBatch, mask: Tensor
) -> Tensor:
    """Each outcome on a last trained token, 0 elsewhere: `[T]`.

    The steps of GiGPO are an episode's, over its segments, so they are paid once. For all others
    a segment is a sequence of its own, which the outcome ends.
    """
    if isinstance(section, GigpoAdvantage):
        of_episodes = Rows(index=whole.episodes[whole.rows.index], num_rows=len(table.rewards))
        return terminal_rewards(table.rewards, mask, of_episodes)
    return terminal_rewards(table.rewards[whole.episodes], mask, whole.rows)


def _estimate(
    section: AdvantageSection, table: EpisodeTable, whole: WholeBatch, rewards: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    rows, tokens = whole.rows, whole.of_tokens
    bootstrap = _bootstrap(whole)
    turns = tokens["turns"].long()
    match section:
        case ReinforcePlusPlusAdvantage():
            return returns.reinforce_plus_plus(rewards, mask, rows, gamma=section.gamma)
        case RemaxAdvantage():
            return returns.remax(rewards, table.greedy_rewards[whole.episodes], mask, rows)
        case OtbAdvantage():
            estimate = returns.tir_otb if section.kind == "tir_otb" else returns.otb
            return estimate(
                rewards,
                tokens["logprobs"],
                tokens["squared_probs"],
                mask,
                rows,
                table.groups[whole.episodes],
                episodes=whole.episodes,
                weights=tokens.get("weights"),
                zero_tail=section.zero_tail,
                epsilon=section.epsilon,
                group_of_one=section.group_of_one,
            )
        case GaeAdvantage():
            return returns.gae(
                rewards,
                tokens["values"],
                mask,
                rows,
                gamma=section.gamma,
                lam=section.lam,
                bootstrap=bootstrap,
            )
        case VtraceAdvantage():
            return returns.vtrace(
                tokens["log_ratio"],
                rewards,
                tokens["values"],
                mask,
                rows,
                gamma=section.gamma,
                lam=section.lam,
                rho_bar=section.rho_bar,
                c_bar=section.c_bar,
                bootstrap=bootstrap,
            )
        case TurnGaeAdvantage():
            return returns.turn_gae(
                rewards,
                tokens["values"],
                mask,
                rows,
                turns,
                gamma=section.gamma,
                lam=section.lam,
                bootstrap=bootstrap,
            )
        case BilevelGaeAdvantage():
            return returns.bilevel_gae(
                rewards,
                tokens["values"],
                mask,
                rows,
                turns,
                gamma_turn=section.gamma_turn,
                gamma=section.gamma,
                lam=section.lam,
                bootstrap=bootstrap,
            )
        case GigpoAdvantage():
            return _gigpo(section, table, whole, rewards, mask)
        case _:
            raise AssertionError(f"{section.kind} has an advantage per episode")


def _bootstrap(whole: WholeBatch) -> Tensor | None:  # [R]
    """The value where an episode was cut off, alike for all its segments.

    Each of them ends with the episode's outcome, so what is still to come is what follows the last.
    """
    ends = whole.of_rows.get("bootstrap")
    if ends is None:
        return None
    episode, num_episodes = dense_ids(whole.episodes)
    last = Rows(index=episode, num_rows=num_episodes).last(whole.rows.count(whole.mask) > 0)
    return ends[last[episode]]


def _gigpo(
    section: GigpoAdvantage, table: EpisodeTable, whole: WholeBatch, rewards: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """A step is a turn; its reward is that of its tokens."""
    ends = torch.nonzero(
        returns.turn_ends(mask, whole.rows, whole.of_tokens["turns"].long())
    ).squeeze(1)
    # Each trained token belongs to the next turn end at or after it.
    place = torch.arange(len(mask), device=mask.device)
    step = torch.searchsorted(ends, place).clamp(max=max(len(ends) - 1, 0))
    step_rewards = rewards.new_zeros(len(ends)).index_add(0, step[mask], rewards[mask])
    of_steps = returns.gigpo(
        table.rewards,
        table.groups,
        step_rewards,
        Rows(index=whole.episodes[whole.rows.index[ends]], num_rows=len(table.rewards)),
        whole.of_tokens["anchors"].long()[ends],
        gamma=section.gamma,
        step_weight=section.step_weight,
        scale=section.normalize,
        epsilon=section.epsilon,
    )
    spread = of_steps[step] if len(ends) else torch.zeros_like(rewards)
    return select(spread, mask), torch.zeros_like(rewards)
