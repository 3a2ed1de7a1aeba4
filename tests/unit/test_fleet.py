"""Slots of the fleet: replacements that fail, budgets, lost nodes, waits for resources, other numbers."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from raylearner.config.actors import ActorRange
from raylearner.config.schema import ActorsSection, LearnerSection, RunConfig, RunSection
from raylearner.errors import (
    ConfigError,
    EngineError,
    EngineLost,
    LearnerDied,
    PushBroken,
    RaylearnerError,
    WeightTransferError,
)
from raylearner.run import fleet as fleets
from raylearner.run import restarts, slots
from raylearner.run.fleet import RolloutFleet
from raylearner.run.launching import Launched
from raylearner.run.model import RunModel


def remote(call: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=call)


async def reach(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("not reached in time")


class Actor:
    """Plays until it is killed, halted or stopped."""

    def __init__(self, actor_id: str) -> None:
        self.actor_id = actor_id
        self.calls: list[str] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.run, self.halt, self.stop = map(remote, (self._run, self._halt, self._end))

    async def _run(self) -> None:
        self.calls.append("run")
        await asyncio.shield(self.ended)

    async def _halt(self) -> None:
        self.calls.append("halt")
        self._set(None)

    async def _end(self) -> None:
        self.calls.append("stop")
        self._set(None)

    def _set(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            self.ended.exception()

    def die(self, error: BaseException | None = None) -> None:
        self._set(error or ActorDiedError())


class Launcher:
    """Starts actors at once, but for the failures in `starts`, by actor id."""

    resources = "1 CPU"

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.room = asyncio.Semaphore(1000)
        self.actors: dict[str, Actor] = {}
        self.cancelled: list[str] = []
        self.replay = "replay"
        self.connected: dict[str, str] = {}

    async def connect(self, actor: Actor) -> None:
        self.connected[actor.actor_id] = self.replay

    async def launch(
        self, actor_id: str, *, on_placed: Callable[[str], None], has_to_wait: bool
    ) -> Launched:
        try:
            await self.room.acquire()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(actor_id)
            raise
        on_placed("node")
        if failure := self.failures.get(actor_id):
            raise failure
        self.actors[actor_id] = actor = Actor(actor_id)
        return Launched(actor=actor, pid=1, engine="Stand-in")


class Fleet(RolloutFleet):
    """With stand-ins for actors, which join unless `join_failures` tells otherwise."""

    def __init__(self, num_actors: Any = 2, *, max_restarts: int = 3, **options: Any) -> None:
        self.join_failures: list[Exception] = []
        self.joined: list[str] = []
        self.lost: list[tuple[str, bool]] = []
        section = ActorsSection.model_construct(max_restarts=max_restarts, num_actors=num_actors)
        config = RunConfig.model_construct(
            actors=section, learner=LearnerSection(), run=RunSection()
        )
        super().__init__(
            config=config.model_copy(update={"weights": SimpleNamespace(transport="shared_files")}),
            model=RunModel(""),
            replay=None,
            on_loss=self.lose,
            on_join=self.join,
            **options,
        )
        self.launcher = Launcher()
        self._slots._launcher = self.launcher  # type: ignore[assignment]

    async def lose(self, actor_id: str, *, is_failure: bool) -> None:
        self.lost.append((actor_id, is_failure))

    async def join(self, actor_id: str, receive: Any) -> None:
        if self.join_failures and self.launcher.actors[actor_id] and self._slots._has_started:
            raise self.join_failures.pop(0)
        self.joined.append(actor_id)

    @property
    def names(self) -> list[str]:
        return sorted(name.removeprefix("rollout-") for name in self.actors)

    async def until(self, *names: str) -> None:
        """Wait until exactly these actors play."""
        await reach(lambda: self.names == sorted(names))


@asynccontextmanager
async def playing(fleet: Fleet) -> AsyncGenerator[Fleet]:
    await fleet.start()
    async with asyncio.TaskGroup() as tasks:
        fleet.play(tasks)
        await asyncio.sleep(0.01)
        yield fleet
        await fleet.stop()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Actors die when killed, pauses are short, and no node is lost; returns the list of lost nodes."""
    nodes: list[str] = []
    kill = SimpleNamespace(kill=lambda actor: actor.die())
    monkeypatch.setattr(slots, "ray", kill)
    monkeypatch.setattr(fleets, "ray", kill)
    monkeypatch.setattr(slots, "lost_nodes", lambda: set(nodes))
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(slots, "RETRY_S", 0.01)
    monkeypatch.setattr(slots, "NODE_POLL_S", 0.01)
    monkeypatch.setattr(slots, "UNPLACED_NOTICE_S", 0.01)
    return nodes


