"""Gathers finished episodes and sends them together: many small calls are what limits the replay.

Consumes episodes of many tasks; produces one call at a time. A sender waits for the outcome of its
own episode, unblocked by the answer to the call that carried it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from raylearner.codec import EpisodeBatch
from raylearner.types import Trajectory

Episode = list[Trajectory]
SendCall = Callable[[list[Episode]], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class _Parcel:
    episode: Episode
    arrived_at_s: float
    outcome: asyncio.Future[str]


class Outbox:
    """Owns episodes between the end of play and the replay's answer.

    At most one call is in flight; it carries up to `max_episodes`, in order of arrival, and leaves
    when so many wait or the first has waited `max_delay_s`. A call that fails raises in every sender
    whose episode it carried, so nothing is lost silently; later episodes go by the next call.
    """

    def __init__(
        self, call: SendCall, *, max_episodes: int = 64, max_delay_s: float = 0.02
    ) -> None:
        if max_episodes < 1:
            raise ValueError(f"max_episodes must be >= 1, got {max_episodes}")
        self._call = call
        self._max_episodes = max_episodes
        self._max_delay_s = max_delay_s
        self._parcels: deque[_Parcel] = deque()
        self._should_leave = asyncio.Event()
        self._courier: asyncio.Task[None] | None = None
        self._is_closed = False

    async def send(self, episode: Episode) -> str:
        """The replay's outcome for `episode`. A cancelled sender's episode is still sent."""
        if self._is_closed:
            raise RuntimeError("the outbox is closed")
        loop = asyncio.get_running_loop()
        parcel = _Parcel(episode, loop.time(), loop.create_future())
        self._parcels.append(parcel)
        if len(self._parcels) >= self._max_episodes:
            self._should_leave.set()
        if self._courier is None:
            self._courier = asyncio.create_task(self._deliver())
        return await parcel.outcome

    async def close(self) -> None:
        """Sends what waits, without delay, and takes nothing more."""
        self._is_closed = True
        self._should_leave.set()
        if self._courier is not None:
            await self._courier

    async def _deliver(self) -> None:
        """Runs while anything waits; an idle outbox has no task."""
        try:
            while self._parcels:
                await self._wait_for_company()
                count = min(len(self._parcels), self._max_episodes)
                await self._deliver_batch([self._parcels.popleft() for _ in range(count)])
        finally:
            self._courier = None
            for parcel in self._parcels:
                parcel.outcome.cancel()
            self._parcels.clear()

    async def _wait_for_company(self) -> None:
        if self._is_closed or len(self._parcels) >= self._max_episodes:
            return
        self._should_leave.clear()
        try:
            async with asyncio.timeout_at(self._parcels[0].arrived_at_s + self._max_delay_s):
                await self._should_leave.wait()
        except TimeoutError:
            pass

    async def _deliver_batch(self, batch: list[_Parcel]) -> None:
        try:
            outcomes = await self._call(EpisodeBatch(parcel.episode for parcel in batch))
            if len(outcomes) != len(batch):
                raise RuntimeError(f"{len(batch)} episodes sent, {len(outcomes)} outcomes received")
        except asyncio.CancelledError:
            for parcel in batch:
                parcel.outcome.cancel()
            raise
        except Exception as error:  # the senders decide; the courier goes on
            for parcel in batch:
                if not parcel.outcome.done():
                    parcel.outcome.set_exception(error)
            return
        for parcel, outcome in zip(batch, outcomes, strict=True):
            if not parcel.outcome.done():
                parcel.outcome.set_result(outcome)
