"""A language model as a judge: of one episode by a score, or of a group by comparing pairs."""

import asyncio
import math
import re
from collections.abc import Coroutine, Sequence
from itertools import permutations
from typing import Any

from raylearner.config.rewards import Judge, PairwiseJudge
from raylearner.rewards.endpoint import Endpoint
from raylearner.rewards.functions import EpisodeView, RewardLog

_SCORE = re.compile(r"<score>(.*?)</score>", re.DOTALL)
_WINNER = re.compile(r"<winner>(.*?)</winner>", re.DOTALL)
_POINTS = {"a": 1.0, "b": 0.0, "tie": 0.5}


class JudgeReward:
    """The score's place between the least and the greatest; logs the score as given."""

    def __init__(self, section: Judge) -> None:
        self._section = section
        self._endpoint = Endpoint(section)

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        section = self._section
        scores = await _gathered([self._ask(episode) for episode in episodes])
        log.metric("score", sum(scores) / len(scores))
        span = section.max_score - section.min_score
        return [(score - section.min_score) / span for score in scores]

    async def close(self) -> None:
        await self._endpoint.close()

    async def _ask(self, episode: EpisodeView) -> float:
        request = self._section.template.format(
            prompt=episode.prompt_text,
            completion=episode.completion,
            answer=_reference(episode),
        )
        return await self._endpoint.ask(request, self._parse)

    def _parse(self, reply: str) -> float:
        low, high = self._section.min_score, self._section.max_score
        found = _SCORE.findall(reply)
        if len(found) != 1:
            raise ValueError(f"expected <score>number</score> once, got {len(found)} of it")
        score = float(found[0])
        if not math.isfinite(score) or not low <= score <= high:
            raise ValueError(f"expected a score from {low:g} to {high:g}")
        return score


class PairwiseReward:
    """The share of comparisons that each episode of a group wins; a tie counts half."""

    def __init__(self, section: PairwiseJudge) -> None:
        self._section = section
        self._endpoint = Endpoint(section)

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        if len(episodes) < 2:
            return [None] * len(episodes)
        pairs = [
            (first, second)
            for first, second in permutations(range(len(episodes)), 2)
            if self._section.should_swap or first < second
        ]
        points = await _gathered([self._ask(episodes[a], episodes[b]) for a, b in pairs])
        won, played = [0.0] * len(episodes), [0] * len(episodes)
        for (first, second), point in zip(pairs, points, strict=True):
            won[first] += point
            won[second] += 1.0 - point
            played[first] += 1
            played[second] += 1
        log.metric("ties", sum(point == 0.5 for point in points) / len(points))
        return [share / count for share, count in zip(won, played, strict=True)]

    async def close(self) -> None:
        await self._endpoint.close()

    async def _ask(self, first: EpisodeView, second: EpisodeView) -> float:
        request = self._section.template.format(
            prompt=first.prompt_text,
            first=first.completion,
            second=second.completion,
            answer=_reference(first),
        )
        return await self._endpoint.ask(request, _points)


def _points(reply: str) -> float:
    """What the first of two gets."""
    found = [winner.strip().lower() for winner in _WINNER.findall(reply)]
    if len(found) != 1 or found[0] not in _POINTS:
        raise ValueError("expected <winner>A</winner>, B or tie once")
    return _POINTS[found[0]]


def _reference(episode: EpisodeView) -> str:
    return " / ".join(episode.prompt.answers)


async def _gathered(questions: Sequence[Coroutine[Any, Any, float]]) -> list[float]:
    """All answers; the first failure cancels the other questions."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(question) for question in questions]
    return [task.result() for task in running]