async def test_a_replacement_that_fails_to_start_is_retried_while_the_others_continue() -> None:
    async with playing(Fleet(max_restarts=4)) as fleet:
        fleet.launcher.failures = {
            "rollout-2": EngineError("the engine did not start: no memory"),
            "rollout-3": EngineLost("the process died"),
            "rollout-4": EngineError("did not start within 600 s"),
        }
        fleet.launcher.actors["rollout-0"].die()
        await fleet.until("1", "5")
        assert fleet.num_restarts == 4
        assert fleet.lost == [(f"rollout-{i}", True) for i in (0, 2, 3, 4)]
        assert fleet.launcher.actors["rollout-1"].calls == ["run"]


async def test_an_exhausted_restart_budget_ends_the_run_only_when_no_actor_is_left() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(RaylearnerError, match="max_restarts=1")):
        async with playing(Fleet(max_restarts=1)) as fleet:
            fleet.launcher.actors["rollout-0"].die()
            await fleet.until("1", "2")
            fleet.launcher.actors["rollout-2"].die()
            await fleet.until("1")
            await asyncio.sleep(0.05)
            assert fleet.names == ["1"]
            fleet.launcher.actors["rollout-1"].die()
            await asyncio.sleep(10)


async def test_an_actor_is_restarted_once_the_window_allows_it() -> None:
    fleet = Fleet(max_restarts=1)
    fleet._slots._budget = restarts.RestartBudget(1, 0.2)
    async with playing(fleet):
        fleet.launcher.actors["rollout-0"].die()
        await fleet.until("1", "2")
        fleet.launcher.actors["rollout-2"].die()
        await fleet.until("1", "3")


async def test_an_engine_error_during_startup_ends_the_run_with_its_cause() -> None:
    fleet = Fleet()
    fleet.launcher.failures = {"rollout-1": EngineError("the engine did not start: no such model")}
    with pytest.raises(EngineError, match="no such model"):
        await fleet.start()
    await fleet.stop()
    assert fleet.launcher.actors["rollout-0"].calls == ["stop"]


async def test_an_engine_killed_during_startup_is_restarted() -> None:
    fleet = Fleet()
    fleet.launcher.failures = {"rollout-1": EngineLost("the process died")}
    async with playing(fleet):
        assert fleet.names == ["0", "2"]


async def test_a_joining_actor_waits_for_a_dead_learner_and_is_replaced_if_its_weights_fail() -> (
    None
):
    async with playing(Fleet()) as fleet:
        fleet.join_failures = [WeightTransferError("proof"), LearnerDied("rank 0 died")]
        fleet.fail_push("rollout-0", WeightTransferError("proof"))
        await fleet.until("1", "3")
        assert fleet.num_restarts == 2


async def test_a_lost_node_and_a_push_failure_elsewhere_do_not_use_up_restarts(
    no_ray: list[str],
) -> None:
    async with playing(Fleet(max_restarts=0)) as fleet:
        fleet.fail_push("rollout-0", PushBroken("left hanging"))
        await fleet.until("1", "2")
        no_ray.append("node")
        fleet.launcher.actors["rollout-1"].die()
        await fleet.until("2", "3")
        no_ray.clear()
        fleet.launcher.actors["rollout-2"].die()
        await fleet.until("3")


async def test_restarts_are_not_counted_once_their_node_is_reported_lost(
    no_ray: list[str],
) -> None:
    async with playing(Fleet(1, max_restarts=0)) as fleet:
        fleet.launcher.actors["rollout-0"].die(ActorUnavailableError("connection reset", None))
        await fleet.until()
        await asyncio.sleep(0.05)
        no_ray.append("node")
        await fleet.until("1")


async def test_an_actor_keeps_its_engine_when_the_replay_actor_dies() -> None:
    async with playing(Fleet(max_restarts=0)) as fleet:
        actor = fleet.launcher.actors["rollout-0"]
        dead, actor.ended = actor.ended, asyncio.get_running_loop().create_future()
        cause = RayTaskError("claim", "", ActorDiedError()).as_instanceof_cause()
        dead.set_exception(cause)
        await asyncio.sleep(0.1)
        assert actor.calls == ["run", "run"]
        assert fleet.names == ["0", "1"]


RANGE = ActorRange(min=1, max=3)


async def test_an_elastic_run_starts_with_the_minimum_and_grows() -> None:
    fleet = Fleet(RANGE, max_restarts=0)
    fleet.launcher.room = asyncio.Semaphore(1)
    async with playing(fleet):
        assert fleet.names == ["0"]
        assert not fleet.waits_for_resources
        fleet.launcher.room.release()
        await fleet.until("0", "1")
        fleet.launcher.room.release()
        await fleet.until("0", "1", "2")


