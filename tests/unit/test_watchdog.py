"""Every wait of a run ends: by an answer, by the death of the actors that are stuck, or by an error."""

import asyncio
import os
import signal
import subprocess
import sys
import types
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from raylearner import stacks
from raylearner.errors import LearnerDied, ReplayDied, StalledError
from raylearner.learner.checkpoint.directory import Checkpoint
from raylearner.run import controller as controllers
from raylearner.run import processes, step_reporter, taking
from raylearner.run import watchdog as watchdogs
from raylearner.run.controller import Controller
from raylearner.run.processes import Finding
from raylearner.run.watchdog import Role, Watchdog, describe_stall

NAME = types.SimpleNamespace
LIMIT_S = 0.25


async def never(*_: object, **__: object) -> None:
    await asyncio.sleep(3600)


async def nothing(*_: object, **__: object) -> None: ...


class Actors:
    """Processes by name; those in `silent` do not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.silent: set[str] = set()
        self.ended: list[str] = []

        async def examine(actors: dict[str, Any]) -> list[Finding]:
            return [Finding(name, name not in self.silent, ["process 7"]) for name in actors]

        async def answers(actor: str) -> bool:
            return actor not in self.silent

        monkeypatch.setattr(processes, "examine", examine)
        monkeypatch.setattr(processes, "answers", answers)
        monkeypatch.setattr(watchdogs, "END_TIMEOUT_S", LIMIT_S)
        monkeypatch.setattr(processes, "end", lambda actors: self.ended.extend(actors))


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    return Actors(monkeypatch)


RANKS = Role(
    "the learner", lambda: {"learner-0": "learner-0", "learner-1": "learner-1"}, LearnerDied
)
REPLAY = Role("the replay actor", lambda: {"replay": "replay"}, ReplayDied)
ROLLOUT = Role("rollout actors", lambda: {"r0": "r0", "r1": "r1"}, StalledError)


def make_watchdog() -> Watchdog:
    return Watchdog(LIMIT_S, step=lambda: 7)


@pytest.mark.parametrize(
    ("silent", "death", "ended"),
    [
        (set[str](), LearnerDied, ["learner-0", "learner-1"]),
        ({"learner-1"}, LearnerDied, ["learner-0", "learner-1"]),
        ({"replay"}, ReplayDied, ["replay"]),
    ],
)
async def test_a_role_that_does_not_answer_is_ended_at_the_limit(
    silent: set[str], death: type[Exception], ended: list[str], actors: Actors
) -> None:
    actors.silent = silent
    with pytest.raises(death, match=r"copying .* step 7[^$]*process 7"):
        await make_watchdog().wait("copying", never(), roles=[RANKS, REPLAY])
    assert actors.ended == ended


async def test_a_wait_that_depends_on_no_actor_ends_the_run(actors: Actors) -> None:
    with pytest.raises(StalledError, match="watchdog_s"):
        await make_watchdog().wait("closing", never())
    assert actors.ended == []


async def test_an_answer_during_the_examination_counts(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = asyncio.get_running_loop().create_future()

    async def examine(_: object) -> list[Finding]:
        answer.set_result(5)
        await asyncio.sleep(0)
        return [Finding("replay", True, [])]

    monkeypatch.setattr(processes, "examine", examine)
    assert await make_watchdog().wait("commit", answer, roles=[REPLAY]) == 5
    assert actors.ended == []


async def test_a_wait_with_progress_continues(actors: Actors) -> None:
    written: list[int] = []

    def count() -> int:
        written.append(1)
        return min(len(written), 12)

    waiting = make_watchdog().wait("writing", never(), roles=[REPLAY], progress=count)
    started = asyncio.get_running_loop().time()
    with pytest.raises(ReplayDied):
        await waiting
    assert asyncio.get_running_loop().time() - started > 2 * LIMIT_S
    assert len(written) > 12


async def test_a_cancelled_wait_cancels_its_call_unless_it_is_shielded() -> None:
    inner = asyncio.create_task(asyncio.sleep(0.2, "done"))
    waiting = asyncio.create_task(
        Watchdog(60, step=lambda: 0).wait("report", asyncio.shield(inner))
    )
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inner == "done"


async def test_only_actors_that_do_not_answer_are_ended(actors: Actors) -> None:
    actors.silent = {"r1"}
    watching = asyncio.create_task(make_watchdog().watch(ROLLOUT))
    await asyncio.sleep(8 * LIMIT_S)
    watching.cancel()
    assert set(actors.ended) == {"r1"}


async def test_actors_that_answer_again_are_left_alone(actors: Actors) -> None:
    watching = asyncio.create_task(make_watchdog().watch(ROLLOUT))
    for _ in range(6):
        actors.silent = {"r1"}
        await asyncio.sleep(LIMIT_S / 2)
        actors.silent = set()
        await asyncio.sleep(LIMIT_S / 2)
    watching.cancel()
    assert actors.ended == []


async def test_a_failing_replay_actor_does_not_hide_the_cause(tmp_path: Path) -> None:
    async def breaks() -> None:
        raise OSError(28, "No space left on device", "/x")

    error = await describe_stall(NAME(describe=NAME(remote=breaks)), tmp_path, text="idle 7 s")
    assert "idle 7 s" in str(error)
    assert "/x: No space left on device" in str(error)


# -- the waits of the controller, each of which hangs once ------------------------------------------

CONFIG: Any = NAME(
    replay=NAME(groups_per_step=1),
    run=NAME(
        watchdog_s=LIMIT_S,
        num_steps=5,
        max_learner_restarts=1,
        restart_window_s=60.0,
        keep_last=1,
        checkpoint_async=True,
        checkpoint_every_steps=1,
        checkpoint_every_s=None,
        max_checkpoint_failures=1,
    ),
    learner=NAME(
        num_data_ranks=1,
        token_budget=1,
        num_mini_batches=1,
        mask_truncated=False,
        num_ranks=1,
    ),
    actors=NAME(min_actors=1, start_timeout_s=LIMIT_S),
    rewards=NAME(reported_failed_reward=0.0),
    weights=NAME(deadline_s=0.0),
    environment=NAME(kind="single_turn"),
    observability=NAME(trace=False),
    evaluation=None,
)


class Run:
    """A controller whose actors answer at once, but for the calls named in `hangs`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *hangs: str) -> None:
        monkeypatch.setattr(controllers, "pack", lambda *_, **__: [])
        monkeypatch.setattr(taking, "TAKE_POLL_S", 0.05)
        monkeypatch.setattr(step_reporter, "ACTORS_TIMEOUT_S", 0.0)

        def call(name: str, result: object = None) -> Callable[..., Awaitable[Any]]:
            async def answer(*_: object, **__: object) -> object:
                if name in hangs:
                    await asyncio.sleep(3600)
                await asyncio.sleep(0.001)
                return result

            return answer

        take = NAME(groups=[], metrics={}, failures=[])
        answers = {
            "take": None if "groups" in hangs else take,
            "progress": 1,
            "describe": ["r0 runs"],
            "failures": [],
            "commit": None,
            "cut": None,
            "save": None,
        }
        replay = NAME(**{n: NAME(remote=call(n, value)) for n, value in answers.items()})
        output = NAME(policy_version=2, metrics={}, advantages={}, logprobs={})
        learner = NAME(
            policy_version=1,
            shares_prefixes=False,
            step=call("step", output),
            save=call("copy"),
            finish_save=call("write"),
            restore=call("restore"),
            drain_spans=call("spans", []),
            actors={"learner-0": "learner-0"},
        )
        run_actors: Any = NAME(
            replay=replay,
            learner=learner,
            fleet=NAME(
                play=lambda _: None,
                actors={},
                waits_for_resources=False,
                num_restarts=0,
                drain=call("drain", ([], [])),
            ),
            publisher=NAME(metrics={}),
            sleep_engines=call("sleep"),
            start_publishing=lambda _: None,
            publish=call("publish"),
            load_replay=call("load"),
            restart_learner=call("restart"),
            publish_restored=call("publish restored"),
            publish_last=call("publish"),
            close=call("close"),
            check=lambda: None,
        )
        recorder: Any = NAME(
            stage=lambda _: nullcontext(),
            waiting=lambda _: nullcontext(),
            spans=lambda _: None,
            rewind=lambda _: None,
            evaluation_trajectories=lambda *_: None,
        )
        tracer: Any = NAME(span=lambda *_, **__: nullcontext(), drain=list)
        self.controller = Controller(
            CONFIG, folder, recorder, [], actors=run_actors, tracer=tracer, stop=asyncio.Event()
        )
        self.controller.step = 1
        self.controller._reports._report = call("report")  # type: ignore[method-assign]

    async def step_twice(self) -> None:
        for _ in range(2):
            await self.controller._make_step()

    async def restore(self) -> None:
        await self.controller._recovery.restore(Checkpoint(folder=Path("x"), step=3))

    async def roll_back(self) -> None:
        await self.controller._recover(LearnerDied("first"))


