"""Advantages per episode: one number each, from the rewards of its group.

Legend: `E` episodes. An episode with a NaN reward gets 0. Episodes count once, however many rows
(segments) or tokens they have, except where a formula weighs by tokens. Results have the dtype of
the rewards.
"""

from typing import ClassVar, Literal

from raylearner.config.section import PositiveFloat, Section
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.episodes import EpisodeTable
from raylearner.learner.objective.statistics import (
    GroupedRewards,
    mean_std,
    whiten_over_tokens,
)

GroupOfOne = Literal["zero", "raw"]


class Advantage(Section):
    """Section of an advantage; its formula is a function of `EpisodeTable`, or of `TokenInputs` where
    it differs between the tokens of an episode."""

    is_per_token: ClassVar[bool] = False
    """Whether the advantage differs between the tokens of an episode."""
    compares_in_group: ClassVar[bool] = False
    """Whether the baseline is made of the group's other episodes."""
    needs_values: ClassVar[bool] = False
    """Whether a critic is required."""
    needs_start_logprobs: ClassVar[bool] = False
    """Whether the batch is scored before the first update."""
    needs_squared_probs: ClassVar[bool] = False
    """Whether that score includes the sum of squared probabilities over the vocabulary."""


class GroupBaseline(Advantage):
    """Section of an advantage that compares the episodes of a group."""

    compares_in_group: ClassVar[bool] = True
    group_of_one: GroupOfOne = "zero"
    """Advantage of an episode without others to compare with: none, or its raw reward."""


class GrpoAdvantage(GroupBaseline):
    """Group-relative advantage (arXiv 2402.03300)."""

    kind: Literal["grpo"]
    normalize: Literal["group", "batch", "none"] = "group"
    """Divide by the group's or the batch's standard deviation, or not at all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation: 1e-6 in verl, 1e-4 in TRL."""


def grpo(episodes: EpisodeTable, config: GrpoAdvantage) -> Tensor:
    """(r - mean_g) / (std + epsilon), std with ddof 1 of the group or of the batch."""
    return group_score(
        episodes.rewards,
        episodes.groups,
        normalize=config.normalize,
        epsilon=config.epsilon,
        group_of_one=config.group_of_one,
    )


def group_score(
    rewards: Tensor,  # [N]
    groups: Tensor,  # [N] int64
    *,
    normalize: Literal["group", "batch", "none"],
    epsilon: float,
    group_of_one: GroupOfOne,
) -> Tensor:
    """Return GRPO's advantage of any rewards in groups, which other kinds build on."""
    grouped = GroupedRewards.of(rewards, groups)
    advantages = grouped.rewards - grouped.mean
    divisor = torch.ones_like(advantages)
    if normalize == "group":
        divisor = grouped.std() + epsilon
    elif normalize == "batch":
        divisor = divisor * (mean_std(grouped.rewards, grouped.scorable)[1] + epsilon)
    advantages = advantages / divisor
    if group_of_one == "raw":
        divisor = torch.full_like(divisor, 1 + epsilon) if normalize == "group" else divisor
        advantages = torch.where(grouped.size == 1, grouped.rewards / divisor, advantages)
    else:
        advantages = torch.where(grouped.size == 1, 0.0, advantages)
    return grouped.finish(advantages, rewards)


def centered(rewards: Tensor, groups: Tensor, group_of_one: GroupOfOne) -> Tensor:
    """Return reward minus the group's mean: `[N]`."""
    return group_score(rewards, groups, normalize="none", epsilon=0.0, group_of_one=group_of_one)


class DrGrpoAdvantage(GroupBaseline):
    """Reward minus the group's mean (2503.20783); goes with sequence_mean_of_sums_scaled."""

    kind: Literal["dr_grpo"]


def dr_grpo(episodes: EpisodeTable, config: DrGrpoAdvantage) -> Tensor:
    """r - mean_g."""
    return centered(episodes.rewards, episodes.groups, config.group_of_one)


class RlooAdvantage(GroupBaseline):
    """Leave-one-out baseline (2402.14740)."""

    kind: Literal["rloo"]
    normalize: bool = False
    """Whiten the advantages over the episodes of the batch."""


def rloo(episodes: EpisodeTable, config: RlooAdvantage) -> Tensor:
    """r minus the mean of the other episodes of the group.

    `normalize` whitens the result over the batch with ddof 1 and 1e-4 added to the deviation, as TRL
    does, leaving out episodes without a baseline.
    """
    grouped = GroupedRewards.of(episodes.rewards, episodes.groups)
    others = (grouped.size - 1).clamp(min=1)
    advantages = (grouped.rewards - grouped.mean) * grouped.size / others
    alone, keeps_raw = grouped.size == 1, config.group_of_one == "raw"
    advantages = torch.where(alone, grouped.rewards if keeps_raw else 0.0, advantages)
    if config.normalize:
        counted = grouped.scorable if keeps_raw else grouped.scorable & ~alone
        mean, std = mean_std(advantages, counted)
        advantages = torch.where(counted, (advantages - mean) / (std + 1e-4), 0.0)
    return grouped.finish(advantages, episodes.rewards)


