"""Scores of whole groups: functions that compare the episodes of one prompt."""

from collections.abc import Sequence

from raylearner.config.rewards import RewardSection
from raylearner.errors import RewardError
from raylearner.rewards.functions import view_of
from raylearner.rewards.scorer import Scorer
from raylearner.types import EpisodeScore, Prompt, StopReason, Trajectory


class GroupScorer:
    """Adds what functions that see groups give to what single episodes have already."""

    def __init__(self, config: RewardSection) -> None:
        """Raises `ConfigError` naming every user function that cannot be taken."""
        self._scorer = Scorer(config, sees_groups=True)

    async def score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> dict[int, EpisodeScore]:
        """By sample index, for every episode without an error.

        Each score holds the whole reward, all parts, and what only this call logged. When a function
        raises or times out, every score carries the error.
        """
        episodes: dict[int, list[Trajectory]] = {}
        for segment in sorted(trajectories, key=lambda t: (t.sample_index, t.segment)):
            if segment.stop_reason is not StopReason.ERROR:
                episodes.setdefault(segment.sample_index, []).append(segment)
        if not episodes:
            return {}
        names = self._scorer.weights.keys()
        views = [view_of(prompt, segments, names) for segments in episodes.values()]
        try:
            taken = [segments[0].columns.keys() for segments in episodes.values()]
            scores = await self._scorer.score_all(views, taken=taken)
        except RewardError as error:
            return {index: EpisodeScore(error=error) for index in episodes}
        found = {
            index: self._added(segments[0], score)
            for (index, segments), score in zip(episodes.items(), scores, strict=True)
        }
        if all(score.reward is None for score in found.values()):
            self._scorer.warn_of(prompt)
        return found

    async def close(self) -> None:
        await self._scorer.close()

    def _added(self, trajectory: Trajectory, score: EpisodeScore) -> EpisodeScore:
        """Parts that are no function's, such as the environment's penalty, are outside of the clip."""
        rewards = {**trajectory.rewards, **score.rewards}
        total = self._scorer.total(rewards)
        if total is not None:
            weights = self._scorer.weights
            total += sum(v for name, v in rewards.items() if name not in weights and v is not None)
        return EpisodeScore(
            reward=total, rewards=rewards, columns=score.columns, metrics=score.metrics
        )
