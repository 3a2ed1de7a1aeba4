"""What the loop tests share: a scripted configuration and the ways to run it as a user would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.run import SCRIPTED, TINY, merged

__all__ = ["SCRIPTED", "TINY", "merged"]

ROOT = Path(__file__).resolve().parents[2]


def pretrained(folder: Path) -> dict[str, Any]:
    return {"kind": "pretrained", "path": str(folder)}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
}
ENVIRONMENT.pop("RAY_ADDRESS", None)


def run_cli(
    *arguments: str,
    timeout_s: float,
    code: int = 0,
    folder: Path | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> str:
    """What `python -m raylearner` printed, started in `folder`; it must end with `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "raylearner", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == code, done.stdout[-4000:]
    return done.stdout


class Launcher:
    """Runs `python -m raylearner train` as a user would, on the cluster at `address`.

    Runs go on from the model directory `model`, where `change` names no other model.
    """

    def __init__(self, folder: Path, *, address: str, model: Path) -> None:
        self.folder, self.model = folder, model
        self._address = address
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, name: str, change: dict[str, Any], *arguments: str) -> "subprocess.Popen[str]":
        config = self.folder / f"{name}.yaml"
        change = {"model": pretrained(self.model)} | change
        config.write_text(yaml.safe_dump(merged(SCRIPTED, change)))
        return self.start_with(str(config), f"run.dir={self.folder / name}", *arguments)

    def start_with(self, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "raylearner", "train", *arguments],
            env={**ENVIRONMENT, "RAY_ADDRESS": self._address},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A test run started in a shell's background ignores it, and so would its children.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self._processes.append(process)
        return process

    def run(self, name: str, change: dict[str, Any], *arguments: str, code: int = 0) -> str:
        return finish(self.start(name, change, *arguments), code=code)

    def resume(self, name: str, *arguments: str, code: int = 0) -> str:
        return finish(self.start_with("--resume", str(self.folder / name), *arguments), code=code)

    def close(self) -> None:
        """Ends every run; none may leave an actor behind."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for log in self.folder.glob("*/log.txt"):
            wait_for_the_end(log)


def finish(process: "subprocess.Popen[str]", *, code: int, timeout_s: float = 150) -> str:
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == code, output[-4000:]
    return output


def wait_for(
    condition: Callable[[], bool], *, timeout_s: float = 90, what: str = "", pause_s: float = 0.05
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what or condition}"
        time.sleep(pause_s)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(log: Path) -> list[int]:
    """Of the actors that a run's log names."""
    text = log.read_text()
    return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "runs as process" in line]


def process_of(log: Path, name: str) -> int:
    """The process that the log of a run names for an actor."""
    lines = [
        line
        for line in log.read_text().splitlines()
        if f"{name} " in line and "runs as process" in line
    ]
    return int(lines[-1].rsplit(" ", 1)[1])


def wait_for_the_end(log: Path) -> None:
    wait_for(
        lambda: not any(map(is_alive, processes_of(log))),
        timeout_s=30,
        what=f"the processes of {log} to end",
    )
