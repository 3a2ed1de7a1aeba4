"""Drivers, learners and replay actors that are killed: the run continues, loses and repeats nothing.

benchmarks/faults/kill_points.py, which tests/chaos runs, compares killed runs number by number.
"""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from loop import Launcher, finish, process_of, rows, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


def checkpoints(folder: Path, pattern: str = "step_??????") -> list[Path]:
    return sorted((folder / "checkpoints").glob(pattern))


def check_that_nothing_was_lost_or_repeated(folder: Path, *, num_steps: int) -> None:
    """Of runs with three groups per step."""
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, num_steps + 1))
    files = sorted((folder / "trajectories").glob("step_*.jsonl"))
    trained = Counter((r["group_id"], r["sample_index"]) for path in files for r in rows(path))
    assert max(trained.values()) == 1
    assert len({group_id for group_id, _ in trained}) == 3 * num_steps
    path = checkpoints(folder)[-1] / "replay" / "ledger.json"
    ledger: dict[str, Any] = json.loads(path.read_text())["ledger"]
    counts = ledger["counts"]
    num_open = sum(len(ledger[state]) for state in ("running", "held", "leased"))
    assert counts["trained"] == 3 * num_steps
    assert counts["admitted"] == num_open + counts["trained"] + sum(counts["dropped"].values())
    assert counts["admitted"] == ledger["next_group_id"]


def test_a_killed_driver_is_resumed_by_its_supervisor(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 8, "checkpoint_every_steps": 2},
        "replay": {"max_staleness": 2, "extra": 1},
        "actors": {"engine": {"arguments": {"delay_s": 0.02}}},
    }
    folder = launcher.folder / "run"
    process = launcher.start("run", change, "--retries", "2")
    wait_for(lambda: bool(checkpoints(folder)), what="the first checkpoint")
    (driver,) = psutil.Process(process.pid).children()
    driver.kill()
    output = finish(process, code=0)
    assert "killed by SIGKILL" in output
    assert driver.pid not in psutil.pids()
    check_that_nothing_was_lost_or_repeated(folder, num_steps=8)
    metrics = rows(folder / "metrics.jsonl")
    assert 0 <= metrics[6]["checkpoint/stall_s"] < 30, "of the checkpoint after step 6"


def test_a_learner_that_dies_before_the_first_checkpoint_starts_again(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 8, "checkpoint_every_steps": 4},
        "replay": {"max_staleness": 2},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
    }
    folder = launcher.folder / "run"
    process = launcher.start("run", change)
    log, metrics = folder / "log.txt", folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(rows(metrics)) >= 1, what="a step")
    os.kill(process_of(log, "learner-0"), signal.SIGKILL)
    output = finish(process, code=0)
    assert "rolls back to step 0" in output
    check_that_nothing_was_lost_or_repeated(folder, num_steps=8)
