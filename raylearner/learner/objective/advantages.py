"""Outcome advantages: one number per episode, from the rewards of its group.

Legend: `E` episodes, `K` reward functions. A NaN reward means "not applicable": the episode takes
no part in any statistic and its advantage is 0. Group ids need not be contiguous. Episodes count
once, however many rows (segments) or tokens they have, except where a formula weighs by tokens.
All statistics are computed in float64; results have the dtype of the rewards.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raylearner.learner.batch.rows import dense_ids

GroupOfOne = Literal["zero", "raw"]
"""What a group with a single scorable episode gets: no advantage, or its raw reward (as in verl)."""


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Rewards with their group's statistics, each already spread back over the episodes."""

    rewards: Tensor  # [E] float64, 0 where not scorable
    scorable: Tensor  # [E] bool
    index: Tensor  # [E] int64, dense group number
    num_groups: int
    size: Tensor  # [E] float64, scorable episodes in the episode's group
    mean: Tensor  # [E] float64

    def sum(self, values: Tensor) -> Tensor:
        """Sum over each group's scorable episodes, spread back: `[E] -> [E]`."""
        totals = values.new_zeros(self.num_groups)
        totals = totals.index_add(0, self.index, torch.where(self.scorable, values, 0.0))
        return totals[self.index]

    def std(self) -> Tensor:
        """Sample standard deviation (ddof 1) of each group, 0 below two episodes: `[E]`."""
        variance = self.sum((self.rewards - self.mean) ** 2) / (self.size - 1).clamp(min=1)
        return variance.sqrt()

    def extreme(self, which: Literal["amax", "amin"]) -> Tensor:
        """Largest or smallest scorable reward of each group, spread back: `[E]`."""
        empty = -torch.inf if which == "amax" else torch.inf
        out = self.rewards.new_full((self.num_groups,), empty)
        values = torch.where(self.scorable, self.rewards, empty)
        return out.scatter_reduce(0, self.index, values, which)[self.index]


def _group(rewards: Tensor, groups: Tensor) -> _Grouped:
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(f"rewards and groups: want [E] each, got {rewards.shape}, {groups.shape}")
    scorable = ~rewards.isnan()
    values = torch.where(scorable, rewards.double(), 0.0)
    index, num_groups = dense_ids(groups)
    zeros = values.new_zeros(num_groups)
    size = zeros.index_add(0, index, scorable.double())
    mean = zeros.index_add(0, index, values) / size.clamp(min=1)
    return _Grouped(values, scorable, index, num_groups, size[index], mean[index])


def _finish(advantages: Tensor, grouped: _Grouped, like: Tensor) -> Tensor:
    return torch.where(grouped.scorable, advantages, 0.0).to(like.dtype)


