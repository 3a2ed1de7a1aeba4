"""Rewards whose check runs in a process of its own: mathematics and reasoning-gym tasks."""

import logging
from collections.abc import Sequence
from typing import Any, cast

from raylearner.config.rewards import CheckedAnswer
from raylearner.rewards.checker import Checker, CheckFailed, CheckTimeout
from raylearner.rewards.functions import EpisodeView, RewardLog, last_answer
from raylearner.rewards.matches import composed
from raylearner.types import Prompt

TASK_COLUMN = "reasoning_gym"
"""Column of a prompt that its reasoning-gym task fills: `task`, `parameters` and `entry`."""


logger = logging.getLogger(__name__)


class CheckedReward:
    """An answer that cannot be checked counts as wrong: it is the policy that wrote it.

    The metrics `timeouts` and `failures` count those whose check took too long or raised.
    """

    def __init__(self, section: CheckedAnswer) -> None:
        self._section = section
        self._checker = Checker(
            library=section.kind,
            num_processes=section.num_processes,
            timeout_s=section.check_timeout_s,
        )

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        scores: list[float | None] = []
        num_timeouts = num_failures = 0
        for episode in episodes:
            try:
                scores.append(await self._score(episode))
            except CheckTimeout:
                scores.append(0.0)
                num_timeouts += 1
            except CheckFailed as error:
                logger.info("an answer to %r counts as wrong: %s", episode.prompt.prompt_id, error)
                scores.append(0.0)
                num_failures += 1
        log.metric("timeouts", num_timeouts)
        log.metric("failures", num_failures)
        return scores

    async def close(self) -> None:
        await self._checker.close()

    async def _score(self, episode: EpisodeView) -> float | None:
        """A blank answer earns nothing, whatever the library would say of it."""
        given = last_answer(episode, self._section.answer_tag)
        if self._section.kind == "math_verify":
            return await self._score_math(episode.prompt, given)
        task = cast(dict[str, Any] | None, episode.prompt.columns.get(TASK_COLUMN))
        if task is None:
            return None
        if not given.strip():
            return 0.0
        return await self._checker.check(
            "reasoning", task["task"], task["parameters"], task["entry"], given
        )

    async def _score_math(self, prompt: Prompt, given: str) -> float | None:
        golds = tuple(gold for answer in prompt.answers if (gold := composed(answer)))
        if not golds:
            return None
        return await self._checker.check("math", golds, composed(given))
