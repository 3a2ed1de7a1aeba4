"""Scripts with faults for the scripted engine."""

import asyncio
import random
from collections.abc import Sequence

from raylearner.actors.engines.scripted import RandomTokens
from raylearner.errors import EngineError
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


class NeverStarts:
    def __init__(self) -> None:
        raise ValueError("no engine today")
