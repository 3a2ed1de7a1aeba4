"""The episodes of a step's batch as inputs of advantages: shaped rewards, groups, counts.

Legend: `E` episodes, `K` reward functions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raylearner.config.section import PositiveFloat, Section
from raylearner.learner.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from raylearner.learner.batch.pack import LearnerBatch

STD_EPSILON = 1e-8
"""Added to the standard deviation of normalized rewards."""


class RewardShaping(Section):
    """Applied to an episode's reward before any baseline; with `gdpo`, to the reward of each function. Metrics show it unshaped."""

    clip_low: float | None = None
    """Smaller rewards become this; None for no bound."""
    clip_high: float | None = None
    """Larger rewards become this; None for no bound."""
    normalize: bool = False
    """Subtract the batch's mean and divide by its standard deviation, after clipping."""


class ResamplingSection(Section):
    """Policy filtration (PF-PPO, 2409.06957): episodes of a batch redrawn by their reward."""

    kind: Literal["power", "max_min", "max_random"] = "power"
    """|reward|^power; the best and the worst only; or the best four times as often as others."""
    power: PositiveFloat = 2.0
    """Exponent of `power`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTable:
    """Every episode of the batch, the same on every rank."""

    rewards: Tensor  # [E] float64, NaN where none applies
    groups: Tensor  # [E] int64
    num_tokens: Tensor  # [E] trained tokens over all segments
    num_rows: Tensor  # [E] segments that train
    greedy_rewards: Tensor  # [E] NaN where no greedy episode was played
    parts: Tensor  # [E, K] rewards by function, unweighted
    part_weights: Tensor  # [K]
    copies: Tensor | None = None  # [E] number of times each was drawn; None for once

    @classmethod
    def of(
        cls,
        batch: "LearnerBatch",
        shaping: RewardShaping,
        *,
        reward_weights: Mapping[str, float],
        device: "torch.device | str",
    ) -> "EpisodeTable":
        """Build the table; reward functions that `reward_weights` does not name weigh 1."""

        def tensor(array: object) -> Tensor:
            return torch.tensor(array).to(
                device
            )  # a copy: arrays that come through Ray are read-only

        rewards = tensor(batch.rewards)
        # An episode without a reward, such as one that failed, has no reward by function either.
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
        """Take statistics (ddof 1) of the clipped `rewards [E]` that are not NaN."""
        low = -math.inf if shaping.clip_low is None else shaping.clip_low
        high = math.inf if shaping.clip_high is None else shaping.clip_high
        mean, scale = rewards.new_zeros(()), rewards.new_ones(())
        known = rewards[~rewards.isnan()].clamp(low, high)
        if shaping.normalize and len(known):
            mean = known.mean()
            scale = (known.std() if len(known) > 1 else known.new_zeros(())) + STD_EPSILON
        return cls(low, high, mean, scale)

    def shape(self, rewards: Tensor) -> Tensor:
        """Put rewards on the scale of those that the statistics came from; NaN stays: `[E]`."""
        return (rewards.clamp(self.low, self.high) - self.mean) / self.scale


def resampling_weights(rewards: Tensor, config: ResamplingSection) -> Tensor:
    """Return unnormalized sampling weights of policy filtration (2409.06957): `[E]`.

    power: |r|^power. max_min: 1 for the best and the worst rewards of the batch, else 0. max_random:
    0.4 for the best, 0.1 for others. 1e-8 is added; a NaN reward is never drawn (weight 0). Drawing
    breaks groups up, so it belongs with GAE rather than with group baselines.
    """
    scorable = ~rewards.isnan()
    known = torch.where(scorable, rewards, 0.0)
    best = torch.where(scorable, rewards, -torch.inf).amax()
    worst = torch.where(scorable, rewards, torch.inf).amin()
    match config.kind:
        case "power":
            weights = known.abs() ** config.power
        case "max_min":
            weights = ((rewards == best) | (rewards == worst)).to(rewards.dtype)
        case "max_random":
            weights = torch.where(rewards == best, 0.4, 0.1).to(rewards.dtype)
    return torch.where(scorable, (weights + 1e-8).clamp(min=1e-8), 0.0)


def resample(table: EpisodeTable, config: ResamplingSection, *, seed: int) -> Tensor | None:
    """Draw as many episodes as have a reward, with replacement, identically on every rank.

    Return the number of times each was drawn `[E]`, or None if no episode has a reward.
    """
    rewards = torch.where(table.num_tokens > 0, table.rewards, torch.nan).cpu()
    if rewards.isnan().all():
        return None
    weights = resampling_weights(rewards, config)
    generator = torch.Generator().manual_seed(seed)
    count = int((weights > 0).sum())
    drawn = torch.multinomial(weights, count, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(weights)).to(table.rewards.device)