async def test_an_elastic_run_without_actors_waits_for_resources(no_ray: list[str]) -> None:
    fleet = Fleet(ActorRange(min=1, max=1), max_restarts=0)
    fleet.launcher.room = asyncio.Semaphore(1)
    async with playing(fleet):
        no_ray.append("node")
        fleet.launcher.actors["rollout-0"].die()
        await fleet.until()
        await asyncio.sleep(0.02)
        assert fleet.waits_for_resources
        fleet.launcher.room.release()
        await fleet.until("1")
        assert not fleet.waits_for_resources


async def test_shrinking_drains_the_newest_actors_and_counts_no_failure() -> None:
    async with playing(Fleet(3, max_restarts=0)) as fleet:
        fleet.resize(1)
        await fleet.until("0")
        await reach(lambda: len(fleet.lost) == 2)
        assert sorted(fleet.lost) == [("rollout-1", False), ("rollout-2", False)]
        assert fleet.num_restarts == 0
        assert fleet.launcher.actors["rollout-2"].calls == ["run", "halt", "stop"]
        fleet.resize(2)
        await fleet.until("0", "3")


async def test_shrinking_first_removes_actors_that_wait_for_resources() -> None:
    fleet = Fleet(RANGE)
    fleet.launcher.room = asyncio.Semaphore(2)
    async with playing(fleet):
        await fleet.until("0", "1")
        fleet.resize(2)
        await asyncio.sleep(0.01)
        assert fleet.launcher.cancelled == ["rollout-2"]
        assert fleet.names == ["0", "1"]


@pytest.mark.parametrize(
    ("num_actors", "colocated", "refused"),
    [(RANGE, False, [0, 4]), (2, False, [0]), (2, True, [0, 3])],
)
async def test_a_number_outside_of_the_limits_is_refused(
    num_actors: Any, colocated: bool, refused: list[int]
) -> None:
    fleet = Fleet(num_actors)
    if colocated:
        fleet._colocation = SimpleNamespace()  # type: ignore[assignment]
    for number in refused:
        with pytest.raises(ConfigError, match=f"actors={number}"):
            fleet.resize(number)
    assert fleet._slots.kept == []


async def test_the_fleet_carries_out_scale_requests_in_the_run_directory(tmp_path: Path) -> None:
    from raylearner.run import scaling

    async with playing(Fleet(folder=tmp_path)) as fleet:
        scaling._write(tmp_path / scaling.REQUEST_FILE, {"id": "x", "actors": 3, "at_s": 2e12})
        await fleet.until("0", "1", "2")


async def test_every_actor_is_connected_to_the_new_replay_actor() -> None:
    async with playing(Fleet()) as fleet:
        await fleet.use_replay("another")
        assert fleet.launcher.connected == {"rollout-0": "another", "rollout-1": "another"}
        fleet.launcher.actors["rollout-0"].die()
        await fleet.until("1", "2")
        assert fleet.launcher.connected["rollout-2"] == "another"


async def test_an_actor_that_did_not_hear_of_another_replay_hears_before_it_plays_again() -> None:
    async with playing(Fleet(max_restarts=0)) as fleet:
        actor = fleet.launcher.actors["rollout-0"]
        dead, actor.ended = actor.ended, asyncio.get_running_loop().create_future()
        fleet.launcher.replay = "another"
        dead.set_exception(RayTaskError("claim", "", ActorDiedError()).as_instanceof_cause())
        await reach(lambda: actor.calls == ["run", "run"])
        assert fleet.launcher.connected == {"rollout-0": "another", "rollout-1": "replay"}


async def test_an_actor_is_stopped_only_after_it_is_taken_out_of_pushes() -> None:
    async with playing(Fleet(2)) as fleet:
        may_leave, actor = asyncio.Event(), fleet.launcher.actors["rollout-1"]

        async def lose(actor_id: str, *, is_failure: bool) -> None:
            await may_leave.wait()

        fleet._slots._on_loss = lose
        fleet.resize(1)
        await reach(lambda: "halt" in actor.calls)
        await asyncio.sleep(0.02)
        assert (fleet.names, actor.calls) == (["0"], ["run", "halt"])
        may_leave.set()
        await reach(lambda: actor.calls == ["run", "halt", "stop"])


async def test_an_actor_that_starts_while_the_fleet_stops_is_killed() -> None:
    fleet = Fleet(RANGE)
    fleet.launcher.room = asyncio.Semaphore(1)
    async with playing(fleet):
        may_end, last = asyncio.Event(), fleet.launcher.actors["rollout-0"]

        async def stop() -> None:
            fleet.launcher.room.release()
            await may_end.wait()
            last.die()

        last.stop = remote(stop)
        asyncio.get_running_loop().call_later(0.05, may_end.set)
    assert fleet.launcher.actors["rollout-1"].ended.done()


async def test_a_push_that_fails_after_the_end_of_its_engine_promises_no_replacement(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with playing(Fleet()) as fleet:
        fleet.fail_push("rollout-7", WeightTransferError("stopped"))
    assert "is replaced" not in caplog.text
