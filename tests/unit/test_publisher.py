"""The publisher: one push at a time, the newest waits, members fail without the others."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from raylearner.errors import LearnerDied, PushBroken, WeightTransferError
from raylearner.weights import push
from raylearner.weights.publisher import Publisher
from raylearner.weights.update import Probe, WeightReceipt, WeightUpdate

PROBE = Probe(token_ids=((1, 2),), logprobs=((-1.0,),), tolerance=1e-3)
REFUSED = WeightTransferError("refused")


@dataclass
class Receiver:
    """An engine that takes weights once its gate is open, or fails."""

    gate: asyncio.Event
    error: Exception | None = None
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
        if self.error is not None:
            raise self.error
        self.versions.append(update.policy_version)
        return WeightReceipt(
            policy_version=update.policy_version + self.version_offset,
            logprob_error=1e-6 * len(self.versions),
            pause_s=0.25,
            update_s=0.125,
            probe_s=0.0625,
            stage_s=0.5,
            num_recomputed=100,
        )


def opened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class Lab:
    """A publisher, and as its transport a learner that writes and sends instantly unless held up."""

    def __init__(self, *, is_collective: bool = False, deadline_s: float = 5.0) -> None:
        self.is_collective = is_collective
        self.is_stepping = False
        self.learner_version: int | None = None
        self.write_gate, self.send_gate = opened(), opened()
        self.is_abandoned = asyncio.Event()
        self.can_abandon = True
        self.written: list[int] = []
        self.groups: list[tuple[str, ...]] = []
        self.discarded: list[int] = []
        self.num_sent = self.num_abandoned = 0
        self.failed: dict[str, WeightTransferError] = {}
        self.publisher = Publisher(
            self,
            on_failed=lambda actor_id, error: self.failed.update({actor_id: error}),
            deadline_s=deadline_s,
        )

    async def write(self, policy_version: int, members: Sequence[str]) -> WeightUpdate:
        self.groups.append(tuple(members))
        self.is_abandoned.clear()
        await self.write_gate.wait()
        version = self.learner_version if self.learner_version is not None else policy_version
        self.written.append(version)
        return WeightUpdate(
            policy_version=version,
            transport="fake",
            payload={},
            probe=PROBE,
            is_collective=self.is_collective,
        )

    async def send(self, update: WeightUpdate) -> Mapping[str, float]:
        waits = [asyncio.create_task(e.wait()) for e in (self.send_gate, self.is_abandoned)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self.is_abandoned.is_set():
            raise WeightTransferError("abandoned")
        self.num_sent += 1
        return {"weights/send_s": 1.0}

    async def abandon(self, update: WeightUpdate) -> None:
        self.num_abandoned += 1
        if self.can_abandon:
            self.is_abandoned.set()

    async def discard(self, update: WeightUpdate) -> None:
        self.discarded.append(update.policy_version)

    def add(self, actor_id: str, *, is_open: bool = True, **changes: object) -> Receiver:
        receiver = make_receiver(is_open=is_open, **changes)
        self.publisher.add(actor_id, receiver.receive)
        return receiver


def make_receiver(*, is_open: bool = True, **changes: object) -> Receiver:
    return Receiver(opened() if is_open else asyncio.Event(), **changes)  # type: ignore[arg-type]


async def start_stuck(lab: Lab) -> Receiver:
    """Start a push that waits for its only member."""
    receiver = lab.add("a", is_open=False)
    lab.publisher.start(1)
    await until(lambda: receiver.is_receiving)
    return receiver


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "BROKEN_GRACE_S", 0.05)


async def test_waiting_for_engines_takes_the_same_work_for_each_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    wait = asyncio.wait

    async def counted(tasks: Collection[Any], **options: Any) -> Any:
        waits.append(len(tasks))
        return await wait(tasks, **options)

    lab = Lab(is_collective=True)
    engines = [lab.add(str(number), is_open=False) for number in range(100)]
    publishing = asyncio.create_task(lab.publisher.publish(1))
    await until(lambda: all(engine.is_receiving for engine in engines))
    monkeypatch.setattr(asyncio, "wait", counted)
    for engine in engines:
        engine.gate.set()
        await until(lambda engine=engine: engine.versions == [1])
    await publishing
    assert sum(waits) <= 3 * len(engines)


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
    expected = {
        "num_engines": 2,
        "stage_s": 0.5,
        "recomputed_tokens": 200,
        "pause_s": 0.25,
        "logprob_error": 1e-6,
        "verify_s": None,
    }
    metrics = lab.publisher.metrics
    assert {name: metrics.get(f"weights/{name}") for name in expected} == expected


async def test_of_versions_that_wait_behind_a_push_only_the_last_is_pushed() -> None:
    lab = Lab()
    a = lab.add("a", is_open=False)
    for version in (1, 2, 3):
        lab.publisher.start(version)
    assert lab.publisher.is_publishing
    await until(lambda: lab.written == [1])
    a.gate.set()
    await lab.publisher.finish()
    assert a.versions == lab.written == [1, 3]
    assert not lab.publisher.is_publishing


async def test_a_newer_version_that_the_learner_wrote_is_not_pushed_again() -> None:
    lab = Lab()
    a = lab.add("a", is_open=False)
    lab.publisher.start(1)
    lab.publisher.start(2)
    lab.learner_version = 2
    a.gate.set()
    await lab.publisher.finish()
    assert a.versions == [2]
    assert lab.publisher.policy_version == 2


async def test_an_update_is_discarded_after_the_acknowledgements_of_the_next() -> None:
    lab = Lab()
    a = lab.add("a")
    await lab.publisher.publish(1)
    a.gate.clear()
    lab.publisher.start(2)
    await until(lambda: lab.written == [1, 2])
    assert lab.discarded == []
    a.gate.set()
    await lab.publisher.finish()
    assert lab.discarded == [1]
    await lab.publisher.close()
    assert lab.discarded == [1, 2]


async def test_an_older_version_can_be_published_after_a_rollback() -> None:
    lab = Lab()
    a = lab.add("a")
    for version in (5, 3, 3):
        await lab.publisher.publish(version)
    assert a.versions == [5, 3, 3]
    assert lab.discarded == [5, 3]


async def test_a_member_that_fails_is_reported_with_the_cause_and_the_others_continue() -> None:
    lab = Lab(deadline_s=0.05)
    a, slow = lab.add("a"), lab.add("slow", is_open=False)
    lab.add("raising", error=ValueError("worker died"))
    lab.add("behind", version_offset=-1)
    await lab.publisher.publish(4)
    assert lab.publisher.members == {"a"}
    assert "ValueError: worker died" in str(lab.failed["raising"])
    assert "policy version 3" in str(lab.failed["behind"])
    assert "0.05 s" in str(lab.failed["slow"])
    assert slow.was_cancelled
    await lab.publisher.publish(5)
    assert a.versions == [4, 5]
    assert lab.publisher.metrics["weights/num_engines"] == 1


async def test_when_all_fail_the_push_fails_with_the_cause_now_or_at_the_next_call() -> None:
    lab = Lab()
    lab.add("a", error=REFUSED)
    with pytest.raises(WeightTransferError, match=r"none of 1 .*refused"):
        await lab.publisher.publish(1)
    assert lab.publisher.policy_version is None
    lab.add("b", error=REFUSED)
    lab.publisher.start(1)
    await until(lambda: not lab.publisher.is_publishing)
    with pytest.raises(WeightTransferError, match="refused"):
        lab.publisher.start(2)


async def test_a_learner_that_does_not_write_or_writes_an_older_version_fails_the_push() -> None:
    lab = Lab(deadline_s=0.05)
    lab.add("a")
    lab.learner_version = 1
    with pytest.raises(WeightTransferError, match="version 1 instead of 2"):
        await lab.publisher.publish(2)
    lab.write_gate.clear()
    with pytest.raises(WeightTransferError, match=r"version 1 within 0\.05 s"):
        await lab.publisher.publish(1)


async def test_time_behind_a_learner_step_does_not_count_toward_the_deadline() -> None:
    lab = Lab(deadline_s=1.0)
    lab.add("a")
    lab.write_gate.clear()
    lab.is_stepping = True
    lab.publisher.start(1)
    await asyncio.sleep(2.5)
    assert lab.publisher.is_publishing
    lab.write_gate.set()
    await lab.publisher.finish()
    assert lab.publisher.policy_version == 1


async def test_a_push_does_not_wait_for_a_member_that_was_removed() -> None:
    lab = Lab()
    a, gone = lab.add("a"), lab.add("gone", is_open=False)
    lab.publisher.start(1)
    await until(lambda: a.versions == [1])
    lab.publisher.remove("gone")
    await lab.publisher.finish()
    assert gone.was_cancelled
    assert lab.failed == {}
    assert lab.publisher.members == {"a"}


async def test_a_joiner_gets_the_current_version_before_it_counts() -> None:
    lab = Lab()
    first = make_receiver()
    await lab.publisher.admit("a", first.receive)
    await lab.publisher.publish(1)
    joiner = make_receiver(is_open=False)
    admitting = asyncio.create_task(lab.publisher.admit("joiner", joiner.receive))
    await asyncio.sleep(0)
    assert lab.publisher.members == {"a"}
    joiner.gate.set()
    await admitting
    await lab.publisher.publish(2)
    assert first.versions == joiner.versions == [1, 2]
    with pytest.raises(ValueError, match="'a'"):
        lab.add("a")


async def test_a_push_during_an_admission_reaches_the_joiner_and_keeps_what_it_reads() -> None:
    lab = Lab()
    lab.add("a")
    await lab.publisher.publish(1)
    joiner = make_receiver(is_open=False)
    admitting = asyncio.create_task(lab.publisher.admit("joiner", joiner.receive))
    await asyncio.sleep(0)
    await lab.publisher.publish(2)
    assert lab.discarded == []
    joiner.gate.set()
    await admitting
    assert joiner.versions == [1, 2]
    assert lab.discarded == [1]
    assert lab.publisher.members == {"a", "joiner"}


@pytest.mark.parametrize("is_collective", [False, True])
async def test_a_joiner_that_fails_is_not_admitted_and_its_caller_gets_the_error(
    is_collective: bool,
) -> None:
    lab = Lab(is_collective=is_collective)
    lab.add("a")
    await lab.publisher.publish(1)
    with pytest.raises(WeightTransferError, match="refused"):
        await lab.publisher.admit("joiner", make_receiver(error=REFUSED).receive)
    assert lab.failed == {}
    await lab.publisher.publish(2)
    assert lab.groups[-1] == ("a",)


async def test_close_ends_a_running_push() -> None:
    lab = Lab()
    stuck = await start_stuck(lab)
    await lab.publisher.close()
    assert stuck.was_cancelled
    assert lab.discarded == [1]


async def test_after_the_learners_death_a_written_update_is_read_to_the_end() -> None:
    lab = Lab()
    reading = await start_stuck(lab)
    breaking = asyncio.create_task(lab.publisher.break_off())
    await asyncio.sleep(0.01)
    assert lab.discarded == []
    reading.gate.set()
    await breaking
    assert reading.versions == lab.discarded == [1]
    assert lab.failed == {}


async def test_after_the_learners_death_members_of_a_collective_push_are_released() -> None:
    lab = Lab(is_collective=True)
    lab.send_gate.clear()
    await start_stuck(lab)
    await lab.publisher.break_off()
    assert isinstance(lab.failed["a"], PushBroken)
    assert lab.publisher.members == frozenset()


async def test_a_learner_that_dies_while_sending_ends_the_push_with_its_error(
    short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(update: WeightUpdate) -> Mapping[str, float]:
        raise LearnerDied("rank 0 died")

    lab = Lab(is_collective=True)
    monkeypatch.setattr(lab, "send", die)
    lab.add("a", is_open=False)
    with pytest.raises(LearnerDied):
        await lab.publisher.publish(1)
    assert isinstance(lab.failed["a"], PushBroken)


async def test_a_collective_push_reports_the_learners_timings_and_a_joiner_gets_its_own() -> None:
    lab = Lab(is_collective=True)
    lab.add("a")
    await lab.publisher.publish(1)
    assert lab.publisher.metrics["weights/send_s"] == 1.0
    assert lab.discarded == [1]
    joiner = make_receiver()
    await lab.publisher.admit("b", joiner.receive)
    assert joiner.versions == [1]
    await lab.publisher.publish(2)
    assert lab.groups == [("a",), ("b",), ("a", "b")]


async def test_a_member_that_fails_breaks_a_collective_push_and_the_next_is_without_it(
    short_grace: None,
) -> None:
    lab = Lab(is_collective=True)
    lab.send_gate.clear()
    lab.add("failing", error=RuntimeError("gone"))
    blocked = lab.add("blocked", is_open=False)
    await lab.publisher.publish(1)
    assert isinstance(lab.failed["blocked"], PushBroken)
    assert not isinstance(lab.failed["failing"], PushBroken)
    assert lab.publisher.policy_version is None
    assert blocked.was_cancelled
    assert lab.num_abandoned == 1
    lab.send_gate.set()
    lab.add("new")
    await lab.publisher.publish(2)
    assert lab.groups[-1] == ("new",)
    assert lab.publisher.policy_version == 2


async def test_after_all_weights_were_sent_a_failed_verification_concerns_one_engine_only() -> None:
    lab = Lab(is_collective=True)
    failing = lab.add("failing", is_open=False, error=REFUSED)
    slow = lab.add("slow", is_open=False)
    lab.publisher.start(1)
    await until(lambda: lab.num_sent == 1)
    failing.gate.set()
    await until(lambda: "failing" in lab.failed)
    slow.gate.set()
    await lab.publisher.finish()
    assert set(lab.failed) == {"failing"}
    assert lab.num_abandoned == 0


async def test_members_that_change_while_the_learner_writes_get_another_update() -> None:
    lab = Lab(is_collective=True)
    lab.add("a")
    lab.add("b")
    lab.write_gate.clear()
    lab.publisher.start(1)
    await until(lambda: lab.groups == [("a", "b")])
    lab.publisher.remove("a")
    lab.write_gate.set()
    await lab.publisher.finish()
    assert lab.groups == [("a", "b"), ("b",)]
    assert lab.num_abandoned == 1
    assert lab.publisher.policy_version == 1
    assert lab.failed == {}


async def test_a_learner_that_does_not_stop_sending_is_reported_with_the_cause(
    short_grace: None,
) -> None:
    lab = Lab(is_collective=True)
    lab.send_gate.clear()
    lab.can_abandon = False
    lab.add("failing", error=RuntimeError("no such tensor"))
    with pytest.raises(WeightTransferError, match="no such tensor"):
        await lab.publisher.publish(1)


async def test_pushes_that_reach_no_engine_are_fatal_only_after_several_in_a_row() -> None:
    lab = Lab()
    lab.publisher._max_failed_pushes = 2
    good = Receiver(opened())
    lab.publisher.add("good", good.receive)
    await lab.publisher.publish(1)
    for number, version in enumerate((2, 4)):
        lab.publisher.remove("good")
        lab.publisher.add(f"bad-{number}", Receiver(opened(), REFUSED).receive)
        await lab.publisher.publish(version)
        assert lab.publisher.members == frozenset()
        joiner = Receiver(opened())
        await lab.publisher.admit("good", joiner.receive)
        assert joiner.versions == [version], "a replaced engine gets the version when it joins"
        await lab.publisher.publish(version + 1)
    assert set(lab.failed) == {"bad-0", "bad-1"}
    for number in (2, 3):
        lab.publisher.remove("good")
        lab.publisher.add(f"bad-{number}", Receiver(opened(), REFUSED).receive)
        if number == 2:
            await lab.publisher.publish(number + 5)
    with pytest.raises(WeightTransferError, match="refused"):
        await lab.publisher.publish(9)


async def test_a_write_that_takes_too_long_is_retried() -> None:
    lab = Lab(deadline_s=0.05)
    lab.publisher._max_failed_pushes = 3
    engine = Receiver(opened())
    lab.publisher.add("engine", engine.receive)
    await lab.publisher.publish(1)
    lab.write_gate.clear()
    lab.publisher.start(2)
    await asyncio.sleep(0.08)
    lab.write_gate.set()
    await lab.publisher.finish()
    assert engine.versions == [1, 2]
    assert not lab.failed


async def test_the_first_push_of_a_run_must_reach_an_engine() -> None:
    lab = Lab()
    lab.publisher._max_failed_pushes = 3
    lab.publisher.add("bad", Receiver(opened(), REFUSED).receive)
    with pytest.raises(WeightTransferError, match="refused"):
        await lab.publisher.publish(0)


async def test_joiners_of_a_publisher_that_is_broken_off_begin_no_other_write() -> None:
    lab = Lab(is_collective=True)
    lab.add("a")
    await lab.publisher.publish(1)
    lab.write_gate.clear()
    joining = [
        asyncio.create_task(lab.publisher.admit(name, make_receiver().receive)) for name in "bc"
    ]
    await until(lambda: len(lab.groups) == 2)
    breaking = asyncio.create_task(lab.publisher.break_off())
    await asyncio.sleep(0.01)
    assert not breaking.done(), "a write of the first joiner is under way"
    lab.write_gate.set()
    await asyncio.gather(breaking, *joining)
    assert lab.groups == [("a",), ("b",)]


async def test_an_engine_that_ends_on_request_breaks_no_push_that_others_share() -> None:
    lab = Lab(is_collective=True)
    a, b = lab.add("a", is_open=False), lab.add("b", is_open=False)
    lab.publisher.start(1)
    await until(lambda: a.is_receiving and b.is_receiving)
    dismissing = asyncio.create_task(lab.publisher.dismiss("b"))
    await asyncio.sleep(0.01)
    assert not dismissing.done()
    a.gate.set()
    b.gate.set()
    await dismissing
    await lab.publisher.finish()
    assert (lab.failed, lab.publisher.members) == ({}, {"a"})


async def test_the_error_of_a_push_in_the_background_is_raised_on_request() -> None:
    lab = Lab()
    receiver = await start_stuck(lab)
    lab.publisher.raise_failure()
    receiver.error = REFUSED
    receiver.gate.set()
    await until(lambda: not lab.publisher.is_publishing)
    with pytest.raises(WeightTransferError, match="reached none"):
        lab.publisher.raise_failure()
    lab.publisher.raise_failure()
