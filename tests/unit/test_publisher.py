"""The publisher: one push at a time, the newest waits, whoever fails is condemned alone."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from raylearner.errors import PushBroken, WeightTransferError
from raylearner.types import Probe, WeightReceipt, WeightUpdate
from raylearner.weights import publisher
from raylearner.weights.publisher import Publisher

PROBE = Probe(token_ids=((1, 2),), logprobs=((-1.0,),), tolerance=1e-3)


@dataclass
class Receiver:
    """An engine that takes weights, or a way in which one fails."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fault: Exception | None = None
    version_offset: int = 0
    versions: list[int] = field(default_factory=list)
    is_receiving: bool = False
    was_cancelled: bool = False

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        self.is_receiving = True
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.fault is not None:
            raise self.fault
        self.versions.append(update.policy_version)
        return WeightReceipt(
            policy_version=update.policy_version + self.version_offset,
            logprob_error=1e-6 * len(self.versions),
            pause_s=0.25,
            update_s=0.125,
            probe_s=0.0625,
        )


class Lab:
    """A publisher with a learner that writes instantly and a record of what happened."""

    def __init__(self, *, deadline_s: float = 5.0) -> None:
        self.written: list[int] = []
        self.discarded: list[int] = []
        self.condemned: dict[str, WeightTransferError] = {}
        self.learner_version: int | None = None
        self.write_gate = asyncio.Event()
        self.write_gate.set()
        self.is_learner_busy = False
        self.publisher = Publisher(
            write=self.write,
            discard=self.discard,
            on_condemned=lambda actor_id, error: self.condemned.update({actor_id: error}),
            deadline_s=deadline_s,
            is_learner_busy=lambda: self.is_learner_busy,
        )

    async def write(self, policy_version: int, members: Sequence[str]) -> WeightUpdate:
        await self.write_gate.wait()
        version = self.learner_version if self.learner_version is not None else policy_version
        self.written.append(version)
        return WeightUpdate(policy_version=version, transport="fake", payload={}, probe=PROBE)

    async def discard(self, update: WeightUpdate) -> None:
        self.discarded.append(update.policy_version)

    def add(self, actor_id: str, *, is_open: bool = True, **arguments: object) -> Receiver:
        receiver = self.receiver(is_open=is_open, **arguments)
        self.publisher.add(actor_id, receiver.receive)
        return receiver

    def receiver(self, *, is_open: bool = True, **arguments: object) -> Receiver:
        receiver = Receiver(**arguments)  # type: ignore[arg-type]
        if is_open:
            receiver.gate.set()
        return receiver


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0)


async def test_publish_returns_once_every_member_has_acknowledged() -> None:
    lab = Lab()
    a, b = lab.add("a"), lab.add("b", is_open=False)
    publishing = asyncio.create_task(lab.publisher.publish(1))
    await until(lambda: a.versions == [1])
    assert not publishing.done()
    assert lab.publisher.policy_version is None
    b.gate.set()
    await publishing
    assert b.versions == [1]
    assert lab.publisher.policy_version == 1
    assert lab.publisher.metrics["weights/num_engines"] == 2
    assert lab.publisher.metrics["weights/pause_s"] == 0.25
    assert lab.publisher.metrics["weights/logprob_error"] == 1e-6
    assert set(lab.publisher.metrics) == {
        f"weights/{name}"
        for name in (
            "publish_s",
            "write_s",
            "pause_s",
            "update_s",
            "probe_s",
            "logprob_error",
            "num_engines",
        )
    }


async def test_start_returns_at_once_and_of_those_waiting_the_last_one_is_pushed() -> None:
    lab = Lab()
    a = lab.add("a", is_open=False)
    for version in (1, 2, 3):
        lab.publisher.start(version)
    assert lab.publisher.is_publishing
    await until(lambda: lab.written == [1])
    a.gate.set()
    await lab.publisher.settle()
    assert a.versions == [1, 3]
    assert lab.written == [1, 3]
    assert not lab.publisher.is_publishing


