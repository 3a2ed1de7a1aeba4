"""Scripts for the scripted engine that fail as real engines do, and a group reward."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylearner.actors.engines.scripted import RandomTokens
from raylearner.errors import EngineDead, EngineError
from raylearner.rewards.functions import EpisodeView
from raylearner.types import Sampling


def no_bonus(episodes: Sequence[EpisodeView]) -> list[float]:
    """A group reward that changes nothing: its actor is there to be killed."""
    return [0.0 for _ in episodes]


class Fails(RandomTokens):
    """A share of the calls raises."""

    def __init__(self, *, share: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._share = share

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        if random.random() < self._share:
            raise EngineError("the scripted engine lost the request")
        return await super().complete(token_ids, sampling)


class Hangs(RandomTokens):
    """After `num_calls`, a share of the calls is never answered, like requests lost in a tool or an engine."""

    def __init__(self, *, share: float = 1.0, num_calls: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._share, self._left = share, num_calls

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self._left -= 1
        if self._left < 0 and random.random() < self._share:
            await asyncio.sleep(36_000)
        return await super().complete(token_ids, sampling)


class Dies(RandomTokens):
    """Fails in every call after the first `num_calls`, like vLLM without its core: in every process, or in
    the first of those that share `folder`."""

    def __init__(self, *, num_calls: int, folder: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._left = num_calls
        self._is_mortal = folder is None or number_of_process(folder) == 0

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self._left -= 1
        if self._is_mortal and self._left < 0:
            raise EngineDead("vLLM died: EngineDeadError")
        return await super().complete(token_ids, sampling)


class NeverStarts:
    def __init__(self) -> None:
        raise ValueError("no engine today")


class BadStart(RandomTokens):
    """Of the processes that share `folder`, those numbered `bad` do not start, and those in `killed` end."""

    def __init__(
        self,
        *,
        folder: str,
        bad: Sequence[int],
        killed: Sequence[int] = (),
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        number = number_of_process(folder)
        if number in bad:
            raise ValueError("port 29500 is in use")
        if number in killed:
            os.kill(os.getpid(), signal.SIGKILL)


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
