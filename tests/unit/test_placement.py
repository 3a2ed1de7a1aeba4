"""Replacement of rollout actors: who counts against the limit, and joiners that fail to join."""

import asyncio
from typing import Any

import pytest

from raylearner.config.loader import load
from raylearner.config.schema import ActorsSection, LearnerSection, RunConfig
from raylearner.errors import LearnerDied, PushBroken, RaylearnerError, WeightTransferError
from raylearner.run import placement
from raylearner.run.placement import Colocation, RolloutFleet


def make_config(max_restarts: int) -> RunConfig:
    actors = ActorsSection.model_construct(max_restarts=max_restarts, num_actors=2)
    return RunConfig.model_construct(actors=actors, learner=LearnerSection())


class Loop:
    """An actor's `run`: ends with the actor."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def remote(self) -> None:
        await self.end.wait()


class Actor:
    def __init__(self) -> None:
        self.run = Loop()


class Fleet(RolloutFleet):
    """With actors that start at once, joins that fail as told, and no Ray."""

    def __init__(self, *, max_restarts: int, join_failures: list[Exception]) -> None:
        self.join_failures = join_failures
        self.joined: list[str] = []
        self.has_joined = asyncio.Event()
        super().__init__(
            config=make_config(max_restarts),
            model_path="",
            replay=None,
            on_loss=self.lose,
            on_join=self.join,
        )

    async def _launch(self) -> str:
        self._num_started += 1
        actor_id = f"rollout-{self._num_started}"
        self.actors[actor_id] = Actor()
        return actor_id

    def receiver(self, actor_id: str) -> Any:
        return None

    async def lose(self, actor_id: str) -> None:
        pass

    async def join(self, actor_id: str, receive: Any) -> None:
        if self.join_failures:
            raise self.join_failures.pop(0)
        self.joined.append(actor_id)
        self.has_joined.set()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.ray, "kill", lambda actor: actor.run.end.set())


async def test_a_joiner_that_fails_to_join_is_replaced_too() -> None:
    fleet = Fleet(
        max_restarts=3, join_failures=[WeightTransferError("proof"), LearnerDied("rank 0 died")]
    )
    await fleet.start()
    async with asyncio.TaskGroup() as tasks:
        fleet.play(tasks)
        fleet.fail_push("rollout-1", WeightTransferError("proof"))
        await asyncio.wait_for(fleet.has_joined.wait(), 30)
        assert fleet.joined == ["rollout-5"]
        assert sorted(fleet.actors) == ["rollout-2", "rollout-5"]
        assert fleet.num_restarts == 3
        fleet._is_stopping = True
        for actor in fleet.actors.values():
            actor.run.end.set()


async def test_an_actor_blocked_by_another_engines_failure_does_not_use_up_restarts() -> None:
    fleet = Fleet(max_restarts=0, join_failures=[])
    await fleet.start()
    with pytest.RaisesGroup(pytest.RaisesExc(RaylearnerError, match="max_restarts=0")):
        async with asyncio.TaskGroup() as tasks:
            fleet.play(tasks)
            fleet.fail_push("rollout-1", PushBroken("left hanging"))
            await asyncio.wait_for(fleet.has_joined.wait(), 30)
            assert fleet.joined == ["rollout-3"]
            fleet.fail_push("rollout-2", WeightTransferError("proof"))


def test_engines_are_dealt_evenly_and_a_replacement_takes_the_place_of_the_dead() -> None:
    changes = ["learner.num_ranks=2", "actors.num_actors=4", "cluster.num_cpus=8"]
    config = load(["configs/quickstart.yaml"], ["weights.transport=ipc", *changes])
    colocation = Colocation(config, None)
    for index in range(4):
        colocation.engine_options(f"rollout-{index}")
    assert [colocation.rank_of(f"rollout-{index}") for index in range(4)] == [0, 1, 0, 1]
    colocation.forget("rollout-2")
    options = colocation.engine_options("rollout-4")
    assert colocation.rank_of("rollout-4") == 0
    assert options["scheduling_strategy"].placement_group_bundle_index == 0
    assert [
        o["scheduling_strategy"].placement_group_bundle_index for o in colocation.rank_options()
    ] == [0, 1]