@pytest.mark.parametrize(
    ("hangs", "does", "error"),
    [
        ("take", Run.step_twice, ReplayDied),
        ("progress, groups", Run.step_twice, ReplayDied),
        ("groups", Run.step_twice, StalledError),
        ("sleep", Run.step_twice, StalledError),
        ("step", Run.step_twice, LearnerDied),
        ("commit", Run.step_twice, ReplayDied),
        ("report", Run.step_twice, StalledError),
        ("copy", Run.step_twice, LearnerDied),
        ("cut", Run.step_twice, LearnerDied),
        ("write", Run.step_twice, LearnerDied),
        ("restore", Run.restore, LearnerDied),
        ("load", Run.restore, ReplayDied),
        ("restart", Run.roll_back, LearnerDied),
        ("publish restored", Run.roll_back, LearnerDied),
    ],
)
async def test_every_wait_of_the_loop_has_a_limit(
    hangs: str,
    does: Callable[[Run], Awaitable[None]],
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    actors: Actors,
) -> None:
    run = Run(tmp_path, monkeypatch, *hangs.split(", "))
    async with asyncio.timeout(10):
        with pytest.raises(error):
            await does(run)


async def test_closing_continues_after_a_part_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actors: Actors
) -> None:
    monkeypatch.setattr(controllers, "CLOSE_TIMEOUT_S", LIMIT_S)
    run = Run(tmp_path, monkeypatch, "report", "close")
    run.controller._reports._running = asyncio.create_task(never())
    async with asyncio.timeout(5):
        with pytest.raises(StalledError):
            await run.controller.close()


# -- what a process is doing ----------------------------------------------------------------------

PROGRAM = """
import time
from raylearner import stacks

def sleeps_for_long():
    print("ready", flush=True)
    time.sleep(60)

if {registers}:
    stacks.register()
sleeps_for_long()
"""


@pytest.mark.parametrize(
    ("registers", "stop", "words"),
    [
        (True, False, ["state ", "sleeps_for_long"]),
        (True, True, ["state T (stopped)"]),
        (False, False, ["state "]),
    ],
)
def test_a_process_is_described_and_keeps_running(
    registers: bool, stop: bool, words: list[str]
) -> None:
    program = PROGRAM.format(registers=registers)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            if stop:
                os.kill(process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            text = "\n".join(stacks.describe(process.pid))
            assert process.poll() is None
        finally:
            process.kill()
    for word in words:
        assert word in text
    assert ("sleeps_for_long" in text) == (registers and not stop)
    assert stacks.describe(process.pid) == ["it has ended"]
