"""Finished episodes on their way to the replay, several in a call."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from raylearner.codec import EpisodeBatch
from raylearner.types import Trajectory

Episode = list[Trajectory]
SendCall = Callable[[list[Episode]], Awaitable[list[str]]]
"""Sends episodes, and returns the replay's outcome of each."""


class Outbox:
    """Sends finished episodes to the replay in batches, since many small calls would limit it.

    At most one call is in flight. It carries up to `max_episodes`, in order of arrival, and starts when
    that many are pending or the first has waited `max_delay_s`. A call that fails raises in every sender
    whose episode it carried; later episodes go with the next call.
    """

    def __init__(
        self, call: SendCall, *, max_episodes: int = 64, max_delay_s: float = 0.02
    ) -> None:
        self._call = call
        self._max_episodes = max_episodes
        self._max_delay_s = max_delay_s
        self._pending: deque[_PendingEpisode] = deque()
        self._is_full = asyncio.Event()
        self._flush_task: asyncio.Task[None] | None = None

    async def send(self, episode: Episode) -> str:
        """Return the replay's outcome for `episode`. A cancelled sender's episode is still sent."""
        loop = asyncio.get_running_loop()
        pending = _PendingEpisode(episode, loop.time(), loop.create_future())
        self._pending.append(pending)
        if len(self._pending) >= self._max_episodes:
            self._is_full.set()
        if self._flush_task is None:
            self._flush_task = asyncio.create_task(self._flush())
        return await pending.outcome

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent, or `timeout_s`."""
        if self._flush_task is not None:
            await asyncio.wait([self._flush_task], timeout=timeout_s)

    async def _flush(self) -> None:
        """Run while episodes are pending; an idle outbox has no task."""
        try:
            while self._pending:
                await self._wait_for_more()
                count = min(len(self._pending), self._max_episodes)
                await self._send_batch([self._pending.popleft() for _ in range(count)])
        finally:
            self._flush_task = None
            for pending in self._pending:
                pending.outcome.cancel()
            self._pending.clear()

    async def _wait_for_more(self) -> None:
        if len(self._pending) >= self._max_episodes:
            return
        self._is_full.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._pending[0].arrived_at_s + self._max_delay_s):
                await self._is_full.wait()

    async def _send_batch(self, batch: "list[_PendingEpisode]") -> None:
        try:
            outcomes = await self._call(EpisodeBatch(pending.episode for pending in batch))
            if len(outcomes) != len(batch):
                raise RuntimeError(f"{len(batch)} episodes sent, {len(outcomes)} outcomes received")
        except asyncio.CancelledError:
            for pending in batch:
                pending.outcome.cancel()
            raise
        except Exception as error:  # raised in the senders; the flush task continues
            for pending in batch:
                if not pending.outcome.done():
                    pending.outcome.set_exception(error)
            return
        for pending, outcome in zip(batch, outcomes, strict=True):
            if not pending.outcome.done():
                pending.outcome.set_result(outcome)


@dataclass(frozen=True, slots=True)
class _PendingEpisode:
    episode: Episode
    arrived_at_s: float
    outcome: asyncio.Future[str]
