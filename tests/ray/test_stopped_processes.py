"""Processes that stop without dying are noticed, named and replaced; SIGTERM is heard at any time."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loop import Launcher, finish, is_alive, process_of, processes_of, rows, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

LONG: dict[str, Any] = {
    "run": {"num_steps": 1000, "checkpoint_every_steps": 1, "watchdog_s": 5},
    "replay": {"max_staleness": 2},
    "evaluation": None,
}


def steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [row["step"] for row in rows(path)] if path.exists() else []


def test_stopped_actors_are_reported_and_replaced(launcher: Launcher) -> None:
    folder = launcher.folder / "run"
    process = launcher.start("run", LONG)
    for name in ("learner-0", "rollout-0"):
        reached = max(steps(folder), default=0)
        wait_for(lambda: max(steps(folder), default=0) >= reached + 3, what="three steps")  # noqa: B023
        pid = process_of(folder / "log.txt", name)
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: not is_alive(pid), what=f"the end of {name}")  # noqa: B023
        text = (folder / "log.txt").read_text()
        assert "T (stopped)" in text
        assert f"process {pid} " in text
    reached = max(steps(folder))
    wait_for(lambda: max(steps(folder)) > reached + 3, what="further steps")
    process.send_signal(signal.SIGTERM)
    assert "--resume" in finish(process, code=143)


def test_sigterm_during_startup_ends_the_run_without_a_checkpoint(launcher: Launcher) -> None:
    log = launcher.folder / "run" / "log.txt"
    process = launcher.start("run", LONG)
    wait_for(lambda: log.exists() and "starting 1 learner" in log.read_text(), what="the start")
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=130, timeout_s=30)
    assert "before the first checkpoint" in output
    assert not any(map(is_alive, processes_of(log)))
