"""What a starting run waits for: the phases of its processes, and the line that counts them."""

import asyncio
import logging
import time
from collections.abc import Iterator
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
from raylearner.run.start_view import describe, follow


def test_a_line_counts_what_is_not_ready_by_its_phase() -> None:
    engines = ["capturing CUDA graphs", "loading weights", "capturing CUDA graphs"]
    line = describe([("engines", engines, 12), ("learner ranks", ["loading"], 2)], is_made=True)
    assert line == (
        "waiting for 3 of 12 engines (2 capturing CUDA graphs, 1 loading weights) and 1 of 2 learner"
        " ranks (loading)"
    )
    assert describe([("engines", (), 12), ("learner ranks", (), 2)], is_made=True) == ""
    assert describe([("engines", (), 0)], is_made=False) == "waiting for the model"


async def test_the_sizes_of_groups_stay_while_their_members_become_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_view, "POLL_S", 0.001)
    absent = ["a"] * 3
    lines: list[str] = []
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def phases() -> list[str]:
        return list(absent)

    async def none() -> list[str]:
        return []

    def note(line: str) -> None:
        seen.put_nowait(line)
        if absent:
            absent.pop()

    fleet: Any = SimpleNamespace(phases=phases)
    following = asyncio.create_task(
        follow(RunModel(""), SimpleNamespace(phases=none), fleet, note)  # type: ignore[arg-type]
    )
    async with asyncio.timeout(5):
        lines += [await seen.get() for _ in range(4)]
    following.cancel()
    assert lines[1:4] == ["waiting for 2 of 3 engines (a)", "waiting for 1 of 3 engines (a)", ""]


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


def test_a_stage_logs_what_it_waits_for_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [1000.0]
    monkeypatch.setattr(
        display, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    )
    with Display(num_steps=1).stage("starting") as stage:
        for _ in range(5):
            stage.wait_for("waiting for 1 of 2 engines")
            now[0] += display.LOG_INTERVAL_S / 2
        stage.wait_for("")
    lines = [r.getMessage() for r in caplog.records if "engines" in r.getMessage()]
    assert lines == [f"waiting for 1 of 2 engines, {s:.0f} s" for s in (10, 20)]
