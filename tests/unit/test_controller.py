"""How the controller waits: everything has a limit, and a stop is heard while a run starts."""

import asyncio
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from raylearner.errors import LearnerDied, RunStopped, StalledError
from raylearner.run import controller as controllers
from raylearner.run.controller import Controller
from raylearner.run.watchdog import stalled, unless_set

NAME = types.SimpleNamespace


async def never(*_: object, **__: object) -> None:
    await asyncio.sleep(3600)


async def nothing(*_: object, **__: object) -> None: ...


def remote(function: Any) -> Any:
    return NAME(remote=function)


def make_controller(
    folder: Path, *, take: Any = nothing, progress: Any = nothing, step: Any = never
) -> Controller:
    """A controller with stand-ins for its actors, of which some never answer."""

    async def lines() -> list[str]:
        return ["rollout-0 runs 3 episodes"]

    made = Controller.__new__(Controller)
    values = {
        "_config": NAME(
            replay=NAME(groups_per_step=1),
            run=NAME(watchdog_s=0.1, num_steps=5, max_learner_restarts=2),
            learner=NAME(
                num_data_ranks=1,
                max_tokens_per_micro_batch=1,
                num_mini_batches=1,
                mask_truncated=False,
                num_ranks=1,
            ),
            actors=NAME(num_actors=1),
        ),
        "_stop_requested": asyncio.Event(),
        "_tracer": NAME(span=lambda *_, **__: nullcontext()),
        "_recorder": NAME(stage=lambda _: nullcontext()),
        "_folder": folder,
        "_num_learner_restarts": 0,
        "_saver": None,
        "_side_evaluation": None,
        "_reporting": None,
        "_is_resumed": False,
        "_training": [],
        "_evaluator": None,
        "step": 1,
        "_started": NAME(
            replay=NAME(
                take=remote(take),
                progress=remote(progress),
                describe=remote(lines),
                save=remote(nothing),
            ),
            learner=NAME(policy_version=1, step=step),
            let_engines_sleep=nothing,
        ),
    }
    for name, value in values.items():
        setattr(made, name, value)
    return made


async def taken(*_: object) -> Any:
    return NAME(groups=[])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "rollout-0 runs 3 episodes"),
        ({"take": never}, "the replay actor's take"),
        ({"progress": never}, "the replay actor's progress"),
        ({"take": taken}, "the learner's step"),
    ],
)
async def test_whoever_does_not_answer_is_named_after_the_watchdogs_time(
    parts: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controllers, "pack", lambda *_, **__: [])
    monkeypatch.setattr(controllers, "TAKE_POLL_S", 0.1)
    made = make_controller(tmp_path, **parts)
    async with asyncio.timeout(5):
        with pytest.raises(StalledError) as caught:
            await made._make_step()
    assert words in str(caught.value)


async def test_a_replay_that_fails_meanwhile_replaces_no_cause(tmp_path: Path) -> None:
    async def breaks() -> None:
        raise OSError(28, "No space left on device", "/x")

    replay = NAME(describe=remote(breaks))
    error = await stalled(replay, tmp_path, idle_s=7, step=3)
    assert "no progress for 7 s at step 3" in str(error)
    assert "/x: No space left on device" in str(error)


async def test_a_learner_that_dies_in_its_restart_is_restarted_as_often_as_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_controller(tmp_path)
    calls: list[int] = []

    async def dies() -> None:
        calls.append(1)
        raise LearnerDied("again")

    made._actors.restart_learner = dies
    monkeypatch.setattr(controllers.checkpoint, "latest", lambda _: NAME(step=1, folder=tmp_path))
    with pytest.raises(LearnerDied, match="is used up: again"):
        await made._roll_back(LearnerDied("first"))
    assert len(calls) == made._config.run.max_learner_restarts


async def test_a_stop_ends_a_run_that_still_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_controller(tmp_path)
    ended: list[bool] = []

    async def prepare(*_: object) -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)
        return ""

    monkeypatch.setattr(controllers, "prepare_model", prepare)
    asyncio.get_running_loop().call_later(0.05, made.request_stop)
    made.step = 0
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        with pytest.raises(RunStopped, match="no checkpoint"):
            await made.start(tasks, latest=None)
    assert ended == [True]


async def test_a_call_that_is_given_up_has_ended() -> None:
    event = asyncio.Event()
    event.set()
    assert await unless_set(event, never()) is None
    assert await unless_set(asyncio.Event(), taken()) == NAME(groups=[])
