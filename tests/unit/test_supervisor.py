import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raylearner.run.supervisor import Supervisor

CHILD = """
import os, signal, sys
from pathlib import Path
folder = Path(os.environ["FOLDER"])
calls = folder / "calls"
with calls.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
codes = os.environ["CODES"].split()
code = int(codes[min(len(calls.read_text().splitlines()), len(codes)) - 1])
if code < 0:
    os.kill(os.getpid(), -code)
if code == 99:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "ready").touch()
    signal.pause()
sys.exit(code)
"""


def _supervise(folder: Path, codes: str, *, retries: int) -> tuple[int, list[str], list[float]]:
    """Return the exit code, the arguments of every child and the pauses."""
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").touch()
    pauses: list[float] = []
    supervisor = Supervisor(
        folder=folder / "run",
        first=["train", "a.yaml"],
        retries=retries,
        environment={"FOLDER": str(folder), "CODES": codes},
        program=[sys.executable, "-c", CHILD],
        sleep=pauses.append,
    )
    return supervisor.run(), (folder / "calls").read_text().splitlines(), pauses


@pytest.mark.parametrize(
    ("codes", "retries", "code", "num_calls"),
    [
        ("0", 3, 0, 1),
        ("1 0", 3, 0, 2),
        ("-9 1 0", 3, 0, 3),
        ("1", 2, 1, 3),
        ("-9", 1, 137, 2),
        ("2", 3, 2, 1),
        ("1 2", 3, 2, 2),
        ("130", 3, 130, 1),
        ("143", 3, 143, 1),
    ],
)
def test_failures_are_retried_and_final_codes_are_not(
    tmp_path: Path, codes: str, retries: int, code: int, num_calls: int
) -> None:
    found, calls, pauses = _supervise(tmp_path, codes, retries=retries)
    assert (found, len(calls), len(pauses)) == (code, num_calls, num_calls - 1)
    resumed = f"train --resume {tmp_path / 'run'} --restart-if-no-checkpoint"
    assert calls == ["train a.yaml", *[resumed] * (num_calls - 1)]


def test_a_run_that_was_killed_before_it_wrote_anything_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.lock").touch()
    supervisor = Supervisor(
        folder=folder,
        first=["train", "a.yaml"],
        retries=1,
        environment={"FOLDER": str(tmp_path), "CODES": "-9 0"},
        program=[sys.executable, "-c", CHILD],
        sleep=lambda _: None,
    )
    assert supervisor.run() == 0
    assert (tmp_path / "calls").read_text().splitlines() == ["train a.yaml"] * 2
    assert not folder.exists()


SUPERVISE = """
import sys
from pathlib import Path
from raylearner.run.supervisor import Supervisor
sys.exit(Supervisor(folder=Path("none"), first=["train"], retries=5, program=[sys.executable, "-c", sys.argv[1]]).run())
"""


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "FOLDER": str(folder), "CODES": "99"}
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, CHILD], env=environment)
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    return process


def test_a_stop_reaches_the_child_and_ends_the_supervisor_with_its_code(tmp_path: Path) -> None:
    process = _start(tmp_path)
    process.terminate()
    assert process.wait(30) == 143
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_the_child_is_stopped_if_the_supervisor_is_killed(tmp_path: Path) -> None:
    import psutil

    process = _start(tmp_path)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    child.wait(30)


def test_every_resume_repeats_the_overrides_of_a_run_that_was_resumed(tmp_path: Path) -> None:
    """The first may fail before it has written them into the run directory."""
    (tmp_path / "config.yaml").touch()
    supervisor = Supervisor(
        folder=tmp_path,
        first=["train", "--resume", str(tmp_path), "run.num_steps=9"],
        overrides=["run.num_steps=9"],
        retries=1,
        environment={"FOLDER": str(tmp_path), "CODES": "1 0"},
        program=[sys.executable, "-c", CHILD],
        sleep=lambda _: None,
    )
    assert supervisor.run() == 0
    second = (tmp_path / "calls").read_text().splitlines()[1]
    assert second == f"train --resume {tmp_path} --restart-if-no-checkpoint run.num_steps=9"


def test_a_stop_ends_a_pause(tmp_path: Path) -> None:
    supervisor = Supervisor(folder=tmp_path, first=[], retries=1)
    timer = threading.Timer(0.1, supervisor._signals.append, [signal.SIGTERM])
    timer.start()
    started = time.monotonic()
    supervisor._pause(60.0)
    assert 0.05 < time.monotonic() - started < 10
    timer.join()
