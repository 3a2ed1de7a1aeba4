"""Publishes policy versions to every engine, under running generations, one push at a time.

Consumes versions from the controller; produces weight updates for the members' `receive`. Waits
for the learner's `write` and for every member's receipt, each bounded by the deadline (a write may
queue behind a step, which does not count); whoever misses it or raises is condemned, which unblocks
the push.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from raylearner.errors import PushBroken, WeightTransferError
from raylearner.observability.spans import Tracer
from raylearner.types import PolicyVersion, WeightReceipt, WeightUpdate
from raylearner.weights.deadlines import acknowledged, sent, written

logger = logging.getLogger(__name__)

Write = Callable[[PolicyVersion, Sequence[str]], Awaitable[WeightUpdate]]
Receive = Callable[[WeightUpdate], Awaitable[WeightReceipt]]
Discard = Callable[[WeightUpdate], Awaitable[None]]
Settle = Callable[[WeightUpdate], Awaitable[Mapping[str, float]]]
OnCondemned = Callable[[str, WeightTransferError], None]

BROKEN_GRACE_S = 5.0
"""In a push that all members take together: time for the others to fail too once one has failed."""


class Publisher:
    """Owns the membership and the last update; promises one push at a time, the last asked for last.

    `write(policy_version, members)` may return a later version than asked for: an update's own
    `policy_version` is what it holds. The last update stays available for joiners; the one before
    it is discarded once every member has acknowledged or been condemned.

    A collective update is made for the members of one push: the learner sends while they receive,
    and `settle` tells how that went. It cannot outlive the loss of a member: `abandon` ends the
    learner's side, whoever is left hanging is condemned as well, with `PushBroken`, and the next push
    meets anew. It is of no use to joiners, who get a push of their own.
    """

    def __init__(
        self,
        *,
        write: Write,
        discard: Discard,
        on_condemned: OnCondemned,
        deadline_s: float,
        settle: Settle | None = None,
        abandon: Discard | None = None,
        is_learner_busy: Callable[[], bool] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer or Tracer("publisher", is_enabled=False)
        self._settle = settle
        self._abandon = abandon
        self._is_learner_busy = is_learner_busy or (lambda: False)
        self._pushing = asyncio.Lock()
        self._broken: set[str] = set()
        self._write = write
        self._discard = discard
        self._on_condemned = on_condemned
        self._deadline_s = deadline_s
        self._members: dict[str, Receive] = {}
        self._receiving: dict[str, asyncio.Task[WeightReceipt]] = {}
        self._running: asyncio.Task[None] | None = None
        self._waiting: PolicyVersion | None = None
        self._last: WeightUpdate | None = None
        self._stale: list[WeightUpdate] = []
        self._readers: Counter[int] = Counter()
        self._metrics: dict[str, float] = {}
        self._published: PolicyVersion | None = None

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self._members)

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The last version that every member acknowledged."""
        return self._published

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the last push took; empty before the first."""
        return self._metrics

    @property
    def is_publishing(self) -> bool:
        return self._running is not None and not self._running.done()

    def add(self, actor_id: str, receive: Receive) -> None:
        """Count an engine that already plays the last published version, or before any was."""
        if actor_id in self._members:
            raise ValueError(f"{actor_id!r} is a member already")
        self._members[actor_id] = receive

    def remove(self, actor_id: str) -> None:
        """Forget an engine; a push no longer waits for it."""
        self._members.pop(actor_id, None)
        if (receiving := self._receiving.get(actor_id)) is not None:
            receiving.cancel()

    async def admit(self, actor_id: str, receive: Receive) -> None:
        """Bring a joiner to the current version, then count it; what it raises is the caller's."""
        if actor_id in self._members:
            raise ValueError(f"{actor_id!r} is a member already")
        if self._last is not None and self._last.is_collective:
            await self._admit_alone(actor_id, receive, self._last.policy_version)
            return
        received: WeightUpdate | None = None
        while self._last is not None and self._last is not received:
            update = self._last
            self._readers[id(update)] += 1
            try:
                await acknowledged(actor_id, receive(update), update, deadline_s=self._deadline_s)
            finally:
                self._readers[id(update)] -= 1
                await self._discard_stale()
            received = update
        self.add(actor_id, receive)

    def start(self, policy_version: PolicyVersion) -> None:
        """Begin a push and return; behind a running one, only the version asked for last waits."""
        if self.is_publishing:
            self._waiting = policy_version
            return
        self._raise_failure()
        self._running = asyncio.create_task(self._publish_all(policy_version), name="publish")

    async def publish(self, policy_version: PolicyVersion) -> None:
        """Push, and return once every member has acknowledged or been condemned."""
        self.start(policy_version)
        await self.settle()

    async def settle(self) -> None:
        """Wait for the running push and the waiting one; raises what they raised."""
        if self._running is not None:
            await asyncio.wait([self._running])
            self._raise_failure()

    async def break_off(self) -> None:
        """After the learner's death: close, and leave no engine in a push.

        Whoever waits for what cannot come is condemned with `PushBroken`; what is written already may
        be read to the end.
        """
        receiving = dict(self._receiving)
        if self._last is not None and self._last.is_collective:
            for actor_id in receiving:
                self._members.pop(actor_id, None)
                self._on_condemned(
                    actor_id, PushBroken(f"the learner died while {actor_id} received from it")
                )
        elif receiving:
            await asyncio.wait(list(receiving.values()))
        await self.close()

    async def close(self) -> None:
        """Stop publishing and discard what was written."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None
        self._members.clear()
        if self._last is not None and not self._last.is_collective:
            self._stale.append(self._last)
        self._last = None
        await self._discard_stale()

    def _raise_failure(self) -> None:
        finished, self._running = self._running, None
        if finished is not None:
            finished.result()

    async def _publish_all(self, policy_version: PolicyVersion) -> None:
        await self._push(policy_version)
        while self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            if waiting != self._published:
                await self._push(waiting)

    async def _admit_alone(
        self, actor_id: str, receive: Receive, policy_version: PolicyVersion
    ) -> None:
        async with self._pushing:
            update = await self._written(policy_version, (actor_id,))
            received = asyncio.create_task(
                acknowledged(actor_id, receive(update), update, deadline_s=self._deadline_s),
                name="admit",
            )
            settled = asyncio.create_task(self._settled(update), name="settle")
            try:
                await asyncio.gather(received, settled)
            except BaseException:
                if self._abandon is not None:
                    await self._abandon(update)
                raise
            finally:
                received.cancel()
                settled.cancel()
                await self._discard(update)
            self.add(actor_id, receive)

    async def _push(self, policy_version: PolicyVersion) -> None:
        async with self._pushing:
            with self._tracer.span("push", version=policy_version):
                await self._push_alone(policy_version)

    async def _push_alone(self, policy_version: PolicyVersion) -> None:
        started = time.monotonic()
        update, members = await self._written_for_members(policy_version)
        write_s = time.monotonic() - started
        if self._last is not None and not self._last.is_collective:
            self._stale.append(self._last)
        self._last = update
        outcomes, timings = await self._deliver(update, members)
        receipts = [outcome for outcome in outcomes if isinstance(outcome, WeightReceipt)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, WeightTransferError)]
        if update.is_collective:
            await self._discard(update)
        await self._discard_stale()
        self._metrics = {
            "weights/publish_s": time.monotonic() - started,
            "weights/write_s": write_s,
            "weights/pause_s": max((r.pause_s for r in receipts), default=0.0),
            "weights/update_s": max((r.update_s for r in receipts), default=0.0),
            "weights/probe_s": max((r.probe_s for r in receipts), default=0.0),
            "weights/logprob_error": max((r.logprob_error for r in receipts), default=0.0),
            "weights/num_engines": float(len(receipts)),
            **_verified(receipts),
            **timings,
        }
        if not errors or receipts:
            self._published = update.policy_version
            return
        own = [error for error in errors if not isinstance(error, PushBroken)]
        said = f"policy version {update.policy_version} reached none of {len(outcomes)} engines"
        if len(own) == len(outcomes):
            raise WeightTransferError(f"{said}; the first: {own[0]}") from own[0]
        logger.warning("%s; those that replace them get it", said)

    async def _written_for_members(
        self, policy_version: PolicyVersion
    ) -> tuple[WeightUpdate, dict[str, Receive]]:
        """Once more where members of a push that they take together changed meanwhile."""
        while True:
            members = dict(self._members)
            with self._tracer.span("write"):
                update = await self._written(policy_version, tuple(members))
            if not update.is_collective:
                return update, dict(self._members)
            if members == self._members:
                return update, members
            if self._abandon is not None:
                await self._abandon(update)
            with contextlib.suppress(WeightTransferError):
                await self._settled(update)
            await self._discard(update)

    async def _written(self, policy_version: PolicyVersion, members: Sequence[str]) -> WeightUpdate:
        return await written(
            self._write(policy_version, members),
            policy_version,
            deadline_s=self._deadline_s,
            is_busy=self._is_learner_busy,
        )

    async def _deliver(
        self, update: WeightUpdate, members: Mapping[str, Receive]
    ) -> tuple[list[WeightReceipt | WeightTransferError | None], Mapping[str, float]]:
        """What became of each member, and the timings of the learner's side."""
        receipts = {
            actor_id: asyncio.create_task(self._receipt(actor_id, receive, update))
            for actor_id, receive in members.items()
        }
        settled = asyncio.create_task(self._settled(update), name="settle")
        tasks: set[asyncio.Task[Any]] = {settled, *receipts.values()}
        try:
            await self._wait_for_all(update, tasks, receipts, settled)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        outcomes = [task.result() for task in receipts.values()]
        if settled.cancelled():
            first = next((o for o in outcomes if isinstance(o, WeightTransferError)), None)
            raise WeightTransferError(
                f"the learner did not end the push of policy version {update.policy_version}"
                + (f", which broke because {first}" if first else "")
            )
        error = settled.exception()
        if error is not None and not isinstance(error, WeightTransferError):
            raise error
        if error is not None:
            logger.warning("policy version %d: %s", update.policy_version, error)
            return outcomes, {}
        return outcomes, settled.result()

    async def _wait_for_all(
        self,
        update: WeightUpdate,
        pending: set[asyncio.Task[Any]],
        receipts: Mapping[str, asyncio.Task[Any]],
        settled: asyncio.Task[Mapping[str, float]],
    ) -> None:
        """Until all have ended, or a collective push is broken and its grace is over."""
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            has_failed = any(
                task.exception() is not None
                or not isinstance(task.result(), WeightReceipt | Mapping)
                for task in done
            )
            is_sent = settled.done() and settled.exception() is None
            if not (update.is_collective and has_failed) or is_sent:
                continue
            if self._abandon is not None:
                await self._abandon(update)
            if pending:
                _, pending = await asyncio.wait(pending, timeout=BROKEN_GRACE_S)
            for actor_id, task in receipts.items():
                if task in pending and (receiving := self._receiving.get(actor_id)) is not None:
                    self._broken.add(actor_id)
                    receiving.cancel()
            if pending:
                await asyncio.wait(pending, timeout=BROKEN_GRACE_S)
            return

    async def _settled(self, update: WeightUpdate) -> Mapping[str, float]:
        if self._settle is None or not update.is_collective:
            return {}
        return await sent(self._settle(update), update, deadline_s=self._deadline_s)

    async def _receipt(
        self, actor_id: str, receive: Receive, update: WeightUpdate
    ) -> WeightReceipt | WeightTransferError | None:
        """The receipt, the error that condemned the engine, or None for one removed meanwhile."""
        receiving = asyncio.ensure_future(
            acknowledged(actor_id, receive(update), update, deadline_s=self._deadline_s)
        )
        self._receiving[actor_id] = receiving
        try:
            await asyncio.wait([receiving])
        finally:
            del self._receiving[actor_id]
            receiving.cancel()
        is_broken = actor_id in self._broken
        self._broken.discard(actor_id)
        if self._members.get(actor_id) is not receive:
            return None
        try:
            if is_broken and receiving.cancelled():
                raise PushBroken(
                    f"{actor_id} was left hanging when another member of the push of policy version "
                    f"{update.policy_version} failed"
                )
            return receiving.result()
        except WeightTransferError as error:
            logger.warning("%s is condemned: %s", actor_id, error)
            del self._members[actor_id]
            self._on_condemned(actor_id, error)
            return error

    async def _discard_stale(self) -> None:
        ready = [update for update in self._stale if self._readers[id(update)] == 0]
        self._stale = [update for update in self._stale if self._readers[id(update)] > 0]
        for update in ready:
            del self._readers[id(update)]
            await self._discard(update)


def _verified(receipts: Sequence[WeightReceipt]) -> dict[str, float]:
    """Of engines that hold weights; scripted ones have none to verify."""
    if not any(receipt.num_verified for receipt in receipts):
        return {}
    return {
        "weights/verify_s": max(receipt.verify_s for receipt in receipts),
        "weights/verify_tensors": float(min(receipt.num_verified for receipt in receipts)),
    }