async def test_a_newer_version_that_the_learner_wrote_is_not_pushed_again() -> None:
    lab = Lab()
    a = lab.add("a", is_open=False)
    lab.publisher.start(1)
    lab.publisher.start(2)
    lab.learner_version = 2
    a.gate.set()
    await lab.publisher.settle()
    assert a.versions == [2]
    assert lab.publisher.policy_version == 2


async def test_the_last_payload_stays_and_the_one_before_goes_after_the_acknowledgements() -> None:
    lab = Lab()
    a = lab.add("a")
    await lab.publisher.publish(1)
    assert lab.discarded == []
    a.gate.clear()
    lab.publisher.start(2)
    await until(lambda: lab.written == [1, 2])
    assert lab.discarded == []
    a.gate.set()
    await lab.publisher.settle()
    assert lab.discarded == [1]
    await lab.publisher.close()
    assert lab.discarded == [1, 2]


async def test_whoever_raises_is_condemned_and_the_others_go_on() -> None:
    lab = Lab()
    a = lab.add("a")
    lab.add("b", fault=ValueError("worker died"))
    lab.add("c", version_offset=-1)
    await lab.publisher.publish(4)
    assert lab.publisher.members == {"a"}
    assert "ValueError: worker died" in str(lab.condemned["b"])
    assert "acknowledged policy version 3, sent was 4" in str(lab.condemned["c"])
    await lab.publisher.publish(5)
    assert a.versions == [4, 5]
    assert lab.publisher.metrics["weights/num_engines"] == 1


async def test_whoever_misses_the_deadline_is_condemned() -> None:
    lab = Lab(deadline_s=0.05)
    a, slow = lab.add("a"), lab.add("slow", is_open=False)
    await lab.publisher.publish(1)
    assert lab.publisher.members == {"a"}
    assert slow.was_cancelled
    assert "did not acknowledge policy version 1 within 0.05 s" in str(lab.condemned["slow"])
    assert a.versions == [1]


async def test_when_all_fail_the_push_fails_with_the_cause() -> None:
    lab = Lab()
    lab.add("a", fault=WeightTransferError("refused"))
    with pytest.raises(WeightTransferError, match=r"none of 1 engines.*refused"):
        await lab.publisher.publish(1)
    assert lab.publisher.policy_version is None


async def test_a_failure_in_the_background_surfaces_at_the_next_call() -> None:
    lab = Lab()
    lab.add("a", fault=WeightTransferError("refused"))
    lab.publisher.start(1)
    await until(lambda: not lab.publisher.is_publishing)
    with pytest.raises(WeightTransferError, match="refused"):
        lab.publisher.start(2)


async def test_a_learner_that_does_not_write_fails_the_push() -> None:
    lab = Lab(deadline_s=0.05)
    lab.add("a")
    lab.write_gate.clear()
    with pytest.raises(WeightTransferError, match="did not write policy version 1"):
        await lab.publisher.publish(1)


async def test_a_write_that_waits_for_a_step_is_given_its_time() -> None:
    lab = Lab(deadline_s=0.05)
    lab.add("a")
    lab.write_gate.clear()
    lab.is_learner_busy = True
    lab.publisher.start(1)
    await asyncio.sleep(0.2)
    assert lab.publisher.is_publishing
    lab.write_gate.set()
    await lab.publisher.settle()
    assert lab.publisher.policy_version == 1


async def test_what_is_written_is_read_to_the_end_when_the_learner_dies() -> None:
    lab = Lab()
    reading = lab.add("a", is_open=False)
    lab.publisher.start(1)
    await until(lambda: reading.is_receiving)
    breaking = asyncio.create_task(lab.publisher.break_off())
    await asyncio.sleep(0.01)
    assert lab.discarded == []
    reading.gate.set()
    await breaking
    assert reading.versions == [1]
    assert lab.discarded == [1]
    assert lab.condemned == {}


async def test_a_learner_that_writes_an_older_version_fails_the_push() -> None:
    lab = Lab()
    lab.learner_version = 1
    with pytest.raises(WeightTransferError, match="wrote policy version 1, asked for 2"):
        await lab.publisher.publish(2)


