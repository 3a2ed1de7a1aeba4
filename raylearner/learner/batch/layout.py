"""What a step of the learner takes and gives, as the controller packs it and every rank reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raylearner.types import PolicyVersion, Trajectory, TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One packed sequence of a micro-batch on its way to the learner."""

    episode: int
    trajectory: Trajectory
    turns: NDArray[np.int32]  # [T] number of the token's turn, -1 before the first
    anchors: tuple[int, ...]
    """By turn: equal where turns start from the same state, below 2^48."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer update sees: one rank's micro-batches, and counts over all ranks."""

    micro_batches: tuple[tuple[TokenRow, ...], ...]
    num_episodes: int
    """Episodes over all ranks that have at least one trained token."""
    num_rows: int
    """Rows over all ranks that have at least one trained token."""
    num_trained_tokens: int
    """Trained tokens over all ranks."""
    num_tokens: int
    """All tokens over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBatch:
    """One take, laid out for one learner rank.

    The episode table (all that is `[E]`) is whole on every rank, since baselines need whole groups;
    the mini-batches hold this rank's rows, each row's `episode`
    indexing the table. Every rank has the same number of micro-batches in each mini-batch; an empty
    one runs a dummy forward and backward.
    """

    policy_version: PolicyVersion
    rewards: NDArray[np.float64]  # [E] NaN where no reward applies
    groups: NDArray[np.int64]  # [E] group ids
    num_episode_tokens: NDArray[
        np.int64
    ]  # [E] trained tokens of the episode, over all its segments
    num_episode_rows: NDArray[np.int64]  # [E] segments that train
    greedy_rewards: NDArray[np.float64]  # [E] NaN where no greedy episode was played
    parts: Mapping[str, NDArray[np.float64]]
    """Unweighted rewards by function, each `[E]`."""
    num_sampled_tokens: int
    num_masked_tokens: Mapping[str, int]
    """Sampled tokens that do not train, by the rule that keeps them from it."""
    mini_batches: tuple[MiniBatch, ...]

    @property
    def num_rows(self) -> int:
        return sum(mini_batch.num_rows for mini_batch in self.mini_batches)

    @property
    def num_trained_tokens(self) -> int:
        return sum(mini_batch.num_trained_tokens for mini_batch in self.mini_batches)

    @property
    def num_tokens(self) -> int:
        return sum(mini_batch.num_tokens for mini_batch in self.mini_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a learner step did; the same on every rank."""

    policy_version: PolicyVersion
    """The version after the step: advanced by one, or unchanged when the step was skipped or trained
    the critic alone."""
    is_skipped: bool
    metrics: Mapping[str, float]
    advantages: Mapping[TrajectoryKey, float] = field(default_factory=dict[TrajectoryKey, float])
    """Mean advantage of the tokens that trained; each rank tells of its own trajectories."""
    logprobs: Mapping[TrajectoryKey, NDArray[np.float32]] = field(
        default_factory=dict[TrajectoryKey, NDArray[np.float32]]
    )
    """The learner's at the start of the step, `[T]` of a trajectory; as above, of a rank's own."""
