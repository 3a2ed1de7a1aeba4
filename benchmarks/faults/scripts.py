"""Scripts for the scripted engine that fail as real engines do, and a group reward."""

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylearner.actors.engines.scripted import RandomTokens
from raylearner.errors import EngineDead
from raylearner.rewards.functions import EpisodeView
from raylearner.types import Sampling


def no_bonus(episodes: Sequence[EpisodeView]) -> list[float]:
    """A group reward that changes nothing: its actor is there to be killed."""
    return [0.0 for _ in episodes]


class Hangs(RandomTokens):
    """A share of the calls is never answered, like requests lost in a tool or an engine."""

    def __init__(self, *, share: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._share = share

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        if random.random() < self._share:
            await asyncio.sleep(36_000)
        return await super().complete(token_ids, sampling)


class DeadCore(RandomTokens):
    """One process of a run fails in every call after its first `num_calls`, like vLLM without its core."""

    def __init__(self, *, num_calls: int, folder: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._left = num_calls
        self._is_first = number_of_process(folder) == 0

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self._left -= 1
        if self._is_first and self._left < 0:
            raise EngineDead("vLLM died: EngineDeadError")
        return await super().complete(token_ids, sampling)


class BadStart(RandomTokens):
    """The processes numbered `bad` do not start, and all others do."""

    def __init__(self, *, folder: str, bad: Sequence[int], **arguments: Any) -> None:
        super().__init__(**arguments)
        if number_of_process(folder) in bad:
            raise ValueError("port 29500 is in use")


def number_of_process(folder: str) -> int:
    """Return how many processes asked before, by the files that they left in `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            number += 1
