"""Scripts with faults for the scripted engine."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.scripts import number_of_process
from raylearner.actors.engines.scripted import RandomTokens
from raylearner.errors import EngineDead, EngineError
from raylearner.types import Sampling


class Fails(RandomTokens):
    """Raises in a share of the calls."""

    def __init__(self, *, share: float, **arguments: int) -> None:
        super().__init__(**arguments)
        self._share = share

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        if random.random() < self._share:
            raise EngineError("the scripted engine lost the request")
        return await super().complete(token_ids, sampling)


class Hangs(RandomTokens):
    """Answers `num_calls` times and never again."""

    def __init__(self, *, num_calls: int, **arguments: int) -> None:
        super().__init__(**arguments)
        self._left = num_calls

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(3600)
        return await super().complete(token_ids, sampling)


class Dies(RandomTokens):
    """Answers `num_calls` times, then is dead: in the first process that makes the file `flag`, or in all."""

    def __init__(self, *, num_calls: int, flag: str | None = None, **arguments: int) -> None:
        super().__init__(**arguments)
        self._left = num_calls
        self._flag = None if flag is None else Path(flag)
        self._is_mortal: bool | None = None if flag else True

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self._left -= 1
        if self._left < 0 and self._dies():
            raise EngineDead("the scripted engine died")
        return await super().complete(token_ids, sampling)

    def _dies(self) -> bool:
        if self._is_mortal is None:
            assert self._flag is not None
            try:
                self._flag.touch(exist_ok=False)
                self._is_mortal = True
            except FileExistsError:
                self._is_mortal = False
        return self._is_mortal


class NeverStarts:
    def __init__(self) -> None:
        raise ValueError("no engine today")


class StartsBadly(RandomTokens):
    """After `good` starts one raises and one ends its process; files in `folder` count the starts."""

    def __init__(self, *, folder: str, good: int, **arguments: int) -> None:
        number = number_of_process(folder)
        if number == good:
            raise ValueError("no engine today")
        if number == good + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(**arguments)
