"""A run started by the command line, with its processes, its log and all that it leaves behind."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.faults import processes
from benchmarks.faults.ledger import Balance, read_balance, rows

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = Path("/dev/shm")
END_S = 20.0
"""Maximum time for processes to end after their driver."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray that end by themselves, but only a minute after a raylet that was killed."""
AGENTS_END_S = 100.0

SCRIPTED: dict[str, Any] = {
    "run": {"name": "scripted", "num_steps": 5, "checkpoint_every_steps": 0, "seed": 3},
    "cluster": {"num_cpus": 8, "object_store_bytes": 150_000_000},
    "data": {"train": {"kind": "calculator", "num_prompts": 40}},
    "environment": {"kind": "single_turn"},
    "renderer": {"max_prompt_tokens": 64, "max_response_tokens": 64},
    "sampling": {"max_turn_tokens": 64},
    "rewards": {"functions": [{"kind": "response_length", "target_tokens": 12}]},
    "actors": {
        "num_actors": 2,
        "cpus_per_actor": 0.5,
        "max_concurrent_episodes": 8,
        "engine": {
            "kind": "scripted",
            "script": "raylearner.actors.engines.scripted:RandomTokens",
            "arguments": {"vocab_size": 200, "max_tokens": 24, "delay_s": 0.002},
        },
    },
    "replay": {"groups_per_step": 3, "group_size": 4, "max_staleness": 0},
    "learner": {
        "cpus_per_rank": 0.5,
        "compute_dtype": "float64",
        "learning_rate": 1e-3,
        "max_tokens_per_micro_batch": 256,
    },
    "evaluation": {"num_prompts": 8},
    "observability": {"tensorboard": False},
}
"""A short run of the scripted engine, all but its model."""

TINY: dict[str, Any] = {
    "kind": "tiny",
    "hidden_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 128,
}


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in change.items():
        old = out.get(key)
        out[key] = (
            merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
        )
    return out


BASE = merged(
    SCRIPTED,
    {
        "run": {"num_steps": 100_000, "checkpoint_every_steps": 5, "watchdog_s": 20},
        "rewards": {
            "functions": [
                *SCRIPTED["rewards"]["functions"],
                {"kind": "benchmarks.faults.scripts:no_bonus", "per": "group"},
            ]
        },
        "actors": {"max_restarts": 20, "engine": {"arguments": {"delay_s": 0.05}}},
        "replay": {"max_staleness": 2},
        "weights": {"deadline_s": 15},
    },
)
"""One that goes on until it is stopped."""