async def test_a_push_does_not_wait_for_a_member_that_was_removed() -> None:
    lab = Lab()
    a, gone = lab.add("a"), lab.add("gone", is_open=False)
    lab.publisher.start(1)
    await until(lambda: a.versions == [1])
    lab.publisher.remove("gone")
    await lab.publisher.settle()
    assert gone.was_cancelled
    assert lab.condemned == {}
    assert lab.publisher.members == {"a"}


async def test_an_older_version_can_be_published_after_a_rollback() -> None:
    lab = Lab()
    a = lab.add("a")
    for version in (5, 3, 3):
        await lab.publisher.publish(version)
    assert a.versions == [5, 3, 3]
    assert lab.discarded == [5, 3]


async def test_a_joiner_gets_the_current_version_before_it_counts() -> None:
    lab = Lab()
    lab.add("a")
    await lab.publisher.publish(1)
    joiner = lab.receiver(is_open=False)
    admitting = asyncio.create_task(lab.publisher.admit("joiner", joiner.receive))
    await asyncio.sleep(0)
    assert lab.publisher.members == {"a"}
    joiner.gate.set()
    await admitting
    assert joiner.versions == [1]
    await lab.publisher.publish(2)
    assert joiner.versions == [1, 2]


async def test_a_joiner_before_the_first_push_counts_at_once() -> None:
    lab = Lab()
    joiner = lab.receiver()
    await lab.publisher.admit("joiner", joiner.receive)
    await lab.publisher.publish(0)
    assert joiner.versions == [0]


async def test_a_push_during_an_admission_reaches_the_joiner_and_spares_its_payload() -> None:
    lab = Lab()
    lab.add("a")
    await lab.publisher.publish(1)
    joiner = lab.receiver(is_open=False)
    admitting = asyncio.create_task(lab.publisher.admit("joiner", joiner.receive))
    await asyncio.sleep(0)
    await lab.publisher.publish(2)
    assert lab.discarded == []
    joiner.gate.set()
    await admitting
    assert joiner.versions == [1, 2]
    assert lab.discarded == [1]
    assert lab.publisher.members == {"a", "joiner"}


async def test_a_joiner_that_fails_does_not_count_and_tells_the_caller() -> None:
    lab = Lab()
    lab.add("a")
    await lab.publisher.publish(1)
    with pytest.raises(WeightTransferError, match="refused"):
        await lab.publisher.admit(
            "joiner", lab.receiver(fault=WeightTransferError("refused")).receive
        )
    assert lab.publisher.members == {"a"}
    assert lab.condemned == {}


async def test_members_are_unique() -> None:
    lab = Lab()
    lab.add("a")
    with pytest.raises(ValueError, match="'a' is a member already"):
        lab.add("a")


async def test_close_ends_a_running_push() -> None:
    lab = Lab()
    stuck = lab.add("a", is_open=False)
    lab.publisher.start(1)
    await until(lambda: stuck.is_receiving)
    await lab.publisher.close()
    assert stuck.was_cancelled
    assert lab.discarded == [1]


