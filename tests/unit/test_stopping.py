"""A request to stop is heard at any time, and promises only a checkpoint that exists."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from raylearner.errors import RunStopped, StoppedEarly
from raylearner.learner.checkpoint.directory import MANIFEST
from raylearner.run.stopping import StopRequest, stopped


def send() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def write_checkpoint(folder: Path, *, step: int) -> None:
    checkpoint = folder / "checkpoints" / f"step_{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text(json.dumps({"step": step, "files": {}}))


def test_a_stop_reports_the_checkpoint_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert isinstance(stopped(folder), StoppedEarly)
    (folder / "checkpoints" / "step_000007.partial").mkdir(parents=True)
    assert isinstance(stopped(folder), StoppedEarly)
    write_checkpoint(folder, step=4)
    error = stopped(folder)
    assert not isinstance(error, StoppedEarly)
    assert "step 4" in str(error)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_signal_before_the_loop_ends_the_run_immediately(
    has_checkpoint: bool, tmp_path: Path
) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    if has_checkpoint:
        write_checkpoint(tmp_path, step=4)
    cleaned: list[bool] = []

    def work() -> None:
        try:
            send()
            time.sleep(10)
        finally:
            send()  # a second one does not break off the clean-up
            cleaned.append(True)

    with pytest.raises(RunStopped) as caught, StopRequest(tmp_path).handled():
        work()
    assert isinstance(caught.value, StoppedEarly) is not has_checkpoint
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == previous


def test_the_signal_handler_of_ray_ends_the_run_in_the_same_way(tmp_path: Path) -> None:
    with pytest.raises(StoppedEarly), StopRequest(tmp_path).handled():
        raise SystemExit(signal.SIGTERM)
    with pytest.raises(SystemExit), StopRequest(tmp_path).handled():
        raise SystemExit(3)


async def test_a_signal_and_the_deadline_stop_a_running_loop(tmp_path: Path) -> None:
    for stop_at_s in (None, time.time() + 0.05):
        stop = StopRequest(tmp_path)
        with stop.handled():
            stop.listen(stop_at_s)
            if stop_at_s is None:
                send()
                send()
            async with asyncio.timeout(5):
                await stop.event.wait()


def test_a_signal_after_the_loop_does_not_break_off_the_end_of_the_cluster(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path)

    async def train() -> None:
        stop.listen(None)

    with stop.handled():
        asyncio.run(train())
        send()
        time.sleep(0.01)