def make_model(folder: Path) -> dict[str, str]:
    """Return the section of a tiny model in `folder`, made in another process on the first call."""
    if not (folder / "config.json").exists():
        code = (
            "import sys; from pathlib import Path;"
            "from raylearner.config.schema import TinyModel;"
            "from raylearner.tiny.model import make_tiny_model;"
            f"make_tiny_model(TinyModel(**{TINY!r}), Path(sys.argv[1]), seed=0)"
        )
        subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)
    return {"kind": "pretrained", "path": str(folder)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """All that outlives a run and its driver, by name."""

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()
    temporary: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        ports = [f"port {port}" for port in self.ports]
        return [*self.processes, *ports, *self.shared_memory, *self.temporary]


@dataclass(eq=False)
class FaultRun:
    """One run directory and the drivers that worked on it, in a folder of its own in /tmp.

    Ray's sessions, temporary files and the run's directory are inside, so that processes and files can
    be attributed to it. A context manager: at the end, every process of the run is killed.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Changes of `BASE`."""
    files: Sequence[str] = ()
    """Configuration files in place of `BASE`."""
    overrides: Sequence[str] = ()
    module: Sequence[str] = ("raylearner",)
    """Module that is run, and its arguments before the command."""
    retries: int | None = None
    """Resumes of the supervisor `train --retries`."""
    folder: Path = field(init=False)
    driver: "subprocess.Popen[bytes]" = field(init=False)
    ports: set[int] = field(init=False, default_factory=set[int])
    usage: list[processes.Usage] = field(init=False, default_factory=list[processes.Usage])

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
        (self.folder / "tmp").mkdir()
        self.dir = self.folder / "run"
        self.name = self.folder.name
        self._shared_before = {path.name for path in SHARED_MEMORY.iterdir()}

    def __enter__(self) -> "FaultRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # -- drivers -------------------------------------------------------------------------------

    def start(self) -> "FaultRun":
        files = list(self.files)
        if not files:
            path = self.folder / "config.yaml"
            path.write_text(yaml.safe_dump(merged(BASE, self.config)))
            files = [str(path)]
        named = [f"run.dir={self.dir}", f"run.name={self.name}"]
        self._drive(*files, *named, *self.overrides)
        return self

    def resume(self, *overrides: str) -> "FaultRun":
        self._drive("--resume", str(self.dir), *overrides)
        return self

    def _drive(self, *arguments: str) -> None:
        retries = [] if self.retries is None else ["--retries", str(self.retries)]
        command = [sys.executable, "-m", *self.module, "train", *retries, *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}",
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        with (self.folder / "output.txt").open("ab") as output:
            self.driver = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def is_running(self) -> bool:
        return self.driver.poll() is None

    def end(self, *, timeout_s: float = 120.0, number: int = signal.SIGTERM) -> int | None:
        """Send the driver a signal; return its exit code, or None where it does not end in time."""
        if self.is_running:
            self.driver.send_signal(number)
        return self.wait(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float) -> int | None:
        try:
            return self.driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill every process of the run."""
        for process in processes.members(self.folder):
            if process.pid != os.getpid():
                try:
                    process.kill()
                except psutil.Error:
                    continue
        self.driver.wait()

    # -- what it does --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the last step on record."""
        recorded = rows(self.dir / "metrics.jsonl")
        return int(recorded[-1]["step"]) if recorded else 0

    @property
    def rewards(self) -> list[float]:
        recorded = rows(self.dir / "metrics.jsonl")
        return [row["rollout/reward/mean"] for row in recorded if "rollout/reward/mean" in row]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def log(self) -> str:
        path = self.dir / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_until(
        self, condition: Callable[[], bool], *, timeout_s: float, pause_s: float = 0.1
    ) -> bool:
        """Return whether the condition held in time; it is not awaited beyond the driver's end."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if condition():
                return True
            if not self.is_running:
                return condition()
            time.sleep(pause_s)
        return False

    def wait_step(self, step: int, *, timeout_s: float = 240.0) -> bool:
        return self.wait_until(lambda: self.step >= step, timeout_s=timeout_s)

    # -- processes -----------------------------------------------------------------------------

    def find(self, role: str) -> list[psutil.Process]:
        """Return the living processes of a role of `TITLES`."""
        return [p for p in processes.members(self.folder) if processes.role_of(p) == role]

    def pick(self, role: str, generator: random.Random) -> psutil.Process:
        """Return one of them. Raises `LookupError` where there is none."""
        found = sorted(self.find(role), key=lambda process: process.pid)
        if not found:
            raise LookupError(f"no process of role {role}")
        return generator.choice(found)

    def observe(self) -> None:
        """Record the usage of all processes, and the ports on which they listen."""
        found = processes.members(self.folder)
        self.usage += processes.usage(found, time_s=time.monotonic())
        self.ports |= processes.listening(found)

    # -- what is left --------------------------------------------------------------------------

    def leftovers(self, *, is_brief: bool = False) -> Leftovers:
        """Return what is left after the driver, which has some time to take effect.

        `is_brief` ignores Ray's agents, and shared memory without the run's name: others may use the machine.
        """
        deadline_s = time.monotonic() + (END_S if is_brief else AGENTS_END_S)
        while (left := self._left(is_brief=is_brief)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        agents = {process.pid for process in processes.members(self.folder)} - {p.pid for p in left}
        in_use = {
            connection.laddr.port
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.pid not in agents
        }
        shared = {path.name for path in SHARED_MEMORY.iterdir()} - self._shared_before
        return Leftovers(
            processes=tuple(sorted(f"{p.pid} {processes.title(p)[:60]}" for p in left)),
            ports=tuple(sorted(self.ports & in_use)),
            shared_memory=tuple(sorted(n for n in shared if self.name in n or not is_brief)),
            temporary=tuple(sorted(path.name for path in (self.folder / "tmp").iterdir())),
        )

    def _left(self, *, is_brief: bool) -> list[psutil.Process]:
        found = processes.members(self.folder)
        return [p for p in found if not (is_brief and processes.title(p).startswith(AGENTS))]

    def balance(self) -> Balance:
        return read_balance(self.dir)