def _mean_std(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (ddof 1) over the batch, each value counted `weights` times."""
    weights = mask.double() if weights is None else torch.where(mask, weights.double(), 0.0)
    count = weights.sum()
    mean = (torch.where(mask, values, 0.0) * weights).sum() / count.clamp(min=1)
    squares = (torch.where(mask, values - mean, 0.0) ** 2 * weights).sum()
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def combine_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of `rewards [E, K]` by `weights [K]`: `[E]`, NaN only where all are NaN."""
    total = torch.nansum(rewards * weights, dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, total)


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for each episode whose group's scorable rewards are all equal: `[E] bool`."""
    grouped = _group(rewards, groups)
    return grouped.extreme("amax") <= grouped.extreme("amin")


def grpo(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    *,
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float = 1e-6,
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """(r - mean_g) / (std + epsilon), std with ddof 1 of the group or of the batch.

    DeepSeekMath 2402.03300, section 4.1. epsilon is 1e-6 in verl and 1e-4 in TRL.
    """
    grouped = _group(rewards, groups)
    advantages = grouped.rewards - grouped.mean
    divisor = torch.ones_like(advantages)
    if scale == "group":
        divisor = grouped.std() + epsilon
    elif scale == "batch":
        divisor = divisor * (_mean_std(grouped.rewards, grouped.scorable)[1] + epsilon)
    elif scale != "none":
        raise ValueError(f"scale: want group, batch or none, got {scale!r}")
    advantages = advantages / divisor
    if group_of_one == "raw":
        divisor = torch.full_like(divisor, 1 + epsilon) if scale == "group" else divisor
        advantages = torch.where(grouped.size == 1, grouped.rewards / divisor, advantages)
    else:
        advantages = torch.where(grouped.size == 1, 0.0, advantages)
    return _finish(advantages, grouped, rewards)


def dr_grpo(rewards: Tensor, groups: Tensor, *, group_of_one: GroupOfOne = "zero") -> Tensor:
    """r - mean_g (2503.20783); pair it with `sequence_mean_of_sums_scaled`."""
    return grpo(rewards, groups, scale="none", group_of_one=group_of_one)


def rloo(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    *,
    kl_penalty: Tensor | None = None,  # [E], already times beta
    clip_low: float | None = None,
    clip_high: float | None = None,
    normalize: bool = False,
    epsilon: float = 1e-4,
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """r minus the mean of the other episodes of the group (2402.14740).

    As in TRL the reward is first clipped to `clip_low..clip_high`, then `kl_penalty` is subtracted
    (so it is never clipped), and `normalize` whitens the result over the batch with ddof 1,
    leaving out episodes without a baseline.
    """
    if clip_low is not None or clip_high is not None:
        rewards = rewards.clamp(clip_low, clip_high)
    if kl_penalty is not None:
        rewards = rewards - kl_penalty
    grouped = _group(rewards, groups)
    others = (grouped.size - 1).clamp(min=1)
    advantages = (grouped.rewards - grouped.mean) * grouped.size / others
    alone = grouped.size == 1
    advantages = torch.where(alone, grouped.rewards if group_of_one == "raw" else 0.0, advantages)
    if normalize:
        counted = grouped.scorable & ~alone if group_of_one == "zero" else grouped.scorable
        mean, std = _mean_std(advantages, counted)
        advantages = torch.where(counted, (advantages - mean) / (std + epsilon), 0.0)
    return _finish(advantages, grouped, rewards)


def reinforce_plus_plus_baseline(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    *,
    num_tokens: Tensor,  # [E]
    group_of_one: GroupOfOne = "zero",
    epsilon: float = 1e-8,
) -> Tensor:
    """r - mean_g, then whitened over the trained tokens of the batch (2501.03262).

    `num_tokens` counts each episode's trained tokens: long episodes weigh more in the statistics. A
    group of equal rewards is therefore not exactly 0 afterwards.
    """
    grouped = _group(rewards, groups)
    centered = grpo(rewards.double(), groups, scale="none", group_of_one=group_of_one)
    return _finish(_whiten(centered, grouped.scorable, num_tokens, epsilon), grouped, rewards)


def _whiten(values: Tensor, mask: Tensor, num_tokens: Tensor, epsilon: float) -> Tensor:
    mean, std = _mean_std(values, mask, num_tokens)
    return (values - mean) * (std**2 + epsilon).rsqrt()


def opo(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    *,
    num_tokens: Tensor,  # [E]
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """r - sum_g(n r) / sum_g(n), the length-weighted optimal baseline (2505.23585).

    A group without any token falls back to its plain mean.
    """
    grouped = _group(rewards, groups)
    lengths = num_tokens.double()
    total = grouped.sum(lengths)
    baseline = grouped.sum(lengths * grouped.rewards) / total.clamp(min=1)
    baseline = torch.where(total > 0, baseline, grouped.mean)
    advantages = grouped.rewards - baseline
    alone = grouped.rewards if group_of_one == "raw" else torch.zeros_like(advantages)
    return _finish(torch.where(grouped.size == 1, alone, advantages), grouped, rewards)


def gpg(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    *,
    divisor: float = 1.0,
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """alpha (r - mean_g) / divisor, alpha = episodes / episodes with a nonzero reward (2504.02546)."""
    grouped = _group(rewards, groups)
    num_nonzero = (grouped.rewards != 0).sum().clamp(min=1)
    alpha = grouped.scorable.sum() / num_nonzero
    centered = grpo(rewards.double(), groups, scale="none", group_of_one=group_of_one)
    return _finish(alpha * centered / divisor, grouped, rewards)


def gdpo(
    rewards: Tensor,  # [E, K]
    groups: Tensor,  # [E] int64
    *,
    weights: Tensor | None = None,  # [K]
    num_tokens: Tensor | None = None,  # [E]
    scale: Literal["group", "none"] = "group",
    epsilon: float = 1e-6,
    batch_epsilon: float | None = None,
    group_of_one: GroupOfOne = "zero",
) -> Tensor:
    """Each reward normalized by its own group, summed by `weights`, then by the batch (2601.05242).

    With `num_tokens` the batch statistics count every trained token, as in verl:
    (x - mean) / sqrt(var + 1e-8). Without they count episodes, as in TRL: (x - mean) / (std + 1e-4).
    `batch_epsilon` replaces either constant. A NaN reward is left out of its own column only.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards: want [E, K], got {tuple(rewards.shape)}")
    if weights is None:
        weights = rewards.new_ones(rewards.shape[1])
    scorable = ~rewards.isnan().all(dim=1)
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for column, weight in zip(rewards.double().unbind(1), weights.double(), strict=True):
        total = total + weight * grpo(
            column, groups, scale=scale, epsilon=epsilon, group_of_one=group_of_one
        )
    if num_tokens is not None:
        total = _whiten(
            total, scorable, num_tokens, 1e-8 if batch_epsilon is None else batch_epsilon
        )
    else:
        mean, std = _mean_std(total, scorable)
        total = (total - mean) / (std + (1e-4 if batch_epsilon is None else batch_epsilon))
    return torch.where(scorable, total, 0.0).to(rewards.dtype)


def pass_at_k(
    rewards: Tensor,  # [E]
    groups: Tensor,  # [E] int64
    *,
    scale: Literal["group", "none"] = "group",
    epsilon: float = 1e-6,
) -> Tensor:
    """The best episode of a group gets (best - second) / (std_g + epsilon), all others 0.

    2503.19595. Ties and groups of one give 0.
    """
    grouped = _group(rewards, groups)
    best = grouped.extreme("amax")
    is_best = grouped.scorable & (grouped.rewards == best)
    is_alone = grouped.sum(is_best.double()) == 1
    others = torch.where(is_best, torch.nan, rewards.double())
    runner_up = _group(others, groups).extreme("amax")
    gap = torch.where(is_best & is_alone & (grouped.size > 1), best - runner_up, 0.0)
    divisor = grouped.std() + epsilon if scale == "group" else torch.ones_like(gap)
    return _finish(gap / divisor, grouped, rewards)


def pf_ppo_weights(
    rewards: Tensor,  # [E]
    *,
    kind: Literal["power", "max_min", "max_random"] = "power",
    power: float = 2.0,
) -> Tensor:
    """Unnormalized sampling weights of policy filtration (2409.06957): `[E]`.

    power: |r|^power. max_min: 1 for the best and the worst rewards of the batch, else 0. max_random:
    0.4 for the best, 0.1 for others. 1e-8 is added; a NaN reward is never drawn (weight 0). Drawing
    breaks groups up, so it belongs with GAE rather than with group baselines.
    """
    scorable = ~rewards.isnan()
    known = torch.where(scorable, rewards, 0.0)
    best = torch.where(scorable, rewards, -torch.inf).amax()
    worst = torch.where(scorable, rewards, torch.inf).amin()
    if kind == "power":
        weights = known.abs() ** power
    elif kind == "max_min":
        weights = ((rewards == best) | (rewards == worst)).to(rewards.dtype)
    elif kind == "max_random":
        weights = torch.where(rewards == best, 0.4, 0.1).to(rewards.dtype)
    else:
        raise ValueError(f"kind: want power, max_min or max_random, got {kind!r}")
    return torch.where(scorable, (weights + 1e-8).clamp(min=1e-8), 0.0)


def pf_ppo_resample(
    weights: Tensor,  # [E]
    num_episodes: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Indices of `num_episodes` draws with replacement by `weights`: `[num_episodes] int64`."""
    return torch.multinomial(weights, num_episodes, replacement=True, generator=generator)
