"""The `rollout/*` metrics of a step, from the groups taken and the activity of the actors."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from raylearner.observability.episodes import Episode, episodes_of, mean_reward
from raylearner.types import StopReason, TrajectoryGroup

FINISHED = (StopReason.ANSWER, StopReason.END)
"""Stop reasons of episodes that ended normally."""
MAX_TURNS_SHOWN = 32
"""Maximum number of turns with a metric `rollout/active/<turn>`."""


class Activity(Protocol):
    """Activity of one rollout actor since the last step; times in seconds."""

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


def rollout_metrics(
    groups: Sequence[TrajectoryGroup],
    activities: Sequence[Activity],
    *,
    failed_reward: float = 0.0,
) -> dict[str, float]:
    """Return rewards and turns of the groups taken, and the speed of the actors.

    An episode counts once, however many segments it has; a failed one counts as `failed_reward` in means
    of rewards.
    """
    episodes = [episode for group in groups for episode in episodes_of(group.trajectories)]
    metrics = _extremes("rollout/turns", [len(e.turns) for e in episodes])
    metrics |= _extremes(
        "rollout/response_tokens",
        [e.num_response_tokens for e in episodes if e.num_sampled_tokens],
    )
    metrics |= _extremes("rollout/episode_s", [e.duration_s for e in episodes])
    metrics |= {
        "rollout/segments/mean": _mean([len(e.segments) for e in episodes]),
        "rollout/sampled_tokens/mean": _mean([e.num_sampled_tokens for e in episodes]),
        "rollout/tool_calls/mean": _mean([e.num_tool_calls for e in episodes]),
        "rollout/invalid_actions/mean": _mean(
            [sum(not turn.is_valid for turn in e.turns) for e in episodes]
        ),
        "rollout/valid_actions/mean": _mean(
            [sum(turn.is_valid and not turn.is_cut for turn in e.turns) for e in episodes]
        ),
        "rollout/foreign_calls/mean": _mean(
            [sum(turn.foreign_form is not None for turn in e.turns) for e in episodes]
        ),
        "rollout/cut_turns/mean": _mean([sum(turn.is_cut for turn in e.turns) for e in episodes]),
        "rollout/valid_tool_calls/mean": _mean([e.num_valid_tool_calls for e in episodes]),
        "rollout/finish_fraction": _mean([e.stop_reason in FINISHED for e in episodes]),
    }
    metrics |= _images(episodes)
    metrics |= _active(episodes)
    for reason, count in Counter(e.stop_reason for e in episodes).items():
        metrics[f"rollout/stop/{reason}"] = count / len(episodes)
    metrics |= _rewards(episodes, failed_reward)
    metrics |= _logged_means(episodes)
    metrics |= _by_source(groups, failed_reward)
    return metrics | _speed(activities) | _tools(activities)


def _rewards(episodes: Sequence[Episode], failed_reward: float) -> dict[str, float]:
    """Return metrics of the total reward and of each function; only the mean includes failed episodes."""
    metrics: dict[str, float] = {}
    if (mean := mean_reward(episodes, failed_reward=failed_reward)) is not None:
        metrics["rollout/reward/mean"] = mean
    rewards = [e.reward for e in episodes if e.reward is not None]
    if rewards:
        metrics["rollout/reward/mean_without_failed"] = _mean(rewards)
        metrics["rollout/reward/max"] = float(max(rewards))
        metrics["rollout/reward/min"] = min(rewards)
        metrics["rollout/reward/std"] = float(np.std(rewards))
    for name in sorted({name for e in episodes for name in e.first.rewards}):
        parts = [part for e in episodes if (part := e.first.rewards.get(name)) is not None]
        if parts:
            metrics[f"rollout/reward/{name}/mean"] = _mean(parts)
            metrics[f"rollout/reward/{name}/std"] = float(np.std(parts))
    return metrics


def _images(episodes: Sequence[Episode]) -> dict[str, float]:
    if all(e.first.image_token_id is None for e in episodes):
        return {}
    metrics = _extremes(
        "rollout/images", [sum(len(s.images) for s in e.segments) for e in episodes]
    )
    metrics["rollout/image_tokens/mean"] = _mean(
        [sum(int(s.is_placeholder.sum()) for s in e.segments) for e in episodes]
    )
    return metrics


def _active(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the share of episodes that reached each turn."""
    longest = max((len(e.turns) for e in episodes), default=0)
    return {
        f"rollout/active/{number}": _mean([len(e.turns) >= number for e in episodes])
        for number in range(1, min(longest, MAX_TURNS_SHOWN) + 1)
    }


def _logged_means(episodes: Sequence[Episode]) -> Mapping[str, float]:
    """Return `rollout/logged/*`: means over episodes of the numbers logged by environments and rewards.

    Values that are not finite are left out, and counted in `rollout/logged_non_finite`.
    """
    values: dict[str, list[float]] = {}
    num_dropped = 0
    for name, value in (pair for e in episodes for pair in sorted(e.metrics.items())):
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
        else:
            num_dropped += 1
    means = {f"rollout/logged/{name}/mean": float(np.mean(v)) for name, v in sorted(values.items())}
    return {**means, "rollout/logged_non_finite": float(num_dropped)}


def _by_source(groups: Sequence[TrajectoryGroup], failed_reward: float) -> dict[str, float]:
    """Return the mean reward of each data source, and its share of the groups."""
    by_source: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        by_source.setdefault(group.trajectories[0].source, []).append(group)
    metrics: dict[str, float] = {}
    for source, of_source in sorted(by_source.items()):
        metrics[f"rollout/source/{source}/group_fraction"] = len(of_source) / len(groups)
        episodes = [episode for group in of_source for episode in episodes_of(group.trajectories)]
        if (mean := mean_reward(episodes, failed_reward=failed_reward)) is not None:
            metrics[f"rollout/source/{source}/reward/mean"] = mean
    return metrics


def _tools(activities: Sequence[Activity]) -> dict[str, float]:
    """Sum counts over actors; latency quantiles are those of the slowest actor."""
    merged: dict[str, float] = {}
    for activity in activities:
        for key, value in activity.tools.items():
            merge = max if "latency" in key else float.__add__
            merged[key] = merge(float(value), merged[key]) if key in merged else float(value)
    return merged


def _speed(activities: Sequence[Activity]) -> dict[str, float]:
    """Return rates over all actors; empty if none answered."""
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
