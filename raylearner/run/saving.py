"""Checkpoints beside training: what they hold is copied between two steps and written during the next.

Consumes the state of learner and replay; produces checkpoint directories. Waits for the previous
checkpoint before the next one starts, so that only one is ever in flight.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from raylearner.errors import CheckpointError, LearnerError
from raylearner.learner.checkpoint import checkpoint
from raylearner.learner.learner_group import LearnerGroup
from raylearner.observability.spans import Tracer

logger = logging.getLogger(__name__)


class Saver:
    """Owns the checkpoint in flight. What went wrong with it is raised by the next call.

    Raises `CheckpointError`, or `LearnerDied` where a rank is gone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        learner: LearnerGroup,
        replay: Any,
        keep_last: int,
        should_defer: bool,
        tracer: Tracer,
    ) -> None:
        """`folder` holds the checkpoints; without `should_defer` each is on disk when `start` returns."""
        self._folder = folder
        self._learner = learner
        self._replay = replay
        self._keep_last = keep_last
        self._should_defer = should_defer
        self._tracer = tracer
        self._running: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}
        self.step = -1
        """Of the last checkpoint that was begun."""

    async def start(self, step: int) -> None:
        """Begin the checkpoint of this step; no step may come before this returns."""
        started = time.monotonic()
        await self.wait()
        with self._failures_told(step), self._tracer.span("copy", step=step):
            async with AsyncExitStack() as stack:
                partial = await stack.enter_async_context(
                    checkpoint.writing(self._folder, step=step)
                )
                await asyncio.gather(
                    self._learner.save(partial, should_defer=self._should_defer),
                    self._replay.cut.remote(),
                )
                rest = stack.pop_all()
        self.step = step
        self._running = asyncio.create_task(self._finish(rest, partial, step), name="checkpoint")
        if not self._should_defer:
            await self.wait()
        self._metrics["checkpoint/stall_s"] = time.monotonic() - started

    async def wait(self) -> None:
        """Until the one in flight is whole."""
        running, self._running = self._running, None
        if running is None:
            return
        with self._failures_told(self.step):
            await running

    async def cancel(self) -> None:
        """Give up the one in flight: ranks that wrote it are gone, or the run is to end at once."""
        running, self._running = self._running, None
        self.step = -1
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def drain_metrics(self) -> dict[str, float]:
        """Of what happened since the last call."""
        drained, self._metrics = self._metrics, {}
        return drained

    @contextmanager
    def _failures_told(self, step: int) -> Iterator[None]:
        """As those of the checkpoint of this step; a rank that died stays one that a restart mends."""
        try:
            yield
        except (CheckpointError, LearnerError, OSError) as error:
            cause = getattr(error, "cause", error)  # what crossed Ray says its traceback as well
            raise CheckpointError(
                f"the checkpoint of step {step} was not written: {cause};"
                f" {checkpoint.advice(self._folder / f'step_{step:06d}')}"
            ) from error

    async def _finish(self, rest: AsyncExitStack, partial: Path, step: int) -> None:
        started = time.monotonic()
        with self._tracer.span("checkpoint", step=step):
            async with rest:
                writes = [self._replay.save.remote(str(partial / "replay"))]
                if self._should_defer:
                    writes.append(self._learner.finish_save())
                await asyncio.gather(*writes)
            await asyncio.to_thread(
                checkpoint.prune, self._folder, step=step, keep_last=self._keep_last
            )
        self._metrics["checkpoint/write_s"] = time.monotonic() - started
        logger.info(
            "checkpoint of step %d is whole, %.1f s after it was begun to be written",
            step,
            self._metrics["checkpoint/write_s"],
        )
