"""The controller: every wait has a limit, a stop ends a starting run, and the first cause stands."""

import asyncio
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raylearner.errors import LearnerDied, LearnerError, ReplayDied, RunStopped, StoppedEarly
from raylearner.run import controller as controllers
from raylearner.run import recovery, taking
from raylearner.run.controller import Controller
from raylearner.run.model import RunModel
from raylearner.run.watchdog import unless_set

NAME = types.SimpleNamespace


async def never(*_: object, **__: object) -> None:
    await asyncio.sleep(3600)


async def nothing(*_: object, **__: object) -> None: ...


def remote(function: Any) -> Any:
    return NAME(remote=function)


CONFIG: Any = NAME(
    replay=NAME(groups_per_step=1, group_size=4),
    run=NAME(
        watchdog_s=0.1,
        num_steps=5,
        max_learner_restarts=2,
        restart_window_s=60.0,
        keep_last=1,
        checkpoint_async=True,
        checkpoint_every_steps=50,
        checkpoint_every_s=None,
    ),
    learner=NAME(
        num_data_ranks=1,
        max_tokens_per_micro_batch=1,
        num_mini_batches=1,
        mask_truncated=False,
        num_ranks=1,
    ),
    actors=NAME(min_actors=1, start_timeout_s=0.2),
    rewards=NAME(reported_failed_reward=0.0),
    weights=NAME(deadline_s=0.0),
    model=NAME(path=""),
    environment=NAME(kind="single_turn"),
    recorded=NAME(trace=False),
    evaluation=NAME(before_first_step=True, every_steps=0),
)
STAGE = nullcontext(NAME(name="", wait_for=lambda _: None))
RECORDER: Any = NAME(
    stage=lambda _: STAGE,
    waiting=lambda _: STAGE,
    spans=lambda _: None,
    evaluation_trajectories=lambda *_: None,
)


def make_controller(
    folder: Path, *, take: Any = nothing, progress: Any = nothing, step: Any = never
) -> Controller:
    """A controller with stand-ins for its actors, of which some never answer."""

    async def lines() -> list[str]:
        return ["rollout-0 runs 3 episodes"]

    replay = NAME(
        take=remote(take), progress=remote(progress), describe=remote(lines), save=remote(nothing)
    )
    actors: Any = NAME(
        replay=replay,
        learner=NAME(policy_version=1, step=step, actors={}),
        fleet=NAME(play=lambda _: None, actors={}, waits_for_resources=False),
        sleep_engines=nothing,
        close=nothing,
        check=lambda: None,
    )
    tracer: Any = NAME(span=lambda *_, **__: nullcontext(), drain=list)
    made = Controller(
        CONFIG, folder, RECORDER, [], actors=actors, tracer=tracer, stop=asyncio.Event()
    )
    made.step = 1
    return made


async def taken(*_: object) -> Any:
    return NAME(groups=[])


async def test_a_take_shows_how_much_of_the_batch_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "PROGRESS_POLL_S", 0.001)
    shown: list[str] = []
    had_enough = asyncio.Event()

    async def count(num_groups: int) -> int:
        if len(shown) > 1:
            had_enough.set()
        return len(shown)

    async def take(*_: object) -> Any:
        await had_enough.wait()
        return NAME(groups=[])

    def stage(name: str) -> Any:
        return nullcontext(NAME(name=name, wait_for=shown.extend))

    made = make_controller(tmp_path, take=take)
    made._actors.replay.batch_progress = remote(count)
    made._taker._recorder = NAME(stage=stage, waiting=stage)  # type: ignore[assignment]
    async with asyncio.timeout(5):
        await made._taker.take(1)
        had_enough.clear()
        shown.clear()
        await made._taker.take(2)
    assert shown[0] == "batch of step 2 0/4 episodes"


