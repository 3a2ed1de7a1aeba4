"""An engine under watch: one whose every request fails is dead, although it does not say so."""

from collections.abc import Callable, Sequence

from raylearner.actors.engines.engine import Engine
from raylearner.errors import EngineDead, EngineError
from raylearner.types import Completion, CompletionStop, PolicyVersion, Sampling
from raylearner.weights.update import WeightReceipt, WeightUpdate

MAX_FAILED_IN_ROW = 12
"""Number of requests that fail in a row, without one that succeeds, of an engine that is given up."""
MIN_DIFFERENT = 2
"""Minimum number of different requests among these: some prompts fail on every engine."""


class WatchedEngine:
    """Implements `Engine` around another; `on_death` is called with the cause, once, when it dies.

    It is called before the first request raises `EngineDead`.
    """

    def __init__(self, engine: Engine, *, on_death: Callable[[str], None]) -> None:
        self._engine = engine
        self._on_death = on_death
        self._num_begun = 0
        self._running: set[int] = set()
        self._num_failed = 0  # in a row
        self._failed: set[int] = set()
        self._older_than = 0  # requests that began before the first of these failures
        self._cause: str | None = None

    @property
    def policy_version(self) -> PolicyVersion:
        return self._engine.policy_version

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion:
        if self._cause is not None:
            raise EngineDead(self._cause)
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._running.add(number)
        try:
            completion = await self._engine.generate(token_ids, sampling, images=images)
        except EngineDead as error:
            self._declare(str(error))
            raise
        except EngineError as error:
            self._running.discard(number)
            if not self._is_last_straw(hash(tuple(token_ids))):
                raise
            cause = f"{self._num_failed} requests in a row failed, the last one: {error}"
            self._declare(cause)
            raise EngineDead(cause) from error
        finally:
            self._running.discard(number)
        if completion.stop_reason is not CompletionStop.ABORTED:
            self._num_failed = 0
            self._failed.clear()
        return completion

    async def watch(self) -> None:
        """Return when the engine died, after `on_death`, even while it is idle."""
        self._declare(await self._engine.died())

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        return await self._engine.receive(update)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def abort(self) -> None:
        await self._engine.abort()

    async def died(self) -> str:
        return await self._engine.died()

    async def close(self) -> None:
        await self._engine.close()

    def _is_last_straw(self, request: int) -> bool:
        """Count a failure. While a request from before the first one runs, it may still succeed."""
        if not self._num_failed:
            self._older_than = self._num_begun
        self._num_failed += 1
        self._failed.add(request)
        return (
            self._num_failed >= MAX_FAILED_IN_ROW
            and len(self._failed) >= MIN_DIFFERENT
            and all(number >= self._older_than for number in self._running)
        )

    def _declare(self, cause: str) -> None:
        if self._cause is None:
            self._cause = cause
            self._on_death(cause)
