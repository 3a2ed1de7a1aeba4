"""How old a trajectory is when it trains, and what happens to what is too old. Pure functions.

A token's staleness is the learner's policy version at training minus the version that sampled it;
the bound `max_staleness` is inclusive and counts trained tokens only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raylearner.types import PolicyVersion, Trajectory, TrajectoryGroup

OnStale = Literal["mask", "drop", "wait", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What one group may train on. `group` is None when nothing of it may."""

    group: TrajectoryGroup | None
    num_masked_tokens: int = 0
    num_over_stale_tokens: int = 0
    """Trained although beyond the bound: `train` only."""


def trained_versions(trajectory: Trajectory) -> NDArray[np.int32]:
    """The policy versions of its trained tokens."""
    return trajectory.policy_versions[trajectory.train_mask]


def over_stale(
    trajectory: Trajectory, policy_version: PolicyVersion, *, max_staleness: int
) -> NDArray[np.bool_]:  # [T]
    """The trained tokens beyond the bound."""
    return trajectory.train_mask & (trajectory.policy_versions < policy_version - max_staleness)


def rule_on_stale(
    group: TrajectoryGroup,
    policy_version: PolicyVersion,
    *,
    max_staleness: int,
    on_stale: OnStale,
) -> Ruling:
    """Applies `on_stale` to a complete group that is about to train at `policy_version`.

    - `mask`, and `wait` for what waiting could not save: over-old tokens leave `train_mask`; the
      reward stays, since the baseline needs it. A group with no trained token left is dropped.
    - `drop`: one trained token beyond the bound drops the group, since its baseline needs all of it.
    - `train`: nothing changes, but it is counted.
    """
    masks = [over_stale(t, policy_version, max_staleness=max_staleness) for t in group.trajectories]
    num_over = sum(int(mask.sum()) for mask in masks)
    if num_over == 0:
        return Ruling(group=group)
    if on_stale == "train":
        return Ruling(group=group, num_over_stale_tokens=num_over)
    if on_stale == "drop":
        return Ruling(group=None)
    trajectories = tuple(
        t.with_train_mask(t.train_mask & ~mask) if mask.any() else t
        for t, mask in zip(group.trajectories, masks, strict=True)
    )
    if not any(t.train_mask.any() for t in trajectories):
        return Ruling(group=None, num_masked_tokens=num_over)
    return Ruling(group=replace(group, trajectories=trajectories), num_masked_tokens=num_over)


def should_wait_for(
    oldest_versions: Iterable[PolicyVersion], policy_version: PolicyVersion, *, max_staleness: int
) -> bool:
    """Whether after a step at `policy_version` a running group would be beyond the bound.

    `oldest_versions` are those of its episodes, running or done.
    """
    oldest = min(oldest_versions, default=policy_version + 1)
    return policy_version + 1 - oldest > max_staleness


def staleness_histogram(
    versions: Sequence[NDArray[np.int32]], policy_version: PolicyVersion
) -> list[int]:
    """Trained tokens by staleness: entry `k` counts those sampled `k` versions ago."""
    ages = policy_version - np.concatenate(versions) if versions else np.empty(0, np.int64)
    return np.bincount(np.maximum(ages, 0)).tolist()


def is_mixed_version(trajectory: Trajectory) -> bool:
    """Whether weights landed while the trajectory was being sampled."""
    versions = trajectory.policy_versions[trajectory.loss_mask]
    return len(versions) > 0 and bool(versions.min() != versions.max())
