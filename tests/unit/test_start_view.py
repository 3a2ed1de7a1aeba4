"""What a starting run waits for: the phases of its processes, and the line that counts them."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from raylearner.actors.engines import vllm_process
from raylearner.actors.engines.vllm_process import ErrorLog, find_phase
from raylearner.observability import display
from raylearner.observability.display import Display
from raylearner.observability.phases import Phases
from raylearner.observability.spans import Tracer
from raylearner.run import start_view
from raylearner.run.model import RunModel
from raylearner.run.start_view import follow


async def test_the_sizes_of_groups_stay_while_their_members_become_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_view, "POLL_S", 0.001)
    absent = ["a"] * 3
    lines: list[Sequence[str]] = []
    seen: asyncio.Queue[Sequence[str]] = asyncio.Queue()

    async def phases() -> list[str]:
        return list(absent)

    async def none() -> list[str]:
        return []

    def note(awaited: Sequence[str]) -> None:
        seen.put_nowait(awaited)
        if absent:
            absent.pop()

    fleet: Any = SimpleNamespace(phases=phases)
    ranks: Any = SimpleNamespace(phases=none)
    following = asyncio.create_task(
        follow(RunModel(""), {"learner ranks": ranks, "engines": fleet}, note)
    )
    async with asyncio.timeout(5):
        lines += [await seen.get() for _ in range(4)]
    following.cancel()
    assert lines[1:4] == [["engines 1/3 ready: a"], ["engines 2/3 ready: a"], []]


LOGGED = (
    ("Using V2 Model Runner", None),
    ("Starting to load model some/model...", "loading weights"),
    ("Model loading took 2.1 GiB memory and 3.2 seconds", "profiling memory"),
    ("[0] Dynamo bytecode transform time: 2.1 s", "compiling"),
    ("Available KV cache memory: 70 GiB", "capturing CUDA graphs"),
    ("kv cache group sizes (16,)", "capturing CUDA graphs"),
    ("Graph capturing finished in 9 secs, took 1.2 GiB", "warming up"),
)


def test_phases_of_an_engine_follow_from_what_vllm_logs() -> None:
    log = ""
    for line, phase in LOGGED:
        log += f"{line}\n"
        assert find_phase(log) == phase


@pytest.fixture
def engine_log() -> Iterator[ErrorLog]:
    log = ErrorLog()
    yield log
    log.remove()


async def test_the_progress_of_a_start_is_reported_while_it_is_logged(
    engine_log: ErrorLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "PROGRESS_POLL_S", 0.001)
    reported: asyncio.Queue[str] = asyncio.Queue()
    following = asyncio.create_task(
        engine_log.follow_start(reported.put_nowait, captures_graphs=False)
    )
    for text, phase in (
        ("Starting to load model x", "loading weights"),
        (LOGGED[4][0], "warming up"),
    ):
        engine_log._progress.write_text(text)
        async with asyncio.timeout(5):
            phases = [await reported.get()]
            while phases[-1] != phase:
                phases.append(await reported.get())
    following.cancel()


def test_each_phase_is_a_span() -> None:
    tracer = Tracer("rollout-0")
    phases = Phases(tracer, "starting")
    for name in ("importing", "importing", "loading"):
        phases.enter(name)
    assert phases.current == "loading"
    phases.end()
    assert [span.name for span in tracer.drain()] == [
        "start: starting",
        "start: importing",
        "start: loading",
    ]
    assert phases.current == ""


def test_a_stage_logs_what_changed_from_time_to_time_and_all_of_it_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [1000.0]
    monkeypatch.setattr(
        display, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    )
    logged: list[tuple[float, str]] = []

    def look(*lines: str) -> None:
        caplog.clear()
        stage.wait_for(lines)
        logged.extend((now[0] - 1000, r.getMessage()) for r in caplog.records)
        now[0] += display.LOG_INTERVAL_S / 2

    with Display(num_steps=1).stage("starting") as stage:
        for step in range(4):
            look(f"model {step}", "engines")
        for _ in range(8):
            look("model 3", "engines")
    assert logged == [
        (10, "model 2"),
        (10, "engines"),
        (20, "model 3"),
        (50, "model 3"),
        (50, "engines"),
    ]


def test_a_stage_that_is_only_shown_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Display(num_steps=1).stage("batch", is_logged=False) as stage:
        stage.wait_for(["batch 1/2"])
    assert not caplog.messages