class Collective(Lab):
    """Every update is made for the members of its push; the learner sends until told to stop."""

    def __init__(self, *, deadline_s: float = 5.0) -> None:
        super().__init__(deadline_s=deadline_s)
        self.groups: list[tuple[str, ...]] = []
        self.num_abandoned = 0
        self.is_sent = asyncio.Event()
        self.is_sent.set()
        self.is_abandoned = asyncio.Event()
        self.publisher = Publisher(
            write=self.write,
            discard=self.discard,
            settle=self.settle,
            abandon=self.abandon,
            on_condemned=lambda actor_id, error: self.condemned.update({actor_id: error}),
            deadline_s=deadline_s,
        )

    async def write(self, policy_version: int, members: Sequence[str]) -> WeightUpdate:
        self.groups.append(tuple(members))
        self.is_abandoned.clear()
        update = await super().write(policy_version, members)
        return replace(update, is_collective=True)

    async def settle(self, update: WeightUpdate) -> dict[str, float]:
        waits = [asyncio.create_task(e.wait()) for e in (self.is_sent, self.is_abandoned)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.is_abandoned.is_set():
            raise WeightTransferError("abandoned")
        return {"weights/send_s": 1.0}

    async def abandon(self, update: WeightUpdate) -> None:
        self.num_abandoned += 1
        self.is_abandoned.set()


async def test_a_collective_push_reports_what_the_learner_measured() -> None:
    lab = Collective()
    lab.add("a")
    lab.add("b")
    await lab.publisher.publish(1)
    assert lab.publisher.metrics["weights/send_s"] == 1.0
    assert lab.groups == [("a", "b")]
    assert lab.discarded == [1]


async def test_a_member_that_fails_breaks_a_collective_push_and_the_next_meets_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "BROKEN_GRACE_S", 0.05)
    lab = Collective()
    lab.is_sent.clear()
    lab.add("failing", fault=RuntimeError("gone"))
    hanging = lab.add("hanging", is_open=False)
    await lab.publisher.publish(1)
    assert set(lab.condemned) == {"failing", "hanging"}
    assert "left hanging" in str(lab.condemned["hanging"])
    assert isinstance(lab.condemned["hanging"], PushBroken)
    assert not isinstance(lab.condemned["failing"], PushBroken)
    assert lab.publisher.policy_version is None
    assert hanging.was_cancelled
    assert lab.num_abandoned == 1
    lab.is_sent.set()
    lab.add("new")
    await lab.publisher.publish(2)
    assert lab.groups[-1] == ("new",)
    assert lab.publisher.policy_version == 2


async def test_a_failed_verification_after_the_weights_arrived_condemns_only_its_engine() -> None:
    lab = Collective()
    lab.add("failing", fault=WeightTransferError("refused"))
    slow = lab.add("slow", is_open=False)
    lab.publisher.start(1)
    await until(lambda: "failing" in lab.condemned)
    slow.gate.set()
    await lab.publisher.settle()
    assert set(lab.condemned) == {"failing"}
    assert lab.num_abandoned == 0


async def test_a_joiner_of_collective_pushes_gets_one_of_its_own() -> None:
    lab = Collective()
    lab.add("a")
    await lab.publisher.publish(1)
    joiner = lab.receiver()
    await lab.publisher.admit("b", joiner.receive)
    assert lab.groups == [("a",), ("b",)]
    assert joiner.versions == [1]
    await lab.publisher.publish(2)
    assert lab.groups[-1] == ("a", "b")


async def test_a_joiner_that_fails_is_not_admitted_and_hurts_nobody() -> None:
    lab = Collective()
    lab.add("a")
    await lab.publisher.publish(1)
    joiner = lab.receiver(fault=RuntimeError("gone"))
    with pytest.raises(WeightTransferError, match="gone"):
        await lab.publisher.admit("b", joiner.receive)
    await lab.publisher.publish(2)
    assert lab.groups[-1] == ("a",)


async def test_members_that_change_while_the_learner_writes_meet_in_another_group() -> None:
    lab = Collective()
    lab.add("a")
    lab.add("b")
    lab.write_gate.clear()
    lab.publisher.start(1)
    await until(lambda: lab.groups == [("a", "b")])
    lab.publisher.remove("a")
    lab.write_gate.set()
    await lab.publisher.settle()
    assert lab.groups == [("a", "b"), ("b",)]
    assert lab.num_abandoned == 1
    assert lab.publisher.policy_version == 1
    assert lab.condemned == {}


async def test_a_learner_that_dies_leaves_no_engine_in_its_push() -> None:
    lab = Collective()
    lab.is_sent.clear()
    stuck = lab.add("a", is_open=False)
    lab.publisher.start(1)
    await until(lambda: stuck.is_receiving)
    await lab.publisher.break_off()
    assert isinstance(lab.condemned["a"], PushBroken)
    assert lab.publisher.members == frozenset()


async def test_a_learner_that_does_not_stop_sending_tells_what_broke_the_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "BROKEN_GRACE_S", 0.05)
    lab = Collective()
    lab.is_sent.clear()
    monkeypatch.setattr(lab.is_abandoned, "set", lambda: None)
    lab.add("failing", fault=RuntimeError("no such tensor"))
    with pytest.raises(WeightTransferError, match=r"did not end the push .*no such tensor"):
        await lab.publisher.publish(1)
