"""The rollout half of a step's metrics, from the groups taken and what the actors report."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from raylearner.observability.completions import logged_means
from raylearner.types import StopReason, Trajectory, TrajectoryGroup

FINISHED = (StopReason.ANSWER, StopReason.END)
"""What an episode ends with that came to its end by itself."""
MAX_TURNS_SHOWN = 32
"""Turns whose share of active trajectories is reported one by one."""


class Activity(Protocol):
    """What one rollout actor did since the last step; times in seconds."""

    @property
    def num_episodes(self) -> int: ...
    @property
    def num_sampled_tokens(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    @property
    def wall_s(self) -> float: ...
    @property
    def tools(self) -> Mapping[str, float]: ...


def step_metrics(
    groups: Sequence[TrajectoryGroup], activities: Sequence[Activity]
) -> dict[str, float]:
    """`rollout/*` of one step: rewards and turns of what was taken, speed of the actors."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics = _extremes("rollout/turns", [len(t.turns) for t in trajectories])
    metrics |= _extremes(
        "rollout/response_tokens",
        [t.num_tokens - int(np.argmax(t.loss_mask)) for t in trajectories if t.loss_mask.any()],
    )
    metrics |= _extremes(
        "rollout/episode_s", [t.finished_at_s - t.started_at_s for t in trajectories]
    )
    metrics |= {
        "rollout/sampled_tokens/mean": _mean([t.num_sampled_tokens for t in trajectories]),
        "rollout/tool_calls/mean": _mean(
            [sum(turn.tool is not None for turn in t.turns) for t in trajectories]
        ),
        "rollout/invalid_actions/mean": _mean(
            [sum(not turn.is_valid for turn in t.turns) for t in trajectories]
        ),
        "rollout/valid_actions/mean": _mean(
            [sum(turn.is_valid for turn in t.turns) for t in trajectories]
        ),
        "rollout/valid_tool_calls/mean": _mean([_num_valid_calls(t) for t in trajectories]),
        "rollout/finish_fraction": _mean([t.stop_reason in FINISHED for t in trajectories]),
    }
    if any(t.image_token_id is not None for t in trajectories):
        metrics |= _extremes("rollout/images", [len(t.images) for t in trajectories])
        metrics["rollout/image_tokens/mean"] = _mean(
            [int(t.is_placeholder.sum()) for t in trajectories]
        )
    metrics |= _active(trajectories)
    for reason, count in Counter(t.stop_reason for t in trajectories).items():
        metrics[f"rollout/stop/{reason}"] = count / len(trajectories)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if rewards:
        metrics |= _extremes("rollout/reward", rewards)
        metrics["rollout/reward/min"] = min(rewards)
        metrics["rollout/reward/std"] = float(np.std(rewards))
    for name in sorted({name for t in trajectories for name in t.rewards}):
        parts = [part for t in trajectories if (part := t.rewards.get(name)) is not None]
        if parts:
            metrics[f"rollout/reward/{name}/mean"] = _mean(parts)
            metrics[f"rollout/reward/{name}/std"] = float(np.std(parts))
    metrics |= logged_means(trajectories)
    metrics |= _by_source(groups)
    return metrics | _speed(activities) | _tools(activities)


def _active(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """By number of the turn: the share of trajectories that had one of this number."""
    longest = max((len(t.turns) for t in trajectories), default=0)
    return {
        f"rollout/active/{number}": _mean([len(t.turns) >= number for t in trajectories])
        for number in range(1, min(longest, MAX_TURNS_SHOWN) + 1)
    }


def _num_valid_calls(trajectory: Trajectory) -> float:
    """Tool calls that did not fail, as the environment counted them, or else turns that called."""
    counted = trajectory.metrics.get("tool_calls")
    if counted is None:
        return sum(turn.tool is not None for turn in trajectory.turns)
    return counted - trajectory.metrics.get("failed_tool_calls", 0.0)


def _by_source(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Rewards of each source apart, and its share of the groups."""
    by_source: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        by_source.setdefault(group.trajectories[0].source, []).append(group)
    metrics: dict[str, float] = {}
    for source, found in sorted(by_source.items()):
        metrics[f"rollout/source/{source}/group_fraction"] = len(found) / len(groups)
        rewards = [t.reward for group in found for t in group.trajectories if t.reward is not None]
        if rewards:
            metrics[f"rollout/source/{source}/reward/mean"] = _mean(rewards)
    return metrics


def _tools(activities: Sequence[Activity]) -> dict[str, float]:
    """Counts add up over actors; of latency quantiles the slowest actor's counts."""
    merged: dict[str, float] = {}
    for activity in activities:
        for key, value in activity.tools.items():
            merge = max if "latency" in key else float.__add__
            merged[key] = merge(float(value), merged[key]) if key in merged else float(value)
    return merged


def _speed(activities: Sequence[Activity]) -> dict[str, float]:
    """Rates over all actors; nothing when none of them answered."""
    wall_s = max((a.wall_s for a in activities), default=0.0)
    if wall_s <= 0:
        return {}
    return {
        "rollout/tokens_per_s": sum(a.num_sampled_tokens for a in activities) / wall_s,
        "rollout/episodes_per_s": sum(a.num_episodes for a in activities) / wall_s,
        "rollout/idle_fraction": _mean([a.idle_s / max(a.wall_s, 1e-9) for a in activities]),
    }


def _extremes(key: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{key}/mean": _mean(values), f"{key}/max": float(max(values))}


def _mean(values: Sequence[float | bool]) -> float:
    return float(np.mean(values)) if values else 0.0
