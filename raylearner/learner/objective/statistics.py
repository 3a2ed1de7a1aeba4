"""Statistics over a whole batch: of its trained tokens, and of its groups of episodes.

Legend: `T` packed tokens, `E` episodes. The batch is that of a step, never a micro-batch. A NaN
reward means "not applicable": the episode takes no part in any statistic. Group ids need not be
contiguous. Statistics of groups are computed in float64.
"""

from dataclasses import dataclass
from typing import Literal

from raylearner.learner.batch.rows import dense_ids, select
from raylearner.learner.lazy_torch import Tensor, torch


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask, 0 when it is empty, whatever lies off the mask: `[T] -> []`."""
    return select(values, mask).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8), statistics (ddof 1) over the mask: `[T] -> [T]`.

    Values off the mask are transformed too and mean nothing. Fewer than two selected tokens have no
    spread: they become 0.
    """
    count = mask.sum()
    centered = values - masked_mean(values, mask)
    variance = select(centered, mask).square().sum() / (count - 1).clamp(min=1)
    return centered * (variance + 1e-8).rsqrt()


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """Rewards with their group's statistics, each already spread back over the episodes."""

    rewards: Tensor  # [E] float64, 0 where not scorable
    scorable: Tensor  # [E] bool
    index: Tensor  # [E] int64, dense group number
    num_groups: int
    size: Tensor  # [E] float64, scorable episodes in the episode's group
    mean: Tensor  # [E] float64

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor) -> "GroupedRewards":
        if rewards.ndim != 1 or rewards.shape != groups.shape:
            raise ValueError(
                f"rewards and groups: must be [E] each, got {rewards.shape}, {groups.shape}"
            )
        scorable = ~rewards.isnan()
        values = torch.where(scorable, rewards.double(), 0.0)
        index, num_groups = dense_ids(groups)
        zeros = values.new_zeros(num_groups)
        size = zeros.index_add(0, index, scorable.double())
        mean = zeros.index_add(0, index, values) / size.clamp(min=1)
        return cls(values, scorable, index, num_groups, size[index], mean[index])

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each group's scorable episodes, spread back: `[E] -> [E]`."""
        totals = values.new_zeros(self.num_groups)
        totals = totals.index_add(0, self.index, torch.where(self.scorable, values, 0.0))
        return totals[self.index]

    def std(self) -> Tensor:
        """Return the sample standard deviation of each group, 0 below two episodes: `[E]`."""
        variance = self.sum((self.rewards - self.mean) ** 2) / (self.size - 1).clamp(min=1)
        return variance.sqrt()

    def extreme(self, which: Literal["amax", "amin"]) -> Tensor:
        """Return the largest or smallest scorable reward of each group, spread back: `[E]`."""
        empty = -torch.inf if which == "amax" else torch.inf
        out = self.rewards.new_full((self.num_groups,), empty)
        values = torch.where(self.scorable, self.rewards, empty)
        return out.scatter_reduce(0, self.index, values, which)[self.index]

    def finish(self, advantages: Tensor, like: Tensor) -> Tensor:
        """Return the advantages with 0 for episodes that cannot be scored, in `like`'s dtype."""
        return torch.where(self.scorable, advantages, 0.0).to(like.dtype)


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return True for each episode whose group's scorable rewards are all equal: `[E] bool`."""
    grouped = GroupedRewards.of(rewards, groups)
    return grouped.extreme("amax") <= grouped.extreme("amin")


def mean_std(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (ddof 1) of `[E]`, each value counted `weights` times."""
    weights = mask.double() if weights is None else torch.where(mask, weights.double(), 0.0)
    count = weights.sum()
    mean = (torch.where(mask, values, 0.0) * weights).sum() / count.clamp(min=1)
    squares = (torch.where(mask, values - mean, 0.0) ** 2 * weights).sum()
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def whiten_over_tokens(values: Tensor, mask: Tensor, num_tokens: Tensor) -> Tensor:
    """Whiten `[E]` by statistics in which an episode counts once for each trained token."""
    mean, std = mean_std(values, mask, num_tokens)
    return (values - mean) * (std**2 + 1e-8).rsqrt()
