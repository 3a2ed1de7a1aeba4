"""Episodes assembled from their segments, so that each counts once in metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raylearner.types import StopReason, Trajectory, Turn


@dataclass(slots=True)
class Episode:
    """The segments of one episode, in order; numbers refer to the whole episode."""

    segments: list[Trajectory]

    @property
    def first(self) -> Trajectory:
        return self.segments[0]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, in the order in which they were sampled."""
        turns = (turn for segment in self.segments for turn in segment.turns)
        return tuple(sorted(turns, key=lambda turn: turn.number))

    @property
    def stop_reason(self) -> StopReason:
        return self.segments[-1].stop_reason

    @property
    def is_failed(self) -> bool:
        return any(segment.stop_reason is StopReason.ERROR for segment in self.segments)

    @property
    def reward(self) -> float | None:
        """None also for an episode that failed."""
        return None if self.is_failed else self.first.reward

    @property
    def num_sampled_tokens(self) -> int:
        return sum(segment.num_sampled_tokens for segment in self.segments)

    @property
    def num_response_tokens(self) -> int:
        """Tokens from the first sampled one of each segment on."""
        return sum(
            segment.num_tokens - int(np.argmax(segment.loss_mask))
            for segment in self.segments
            if segment.loss_mask.any()
        )

    @property
    def num_tool_calls(self) -> int:
        """Number of tool calls; a turn may have several."""
        return sum(len(turn.tool.split(",")) for turn in self.turns if turn.tool)

    @property
    def num_valid_tool_calls(self) -> float:
        """Number of successful calls if the environment counts them, otherwise all."""
        counted = self.metrics.get("tool_calls")
        if counted is None:
            return self.num_tool_calls
        return counted - self.metrics.get("failed_tool_calls", 0.0)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers logged by the environment and rewards, which are the same in every segment."""
        return {name: value for s in self.segments for name, value in s.metrics.items()}

    @property
    def duration_s(self) -> float:
        started_at_s = min(segment.started_at_s for segment in self.segments)
        return max(segment.finished_at_s for segment in self.segments) - started_at_s


def episodes_of(trajectories: Sequence[Trajectory]) -> list[Episode]:
    """Return the episodes of these segments, in order of their first segments."""
    episodes: list[Episode] = []
    latest: dict[object, Episode] = {}
    for trajectory in trajectories:
        key = (trajectory.prompt_id, trajectory.episode_key)
        episode = latest.get(key)
        if episode is None or any(s.segment == trajectory.segment for s in episode.segments):
            episode = latest[key] = Episode([])
            episodes.append(episode)
        episode.segments.append(trajectory)
    for episode in episodes:
        episode.segments.sort(key=lambda segment: segment.segment)
    return episodes


def mean_reward(
    episodes: Sequence[Episode], *, failed_reward: float = 0.0, num_unfinished: int = 0
) -> float | None:
    """Return the mean reward of episodes, in which failed and unfinished ones count as not solved.

    It counts as `failed_reward`, or as the lowest reward among `episodes` if that is lower: failing
    never pays. None if no episode that ended has a reward.
    """
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    num_failed = sum(episode.is_failed for episode in episodes)
    if not rewards and num_failed < len(episodes):
        return None
    num_failed += num_unfinished
    if not rewards and not num_failed:
        return None
    values = rewards + [min([failed_reward, *rewards])] * num_failed
    return sum(values) / len(values)
