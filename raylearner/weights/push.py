"""One weight update on its way from the learner to its members.

Waits for the learner's `send` and for every member's receipt, each bounded by the deadline. A member
that misses it or raises has failed; the others continue, unless the update is collective.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raylearner.errors import PushBroken, WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.update import WeightReceipt, WeightUpdate

log = logging.getLogger(__name__)

Receive = Callable[[WeightUpdate], Awaitable[WeightReceipt]]
OnFailed = Callable[[str, WeightTransferError], None]

BROKEN_GRACE_S = 5.0
"""Time for the other members of a collective push to fail too, after one has failed."""


class Transport(Protocol):
    """The learner's side of pushes, for any transport."""

    @property
    def is_stepping(self) -> bool:
        """Whether the learner is in a step, behind which a `write` must wait."""
        ...

    async def write(
        self, policy_version: PolicyVersion, members: Sequence[str]
    ) -> WeightUpdate: ...

    async def send(self, update: WeightUpdate) -> Mapping[str, float]:
        """Complete a collective update while its members receive it; return timings as metrics."""
        ...

    async def abandon(self, update: WeightUpdate) -> None:
        """End a `send` that cannot complete because a member failed."""
        ...

    async def discard(self, update: WeightUpdate) -> None:
        """Free the memory or files of an update that no engine reads any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """Outcome of a push by member: acknowledged, failed, or removed meanwhile."""

    receipts: Sequence[WeightReceipt]
    errors: Sequence[WeightTransferError]
    num_removed: int
    timings: Mapping[str, float]
    """Metrics of the learner's side."""


class Push:
    """Delivers one update to its members and reports each that fails at once.

    A collective update cannot outlive the loss of a member: the learner's side is abandoned, and members
    that are still blocked after a grace period fail as well, with `PushBroken`.
    """

    def __init__(
        self,
        transport: Transport,
        update: WeightUpdate,
        members: Mapping[str, Receive],
        *,
        on_failed: OnFailed,
        deadline_s: float,
    ) -> None:
        self._transport = transport
        self._update = update
        self._on_failed = on_failed
        self._deadline_s = deadline_s
        self._removed: set[str] = set()
        self._is_broken = False
        self._receiving = {
            actor_id: asyncio.create_task(self._receive(actor_id, receive))
            for actor_id, receive in members.items()
        }
        self._sending = asyncio.create_task(send(transport, update, deadline_s=deadline_s))

    async def wait(self) -> PushResult:
        """Wait until every member has acknowledged or failed.

        Raises `WeightTransferError` when the learner does not end its side, and any error of the
        learner itself.
        """
        tasks: set[asyncio.Task[Any]] = {self._sending, *self._receiving.values()}
        try:
            await self._wait_for_all(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        outcomes = [task.result() for task in self._receiving.values()]
        errors = [outcome for outcome in outcomes if isinstance(outcome, WeightTransferError)]
        version, timings = self._update.policy_version, {}
        if self._sending.cancelled():
            cause = f": {errors[0]}" if errors else ""
            raise WeightTransferError(
                f"the learner did not end the push of policy version {version}{cause}"
            )
        match self._sending.exception():
            case None:
                timings = self._sending.result()
            case WeightTransferError() as error:
                log.warning("policy version %d: %s", version, error)
            case error:
                raise error
        receipts = [outcome for outcome in outcomes if isinstance(outcome, WeightReceipt)]
        return PushResult(
            receipts=receipts,
            errors=errors,
            num_removed=outcomes.count(None),
            timings=timings,
        )

    def remove(self, actor_id: str) -> None:
        """Stop waiting for a member."""
        if (receiving := self._receiving.get(actor_id)) is not None:
            self._removed.add(actor_id)
            receiving.cancel()

    async def leave_learner(self) -> None:
        """Release the members after the learner's death.

        Members of a collective push fail with `PushBroken`; files that are complete are read to the
        end.
        """
        receiving = {a: task for a, task in self._receiving.items() if not task.done()}
        if not self._update.is_collective:
            if receiving:
                await asyncio.wait(receiving.values())
            return
        for actor_id in receiving:
            self.remove(actor_id)
            self._on_failed(
                actor_id, PushBroken(f"the learner died while {actor_id} received from it")
            )

    async def _wait_for_all(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Return once all have ended, or the grace period of a broken collective push is over."""
        ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        for _ in range(len(tasks)):
            task = await ended.get()
            if not self._update.is_collective or not _has_failed(task):
                continue
            if self._sending.done() and self._sending.exception() is None:
                continue  # all weights have arrived: the other engines verify theirs independently
            await self._transport.abandon(self._update)
            await asyncio.wait(tasks, timeout=BROKEN_GRACE_S)
            self._is_broken = True
            for task in self._receiving.values():
                task.cancel()
            await asyncio.wait(tasks, timeout=BROKEN_GRACE_S)
            return

    async def _receive(
        self, actor_id: str, receive: Receive
    ) -> WeightReceipt | WeightTransferError | None:
        """Return the receipt, the error with which the member failed, or None for one removed."""
        try:
            return await acknowledge(actor_id, receive, self._update, deadline_s=self._deadline_s)
        except asyncio.CancelledError:
            if actor_id in self._removed:
                return None
            if not self._is_broken:
                raise
            error: WeightTransferError = PushBroken(
                f"{actor_id} was blocked by the failure of another engine in the push of policy version "
                f"{self._update.policy_version}"
            )
        except WeightTransferError as caught:
            error = caught
        if actor_id in self._removed:
            return None
        log.warning("%s failed: %s", actor_id, error)
        self._on_failed(actor_id, error)
        return error


async def send(
    transport: Transport, update: WeightUpdate, *, deadline_s: float
) -> Mapping[str, float]:
    """Return the timings of the learner's side. Raises `WeightTransferError` after the deadline."""
    if not update.is_collective:
        return {}
    try:
        async with asyncio.timeout(deadline_s):
            return await transport.send(update)
    except TimeoutError as error:
        raise WeightTransferError(
            f"the learner did not send policy version {update.policy_version} within {deadline_s:g} s"
        ) from error


async def acknowledge(
    actor_id: str, receive: Receive, update: WeightUpdate, *, deadline_s: float
) -> WeightReceipt:
    """Return an engine's receipt of this update. Raises `WeightTransferError` for every failure."""
    version = update.policy_version
    try:
        async with asyncio.timeout(deadline_s):
            receipt = await receive(update)
    except TimeoutError as error:
        raise WeightTransferError(
            f"{actor_id} did not acknowledge policy version {version} within {deadline_s:g} s"
        ) from error
    except WeightTransferError:
        raise
    except Exception as error:
        raise WeightTransferError(
            f"{actor_id} failed to receive policy version {version}: {type(error).__name__}: {error}"
        ) from error
    if receipt.policy_version != version:
        raise WeightTransferError(
            f"{actor_id} acknowledged policy version {receipt.policy_version} instead of {version}"
        )
    return receipt


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.exception() is not None or not isinstance(task.result(), WeightReceipt | Mapping)