class Incidents:
    """Stand-ins for what a rollback calls; each method notes its name and dies as often as it is told."""

    def __init__(self, made: Controller, checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deaths: dict[str, list[Exception]] = {}
        self.called: list[str] = []
        self.rewound: list[int] = []
        self._made = made
        made._recovery._recorder = NAME(rewind=self.rewound.append)  # type: ignore[assignment]
        made._recovery._budget.backoff_s = lambda: 0.0  # type: ignore[method-assign]
        monkeypatch.setattr(recovery, "find_latest", lambda *_, **__: checkpoint)
        actors: Any = made._actors
        actors.restart_replay = lambda: self.called.append("restart_replay")
        actors.learner.restore = self._method("restore")
        for name in ("restart_learner", "load_replay", "publish_restored"):
            setattr(actors, name, self._method(name))

    def _method(self, name: str) -> Any:
        async def call(*arguments: object) -> None:
            self.called.append(name + (":initial" if arguments == (None,) else ""))
            if self.deaths.get(name):
                raise self.deaths[name].pop(0)

        return call


NEVER_TRAINED = ["restart_learner", "load_replay:initial", "publish_restored"]
ROLLED_BACK = ["restart_learner", "restore", "load_replay", "publish_restored"]


@pytest.mark.parametrize(
    ("first", "checkpoint_step", "called"),
    [
        (LearnerDied("x"), 3, ROLLED_BACK),
        (LearnerDied("x"), None, NEVER_TRAINED),
        (ReplayDied("x"), 3, ["restart_replay", *ROLLED_BACK]),
        (ReplayDied("x"), None, ["restart_replay", *NEVER_TRAINED]),
    ],
)
async def test_a_dead_process_is_replaced_and_all_components_are_restored_to_one_state(
    first: LearnerDied | ReplayDied,
    checkpoint_step: int | None,
    called: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_controller(tmp_path)
    latest = None if checkpoint_step is None else NAME(step=checkpoint_step, folder=tmp_path)
    incidents = Incidents(made, latest, monkeypatch)
    await made._recover(first)
    assert incidents.called == called
    assert made.step == (checkpoint_step or 0)
    assert incidents.rewound == [made.step]


async def test_deaths_during_a_rollback_are_retried_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_controller(tmp_path)
    incidents = Incidents(made, NAME(step=1, folder=tmp_path), monkeypatch)
    incidents.deaths = {"load_replay": [ReplayDied("too")]}
    await made._recover(LearnerDied("first"))
    assert incidents.called == [*ROLLED_BACK[:3], "restart_replay", *ROLLED_BACK]
    incidents.called.clear()
    incidents.deaths = {"restart_learner": [LearnerDied("again")] * 9}
    with pytest.raises(LearnerDied, match="max_learner_restarts"):
        await made._recover(LearnerDied("first"))
    assert not incidents.called, "both restarts within the window were used before"


async def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_controller(tmp_path)
    incidents = Incidents(made, None, monkeypatch)
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    with pytest.raises(LearnerDied, match="damaged"):
        await made._recover(LearnerDied("x"))
    assert not incidents.called


@pytest.mark.parametrize("completed", [5, 4])
async def test_a_death_after_the_last_checkpoint_does_not_fail_a_finished_run(
    completed: int, tmp_path: Path
) -> None:
    made = make_controller(tmp_path)
    made.step, made._checkpoints.completed = 5, completed
    recovered: list[Exception] = []

    async def dies() -> None:
        raise LearnerDied("at the last push")

    async def recover(error: Any) -> None:
        recovered.append(error)

    made._actors.publish_last = dies  # type: ignore[method-assign]
    made._recover = recover  # type: ignore[method-assign]
    assert await made._finish() is (completed == 5)
    assert len(recovered) == (completed < 5)


async def test_a_call_to_a_dead_replay_actor_raises_its_death(tmp_path: Path) -> None:
    async def dies(*_: object) -> None:
        raise ActorDiedError()

    made = make_controller(tmp_path, take=dies)
    with pytest.raises(ReplayDied):
        await made._make_step()


async def test_a_stop_ends_a_run_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    async def prepare(*_: object, **__: object) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def start(*_: object, model: RunModel, **__: object) -> None:
        try:
            await model.made()
        finally:
            await model.close()

    monkeypatch.setattr(controllers, "prepare_model", prepare)
    monkeypatch.setattr(controllers.RunActors, "start", start)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(5):
        with pytest.raises(StoppedEarly):
            await Controller.start(CONFIG, tmp_path, RECORDER, [], [], latest=None, stop=stop)
    assert ended == [True]


@pytest.mark.parametrize("step", [0, 3])
async def test_a_stop_aborts_an_evaluation(step: int, tmp_path: Path) -> None:
    made = make_controller(tmp_path)
    made.step = step
    began: list[int] = []

    class Checkpoints:
        async def complete(self, step: int) -> None:
            began.append(step)
            checkpoint = tmp_path / "checkpoints" / f"step_{step:06d}"
            checkpoint.mkdir(parents=True)

        wait = cancel = staticmethod(nothing)

    made._checkpoints = Checkpoints()  # type: ignore[assignment]
    made._evaluations = NAME(run=never, cancel=nothing)  # type: ignore[assignment]
    asyncio.get_running_loop().call_later(0.05, made._stop_requested.set)
    async with asyncio.timeout(5):
        with pytest.raises(RunStopped) as caught:
            await made._evaluate()
    assert began == [step] * (step > 0)
    assert isinstance(caught.value, StoppedEarly) == (step == 0)


@pytest.mark.parametrize("at", ["start", "publish"])
async def test_a_start_that_fails_leaves_no_actors(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    async def fail(*_: object, **__: object) -> None:
        raise LearnerError(at)

    async def start(*_: object, **__: object) -> Any:
        actors = make_controller(tmp_path)._actors
        actors.publish = fail  # type: ignore[method-assign]

        async def close() -> None:
            closed.append(True)

        actors.close = close  # type: ignore[method-assign]
        return actors

    monkeypatch.setattr(controllers, "prepare_model", nothing)
    monkeypatch.setattr(controllers.RunActors, "start", fail if at == "start" else start)
    with pytest.raises(LearnerError, match=at):
        await Controller.start(
            CONFIG, tmp_path, RECORDER, [], [], latest=None, stop=asyncio.Event()
        )
    assert closed == [True] * (at == "publish")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"body": LearnerError("body")}, "body"),
        ({"task": LearnerError("task")}, "task"),
        ({"body": LearnerError("body"), "at_cancel": KeyError("later")}, "body"),
        ({"body": LearnerError("body"), "closing": OSError("closing")}, "body"),
        ({"task": LearnerError("task"), "closing": KeyError("closing")}, "task"),
    ],
)
async def test_a_run_ends_with_its_first_cause(
    parts: dict[str, Exception], expected: str, tmp_path: Path
) -> None:
    async def fail(at: str) -> None:
        if at in parts:
            raise parts[at]

    async def play() -> None:
        await fail("task")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await fail("at_cancel")
            raise

    async def make_step() -> None:
        await asyncio.sleep(0)
        await fail("body")
        await asyncio.sleep(60)

    made = make_controller(tmp_path)
    made._make_step = make_step  # type: ignore[method-assign]
    made._actors.fleet.play = lambda tasks: tasks.create_task(play())  # type: ignore[method-assign]
    made._actors.close = lambda: fail("closing")  # type: ignore[method-assign]
    with pytest.raises(LearnerError) as caught:
        await made.run()
    assert str(caught.value) == expected


