"""The rollout half of a step's metrics, from the groups taken and what the actors report."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from raylearner.types import StopReason, TrajectoryGroup


class Activity(Protocol):
    """What one rollout actor did since the last step; times in seconds."""

    @property
    def num_episodes(self) -> int: ...
    @property
    def num_sampled_tokens(self) -> int: ...
    @property
    def num_aborted(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    @property
    def wall_s(self) -> float: ...
    @property
    def num_running(self) -> int: ...


def step_metrics(
    groups: Sequence[TrajectoryGroup], activities: Sequence[Activity]
) -> dict[str, float]:
    """`rollout/*` of one step: rewards and turns of what was taken, speed of the actors."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    metrics = {
        "rollout/turns/mean": _mean([len(t.turns) for t in trajectories]),
        "rollout/sampled_tokens/mean": _mean([t.num_sampled_tokens for t in trajectories]),
        "rollout/truncated_fraction": _mean(
            [t.stop_reason is StopReason.MAX_TOKENS for t in trajectories]
        ),
        "rollout/invalid_action_fraction": _mean(
            [not turn.is_valid for t in trajectories for turn in t.turns]
        ),
        "rollout/finish_fraction": _mean(
            [t.stop_reason is StopReason.ANSWER for t in trajectories]
        ),
        "rollout/episode_s/mean": _mean([t.finished_at_s - t.started_at_s for t in trajectories]),
    }
    if rewards:
        metrics["rollout/reward/mean"] = _mean(rewards)
        metrics["rollout/reward/std"] = float(np.std(rewards))
    for name in sorted({name for t in trajectories for name in t.rewards}):
        parts = [p for t in trajectories if (p := t.rewards.get(name)) is not None]
        if parts:
            metrics[f"rollout/reward/{name}/mean"] = _mean(parts)
    wall_s = max((a.wall_s for a in activities), default=0.0)
    if wall_s > 0:
        metrics["rollout/tokens_per_s"] = sum(a.num_sampled_tokens for a in activities) / wall_s
        metrics["rollout/episodes_per_s"] = sum(a.num_episodes for a in activities) / wall_s
        metrics["rollout/idle_fraction"] = _mean([a.idle_s / a.wall_s for a in activities])
    metrics["rollout/running"] = float(sum(a.num_running for a in activities))
    metrics["rollout/aborted"] = float(sum(a.num_aborted for a in activities))
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