class ReinforcePlusPlusBaselineAdvantage(GroupBaseline):
    """Reward minus the group's mean, whitened over the trained tokens of the batch (2501.03262)."""

    kind: Literal["reinforce_plus_plus_baseline"]


def reinforce_plus_plus_baseline(
    episodes: EpisodeTable, config: ReinforcePlusPlusBaselineAdvantage
) -> Tensor:
    """r - mean_g, then whitened over the trained tokens of the batch.

    Long episodes weigh more in the statistics. A group of equal rewards is therefore not exactly 0
    afterwards.
    """
    rewards = episodes.rewards
    grouped = GroupedRewards.of(rewards, episodes.groups)
    values = centered(rewards.double(), episodes.groups, config.group_of_one)
    return grouped.finish(
        whiten_over_tokens(values, grouped.scorable, episodes.num_tokens), rewards
    )


class OpoAdvantage(GroupBaseline):
    """Reward minus the group's mean weighed by length (2505.23585)."""

    kind: Literal["opo"]


def opo(episodes: EpisodeTable, config: OpoAdvantage) -> Tensor:
    """r - sum_g(n r) / sum_g(n); a group without any token falls back to its plain mean."""
    grouped = GroupedRewards.of(episodes.rewards, episodes.groups)
    lengths = episodes.num_tokens.double()
    total = grouped.sum(lengths)
    baseline = grouped.sum(lengths * grouped.rewards) / total.clamp(min=1)
    baseline = torch.where(total > 0, baseline, grouped.mean)
    advantages = grouped.rewards - baseline
    alone = grouped.rewards if config.group_of_one == "raw" else torch.zeros_like(advantages)
    return grouped.finish(torch.where(grouped.size == 1, alone, advantages), episodes.rewards)


class GpgAdvantage(GroupBaseline):
    """Centered rewards times episodes over episodes with a nonzero reward (2504.02546)."""

    kind: Literal["gpg"]


def gpg(episodes: EpisodeTable, config: GpgAdvantage) -> Tensor:
    """alpha (r - mean_g), alpha = episodes / episodes with a nonzero reward."""
    rewards = episodes.rewards
    grouped = GroupedRewards.of(rewards, episodes.groups)
    num_nonzero = (grouped.rewards != 0).sum().clamp(min=1)
    alpha = grouped.scorable.sum() / num_nonzero
    values = centered(rewards.double(), episodes.groups, config.group_of_one)
    return grouped.finish(alpha * values, rewards)


class GdpoAdvantage(GroupBaseline):
    """Each reward function normalized by its own group, summed by weight, then by the batch (2601.05242)."""

    kind: Literal["gdpo"]
    normalize: Literal["group", "none"] = "group"
    """Divide each function by the group's standard deviation, or center it only."""
    statistics: Literal["tokens", "episodes"] = "tokens"
    """Unit that the batch normalization counts: trained tokens (verl) or episodes (TRL)."""
    epsilon: PositiveFloat = 1e-6
    """Added to the group's standard deviation."""


def gdpo(episodes: EpisodeTable, config: GdpoAdvantage) -> Tensor:
    """Sum of each function's GRPO advantage by weight, then normalized over the batch.

    By tokens: (x - mean) / sqrt(var + 1e-8). By episodes: (x - mean) / (std + 1e-4). A NaN reward is
    left out of its own column only.
    """
    rewards = episodes.parts
    scorable = ~rewards.isnan().all(dim=1)
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    weights = episodes.part_weights.double()
    for column, weight in zip(rewards.double().unbind(1), weights, strict=True):
        total = total + weight * group_score(
            column,
            episodes.groups,
            normalize=config.normalize,
            epsilon=config.epsilon,
            group_of_one=config.group_of_one,
        )
    if config.statistics == "tokens":
        total = whiten_over_tokens(total, scorable, episodes.num_tokens)
    else:
        mean, std = mean_std(total, scorable)
        total = (total - mean) / (std + 1e-4)
    return torch.where(scorable, total, 0.0).to(rewards.dtype)


class PassAtKAdvantage(Advantage):
    """The single best episode of a group gets its lead over the second (2503.19595)."""

    kind: Literal["pass_at_k"]
    compares_in_group: ClassVar[bool] = True
    normalize: Literal["group", "none"] = "group"
    """Divide by the group's standard deviation, or not at all."""


def pass_at_k(episodes: EpisodeTable, config: PassAtKAdvantage) -> Tensor:
    """(best - second) / (std_g + 1e-6) for the best episode, 0 for all others, ties and groups of one."""
    rewards = episodes.rewards
    grouped = GroupedRewards.of(rewards, episodes.groups)
    best = grouped.extreme("amax")
    is_best = grouped.scorable & (grouped.rewards == best)
    is_alone = grouped.sum(is_best.double()) == 1
    others = torch.where(is_best, torch.nan, rewards.double())
    runner_up = GroupedRewards.of(others, episodes.groups).extreme("amax")
    gap = torch.where(is_best & is_alone & (grouped.size > 1), best - runner_up, 0.0)
    divisor = grouped.std() + 1e-6 if config.normalize == "group" else torch.ones_like(gap)
    return grouped.finish(gap / divisor, rewards)