async def test_a_call_that_is_given_up_has_ended() -> None:
    event = asyncio.Event()
    event.set()
    assert await unless_set(event, never()) is None
    assert await unless_set(asyncio.Event(), taken()) == NAME(groups=[])


async def test_a_learner_that_died_in_the_background_is_found_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        raise LearnerDied("in the push of version 1")

    made = make_controller(tmp_path)
    made._actors.check = check  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        with pytest.raises(LearnerDied, match="version 1"):
            await made._make_step()


async def test_a_stop_ends_a_recovery_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_controller(tmp_path)
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    Incidents(made, NAME(step=3, folder=tmp_path), monkeypatch)
    made._watchdog.limit_s = made._recovery._watchdog.limit_s = 60.0
    made._actors.restart_learner = never  # type: ignore[method-assign]
    asyncio.get_running_loop().call_later(0.05, made._stop_requested.set)
    async with asyncio.timeout(5):
        with pytest.raises(RunStopped, match="step 3"):
            await made._recover(LearnerDied("x"))


async def test_a_death_in_the_first_evaluation_is_recovered_from(tmp_path: Path) -> None:
    made = make_controller(tmp_path)
    made.step = 0
    deaths: list[Exception] = [LearnerDied("rank 0")]
    evaluated: list[int] = []
    recovered: list[Exception] = []

    async def run(step: int) -> None:
        if deaths:
            raise deaths.pop()
        evaluated.append(step)

    async def make_step() -> None:
        made.step += 1

    async def recover(error: Any) -> None:
        recovered.append(error)

    made._evaluations = NAME(run=run, cancel=nothing)  # type: ignore[assignment]
    made._make_step = make_step  # type: ignore[method-assign]
    made._recover = recover  # type: ignore[method-assign]
    made._actors.publish_last = nothing  # type: ignore[method-assign]
    await made.run()
    assert (evaluated, len(recovered), made.step) == ([0], 1, 5)


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_evaluation_before_the_first_step_can_be_left_out(
    is_first: bool, tmp_path: Path
) -> None:
    made = make_controller(tmp_path)
    made.step = 0
    made._config = NAME(
        **vars(CONFIG) | {"evaluation": NAME(before_first_step=is_first, every_steps=0)}
    )
    evaluated: list[int] = []

    async def run(step: int) -> None:
        evaluated.append(step)

    async def make_step() -> None:
        made.step = CONFIG.run.num_steps

    made._evaluations = NAME(run=run, cancel=nothing)  # type: ignore[assignment]
    made._make_step = make_step  # type: ignore[method-assign]
    made._actors.publish_last = nothing  # type: ignore[method-assign]
    await made._finish()
    assert evaluated == ([0] if is_first else [])


async def test_an_evaluation_ends_before_the_actors_that_play_it(tmp_path: Path) -> None:
    made = make_controller(tmp_path)
    closed: list[str] = []

    async def cancel() -> None:
        closed.append("evaluation")

    async def close() -> None:
        closed.append("actors")

    made._evaluations = NAME(cancel=cancel)  # type: ignore[assignment]
    made._actors.close = close  # type: ignore[method-assign]
    await made.close()
    assert closed == ["evaluation", "actors"]
