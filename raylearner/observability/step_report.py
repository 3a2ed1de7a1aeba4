"""The rollout half of a step's metrics, from the groups taken and what the actors report."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from raylearner.observability.completions import logged_means
from raylearner.observability.episodes import Episode, episodes_of, mean_reward
from raylearner.types import StopReason, TrajectoryGroup

FINISHED = (StopReason.ANSWER, StopReason.END)
"""What an episode ends with that came to its end by itself."""
MAX_TURNS_SHOWN = 32
"""Turns whose share of active episodes is reported one by one."""


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
    groups: Sequence[TrajectoryGroup],
    activities: Sequence[Activity],
    *,
    failed_reward: float = 0.0,
) -> dict[str, float]:
    """`rollout/*` of one step: rewards and turns of what was taken, speed of the actors.

    Numbers are of episodes, whatever their number of segments. `failed_reward` is what a failed one
    counts as in means of rewards.
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
    metrics |= logged_means(episodes)
    metrics |= _by_source(groups, failed_reward)
    return metrics | _speed(activities) | _tools(activities)


def _rewards(episodes: Sequence[Episode], failed_reward: float) -> dict[str, float]:
    """Of the whole reward and of each function. Only the mean counts episodes that failed."""
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
    """By number of the turn: the share of episodes that had one of this number."""
    longest = max((len(e.turns) for e in episodes), default=0)
    return {
        f"rollout/active/{number}": _mean([len(e.turns) >= number for e in episodes])
        for number in range(1, min(longest, MAX_TURNS_SHOWN) + 1)
    }


def _by_source(groups: Sequence[TrajectoryGroup], failed_reward: float) -> dict[str, float]:
    """Rewards of each source apart, and its share of the groups."""
    by_source: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        by_source.setdefault(group.trajectories[0].source, []).append(group)
    metrics: dict[str, float] = {}
    for source, found in sorted(by_source.items()):
        metrics[f"rollout/source/{source}/group_fraction"] = len(found) / len(groups)
        episodes = [episode for group in found for episode in episodes_of(group.trajectories)]
        if (mean := mean_reward(episodes, failed_reward=failed_reward)) is not None:
            metrics[f"rollout/source/{source}/reward/mean"] = mean
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
