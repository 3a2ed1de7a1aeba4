"""Publishes policy versions to every engine while they generate, one push at a time.

Consumes versions from the controller; produces weight updates for the members' `receive`. Waits for the
transport's `write`, bounded by the deadline (time behind a learner step does not count), and for the
`Push` of each update.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raylearner.errors import PushBroken, WeightTransferError
from raylearner.observability.spans import Tracer
from raylearner.types import PolicyVersion
from raylearner.weights.push import (
    OnFailed,
    Push,
    PushResult,
    Receive,
    Transport,
    acknowledge,
    send,
)
from raylearner.weights.update import WeightUpdate

log = logging.getLogger(__name__)

STEP_POLL_S = 0.5
"""Interval between checks whether a `write` is still waiting for a learner step."""


@dataclass(slots=True, eq=False)
class _Written:
    """An update that joiners may still read."""

    update: WeightUpdate
    num_readers: int = 0


class Publisher:
    """Owns the membership and the published version; promises one push at a time, the newest last.

    `Transport.write` may return a later version than requested: an update's own `policy_version`
    counts. The last update stays available to joiners; the one before is discarded once every
    member has acknowledged or failed. A collective update serves the members of one push only:
    joiners get a separate push, and after the loss of a member the next push re-forms the process
    group.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_failed: OnFailed,
        deadline_s: float,
        max_failed_pushes: int = 1,
        is_first: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        """`on_failed` is called with each member that failed and is therefore no longer one.

        After `max_failed_pushes` in a row that reached no engine, the last error is raised; with
        `is_first` after one, until a push has reached an engine.
        """
        self._transport = transport
        self._report_failed = on_failed
        self._deadline_s = deadline_s
        self._max_failed_pushes = max_failed_pushes
        self._has_reached_none = is_first
        self._num_failed_in_row = 0
        self._tracer = tracer or Tracer("publisher", is_enabled=False)
        self._members: dict[str, Receive] = {}
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._push: Push | None = None
        self._waiting: PolicyVersion | None = None
        self._published: PolicyVersion | None = None
        self._last: _Written | None = None
        self._stale: list[_Written] = []
        self._metrics: dict[str, float] = {}
        self._is_closed = False

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self._members)

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The last version that every member acknowledged."""
        return self._published

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last push; empty before the first."""
        return self._metrics

    @property
    def is_publishing(self) -> bool:
        return self._running is not None and not self._running.done()

    def add(self, actor_id: str, receive: Receive) -> None:
        """Add an engine that has the last published version, or that exists before the first."""
        if actor_id in self._members:
            raise ValueError(f"{actor_id!r} is already a member")
        self._members[actor_id] = receive

    def remove(self, actor_id: str) -> None:
        """Remove an engine; a running push no longer waits for it."""
        self._members.pop(actor_id, None)
        if self._push is not None:
            self._push.remove(actor_id)

    async def dismiss(self, actor_id: str) -> None:
        """Remove an engine that ends on request, after the push in flight, which others may share."""
        async with self._lock:
            self._members.pop(actor_id, None)

    async def admit(self, actor_id: str, receive: Receive) -> None:
        """Bring a joiner to the current version, then add it. Raises what `receive` raises."""
        if actor_id in self._members:
            raise ValueError(f"{actor_id!r} is already a member")
        if self._last is not None and self._last.update.is_collective:
            await self._admit_alone(actor_id, receive, self._last.update.policy_version)
            return
        received: _Written | None = None
        while self._last is not None and self._last is not received:
            received = self._last
            received.num_readers += 1
            try:
                await acknowledge(actor_id, receive, received.update, deadline_s=self._deadline_s)
            finally:
                received.num_readers -= 1
                await self._discard_stale()
        self.add(actor_id, receive)

    def start(self, policy_version: PolicyVersion) -> None:
        """Start a push and return; behind a running push only the last requested version waits.

        Raises the error of the last push in the background.
        """
        if self.is_publishing:
            self._waiting = policy_version
            return
        self._raise_failure()
        self._running = asyncio.create_task(self._publish_all(policy_version), name="publish")

    async def publish(self, policy_version: PolicyVersion) -> None:
        """Push, and return once every member has acknowledged or failed."""
        self.start(policy_version)
        await self.finish()

    async def finish(self) -> None:
        """Wait for the running push and the waiting one. Raises what they raised."""
        if self._running is not None:
            await asyncio.wait([self._running])
            self._raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a push in the background that has ended."""
        if not self.is_publishing:
            self._raise_failure()

    async def break_off(self) -> None:
        """Release every engine from its push after the learner's death, then close.

        No call of the transport is left when this returns.
        """
        self._is_closed = True
        if self._push is not None:
            await self._push.leave_learner()
        await self.close()
        async with self._lock:  # an admission that had begun
            pass

    async def close(self) -> None:
        """Stop publishing and discard all updates."""
        self._is_closed = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        self._members.clear()
        self._replace_last(None)
        await self._discard_stale()

    def _raise_failure(self) -> None:
        finished, self._running = self._running, None
        if finished is not None:
            finished.result()

    async def _publish_all(self, policy_version: PolicyVersion) -> None:
        await self._try_to_publish(policy_version)
        while self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            if waiting != self._published:
                await self._try_to_publish(waiting)

    async def _try_to_publish(self, policy_version: PolicyVersion) -> None:
        """Push; one that fails is tried again where members are left, and given to those that join.

        Raises the error of the last of too many in a row.
        """
        try:
            await self._publish_one(policy_version)
        except WeightTransferError as error:
            self._num_failed_in_row += 1
            limit = 1 if self._has_reached_none else self._max_failed_pushes
            if self._num_failed_in_row >= limit:
                raise
            log.warning(
                "a weight push failed, number %d of at most %d in a row (weights.max_failed_pushes); %s: %s",
                *(self._num_failed_in_row, limit),
                "it is retried" if self._members else "replacement engines will load the weights",
                error,
            )
            if self._members and self._waiting is None:
                self._waiting = policy_version

    async def _publish_one(self, policy_version: PolicyVersion) -> None:
        async with self._lock:
            with self._tracer.span("push", version=policy_version):
                started = time.monotonic()
                update, members = await self._write_for_members(policy_version)
                write_s = time.monotonic() - started
                self._replace_last(_Written(update))
                try:
                    self._push = self._make_push(update, members, on_failed=self._fail)
                    result = await self._push.wait()
                finally:
                    self._push = None
                if update.is_collective:
                    await self._transport.discard(update)
                await self._discard_stale()
                publish_s = time.monotonic() - started
                self._metrics = _metrics(result, publish_s=publish_s, write_s=write_s)
        if result.receipts:
            self._num_failed_in_row, self._has_reached_none = 0, False
        if result.receipts or not result.errors:
            self._published = update.policy_version
            return
        num_members = len(result.errors) + result.num_removed
        message = f"policy version {update.policy_version} reached none of {num_members} engines"
        at_fault = [error for error in result.errors if not isinstance(error, PushBroken)]
        if len(at_fault) == num_members:
            raise WeightTransferError(f"{message}; first error: {at_fault[0]}") from at_fault[0]
        log.warning("%s; their replacements will receive it", message)

    async def _admit_alone(
        self, actor_id: str, receive: Receive, policy_version: PolicyVersion
    ) -> None:
        async with self._lock:
            if self._is_closed:
                return  # the next publisher brings the weights
            update = await self._write(policy_version, (actor_id,))
            push = self._make_push(update, {actor_id: receive}, on_failed=lambda *_: None)
            try:
                result = await push.wait()
            finally:
                await self._transport.discard(update)
            if result.errors:
                raise result.errors[0]
            self.add(actor_id, receive)

    def _make_push(
        self, update: WeightUpdate, members: Mapping[str, Receive], *, on_failed: OnFailed
    ) -> Push:
        return Push(
            self._transport, update, members, on_failed=on_failed, deadline_s=self._deadline_s
        )

    async def _write_for_members(
        self, policy_version: PolicyVersion
    ) -> tuple[WeightUpdate, dict[str, Receive]]:
        """Write, again if the members of a collective update changed meanwhile."""
        while True:
            members = dict(self._members)
            with self._tracer.span("write"):
                update = await self._write(policy_version, tuple(members))
            if not update.is_collective:
                return update, dict(self._members)
            if members == self._members:
                return update, members
            await self._transport.abandon(update)
            with contextlib.suppress(WeightTransferError):
                await send(self._transport, update, deadline_s=self._deadline_s)
            await self._transport.discard(update)

    async def _write(self, policy_version: PolicyVersion, members: Sequence[str]) -> WeightUpdate:
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                extending = asyncio.create_task(self._extend_while_stepping(limit))
                try:
                    update = await self._transport.write(policy_version, members)
                finally:
                    extending.cancel()
        except TimeoutError as error:
            raise WeightTransferError(
                f"the learner did not write policy version {policy_version} within "
                f"{self._deadline_s:g} s"
            ) from error
        if update.policy_version < policy_version:
            raise WeightTransferError(
                f"the learner wrote policy version {update.policy_version} instead of {policy_version}"
            )
        return update

    async def _extend_while_stepping(self, limit: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        while not limit.expired():
            if self._transport.is_stepping:
                limit.reschedule(loop.time() + self._deadline_s)
            await asyncio.sleep(min(STEP_POLL_S, self._deadline_s / 4))

    def _fail(self, actor_id: str, error: WeightTransferError) -> None:
        self._members.pop(actor_id, None)
        self._report_failed(actor_id, error)

    def _replace_last(self, written: _Written | None) -> None:
        if self._last is not None and not self._last.update.is_collective:
            self._stale.append(self._last)
        self._last = written

    async def _discard_stale(self) -> None:
        ready = [written for written in self._stale if not written.num_readers]
        self._stale = [written for written in self._stale if written.num_readers]
        for written in ready:
            await self._transport.discard(written.update)


def _metrics(result: PushResult, *, publish_s: float, write_s: float) -> dict[str, float]:
    def largest(field: str) -> float:
        return max((getattr(receipt, field) for receipt in result.receipts), default=0.0)

    metrics = {
        "weights/publish_s": publish_s,
        "weights/write_s": write_s,
        "weights/stage_s": largest("stage_s"),
        "weights/pause_s": largest("pause_s"),
        "weights/update_s": largest("update_s"),
        "weights/probe_s": largest("probe_s"),
        "weights/logprob_error": largest("logprob_error"),
        "weights/recomputed_tokens": float(sum(r.num_recomputed for r in result.receipts)),
        "weights/num_engines": float(len(result.receipts)),
        **result.timings,
    }
    if any(receipt.num_verified for receipt in result.receipts):  # scripted engines have no weights
        metrics["weights/verify_s"] = largest("verify_s")
        metrics["weights/verify_tensors"] = float(
            min(receipt.num_verified for receipt in result.receipts)
        )
    return metrics
