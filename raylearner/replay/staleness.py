"""Staleness of tokens when they train, and the treatment of those beyond `replay.max_staleness`.

A token's staleness is the learner's policy version at training minus the version that sampled it;
the bound `max_staleness` is inclusive and counts trained tokens only. A new rule is a name in
`replay.on_stale` (config/schema.py) and a branch in `decide_staleness`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raylearner.config.schema import ReplaySection
from raylearner.replay.groups import GroupRecord
from raylearner.types import PolicyVersion, Trajectory, TrajectoryGroup

OnStale = Literal["mask", "drop", "wait", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessDecision:
    """The part of one group that may train. `group` is None if no part may."""

    group: TrajectoryGroup | None
    num_masked_tokens: int = 0
    num_over_stale_tokens: int = 0
    """Tokens that train although they are beyond the bound: `train` only."""


def trained_versions(trajectory: Trajectory) -> NDArray[np.int32]:
    """Return the policy versions of the trained tokens."""
    return trajectory.policy_versions[trajectory.train_mask]


def over_stale(
    trajectory: Trajectory, policy_version: PolicyVersion, *, max_staleness: int
) -> NDArray[np.bool_]:  # [T]
    """Return the mask of the trained tokens beyond the bound."""
    return trajectory.train_mask & (trajectory.policy_versions < policy_version - max_staleness)


def decide_staleness(
    group: TrajectoryGroup,
    policy_version: PolicyVersion,
    *,
    max_staleness: int,
    on_stale: OnStale,
) -> StalenessDecision:
    """Apply `on_stale` to a complete group that is about to train at `policy_version`.

    - `mask`, and `wait` where waiting did not help: tokens beyond the bound leave `train_mask`; the
      reward stays, since the baseline needs it. A group without a trained token is dropped.
    - `drop`: one trained token beyond the bound drops the group, since its baseline needs all of it.
    - `train`: nothing changes, but the tokens are counted.
    """
    masks = [over_stale(t, policy_version, max_staleness=max_staleness) for t in group.trajectories]
    num_over = sum(int(mask.sum()) for mask in masks)
    if num_over == 0:
        return StalenessDecision(group=group)
    if on_stale == "train":
        return StalenessDecision(group=group, num_over_stale_tokens=num_over)
    if on_stale == "drop":
        return StalenessDecision(group=None)
    trajectories = tuple(
        t.with_train_mask(t.train_mask & ~mask) if mask.any() else t
        for t, mask in zip(group.trajectories, masks, strict=True)
    )
    if not any(t.train_mask.any() for t in trajectories):
        return StalenessDecision(group=None, num_masked_tokens=num_over)
    return StalenessDecision(
        group=replace(group, trajectories=trajectories), num_masked_tokens=num_over
    )


def should_wait_for(
    oldest_versions: Iterable[PolicyVersion], policy_version: PolicyVersion, *, max_staleness: int
) -> bool:
    """Return whether a running group would be beyond the bound after a step at `policy_version`.

    `oldest_versions` are those of its episodes, running or done.
    """
    oldest = min(oldest_versions, default=policy_version + 1)
    return policy_version + 1 - oldest > max_staleness


class WaitRule:
    """Holds takes back for running groups: the part of `on_stale: wait` before a take.

    Remembers from which group on a take could be served. Only groups admitted before that one count:
    later groups cannot hold a take back forever, and each earlier one is closed at its time limit.
    """

    def __init__(self, config: ReplaySection) -> None:
        self._config = config
        self._since: tuple[PolicyVersion, int] | None = None

    def holds_back(
        self, running: Iterable[GroupRecord], policy_version: PolicyVersion, *, next_group_id: int
    ) -> bool:
        """Return whether a running group would be too stale after this step."""
        if self._config.on_stale != "wait":
            return False
        if self._since is None or self._since[0] != policy_version:
            self._since = (policy_version, next_group_id)
        return any(
            should_wait_for(
                group.versions, policy_version, max_staleness=self._config.max_staleness
            )
            for group in running
            if group.group_id < self._since[1]
        )

    def reset(self) -> None:
        """Forget the take: it was served, or its groups are gone."""
        self._since = None


def staleness_histogram(
    versions: Sequence[NDArray[np.int32]], policy_version: PolicyVersion
) -> list[int]:
    """Count trained tokens by staleness: entry `k` counts those sampled `k` versions ago."""
    ages = policy_version - np.concatenate(versions) if versions else np.empty(0, np.int64)
    return np.bincount(np.maximum(ages, 0)).tolist()


def is_mixed_version(trajectory: Trajectory) -> bool:
    """Return whether weights landed while the trajectory was being sampled."""
    versions = trajectory.policy_versions[trajectory.loss_mask]
    return len(versions) > 0 and bool(versions.min() != versions.max())
