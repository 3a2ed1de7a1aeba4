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
    ids, index = torch.unique(groups, return_inverse=True)
    num_groups = len(ids)
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

    DeepSeekMath 2402.03300, section 4.1.2. epsilon is 1e-6 in verl and 1e-4 in TRL.
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
    """r - mean_g (2503.20783, section 3.2); pair it with `sequence_mean_of_sums_scaled`."""
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
    """r minus the mean of the other episodes of the group (2402.14740, eq. 8).

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
