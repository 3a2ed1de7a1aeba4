"""The runs and sweeps below some directories, with a summary of each."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.errors import ConfigError
from raylearner.observability.run_directory import FAILURES_FILE, LOCK_FILE
from raylearner.observability.viewer.index import Index
from raylearner.observability.viewer.series import Series
from raylearner.text import dump_json

MAX_DEPTH = 5
MAX_RUNS = 5000
SCAN_AGAIN_S = 2.0
"""Minimum time between two searches for runs."""
RUN_FILES = ({"metrics.jsonl"}, {"trajectories"}, {"config.yaml", "log.txt"})
"""A directory with all files of one of these is a run's."""
SWEEP_FILE = "sweep.json"
REWARD = "rollout/reward/mean"
CURVE_POINTS = 40
EDGE = 0.1
"""Share of a run's steps over which its first and last reward are averaged."""
_NUM_STEPS = re.compile(r"^run:\n(?: +.*\n)*?  num_steps: (\d+)", re.MULTILINE)
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(slots=True)
class Run:
    """One run directory, with what was read of it."""

    id: str
    path: Path
    metrics: Series = field(init=False)
    evaluations: Series = field(init=False)
    _index: Index | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.metrics = Series(self.path / "metrics.jsonl")
        self.evaluations = Series(self.path / "eval.jsonl")

    @property
    def index(self) -> Index:
        """The index of its trajectories, made when it is first asked for."""
        with self._lock:
            if self._index is None:
                self._index = Index(self.path, self.metrics)
            return self._index

    def close(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.close()

    def summary(self) -> dict[str, Any]:
        """Return a row of the list of runs."""
        self.metrics.refresh()
        self.evaluations.refresh()
        steps, rewards = self.metrics.points(REWARD, 2**31)
        _, curve = self.metrics.points(REWARD, CURVE_POINTS)
        edge = max(1, round(len(rewards) * EDGE))
        step, num_steps = int(steps[-1]) if steps else 0, self.num_steps()
        return {
            "id": self.id,
            "step": step,
            "num_steps": num_steps,
            "state": self.state(step, num_steps),
            "reward_first": _mean(rewards[:edge]),
            "reward_last": _mean(rewards[-edge:]),
            "evaluation": self.evaluations.last("reward/mean"),
            "time_s": self.metrics.last("time_s"),
            "curve": curve,
            "modified_s": self.modified_s(),
            "has_trajectories": (self.path / "trajectories").is_dir(),
            "num_damaged": self.metrics.num_damaged,
        }

    def modified_s(self) -> float:
        times = [_modified_s(self.path / name) for name in ("metrics.jsonl", "log.txt")]
        return max(times) or _modified_s(self.path)

    def num_steps(self) -> int | None:
        """Return the number of steps in the run's configuration."""
        try:
            found = _NUM_STEPS.search((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return int(found[1]) if found else None

    def state(self, step: int, num_steps: int | None) -> str:
        """Return `running`, `complete` or `stopped`; a process of another host counts as ended."""
        try:
            holder = _HOLDER.match((self.path / LOCK_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            holder = None
        if holder and holder[2] == socket.gethostname() and _is_python(int(holder[1])):
            return "running"
        return "complete" if num_steps is not None and step >= num_steps else "stopped"

    def configuration(self) -> dict[str, str]:
        """Return the configuration by dotted key. Raises `ConfigError` if it is damaged."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        return _flat_configuration(path, path.stat().st_mtime_ns)

    def without_trajectories(self) -> str:
        """Return why the run has no trajectories to show."""
        self.metrics.refresh()
        if self.metrics.num_rows:
            return (
                "This run has no trajectories: observability.trajectories_every_steps, which controls"
                " them, is 0 in its configuration, or larger than its number of steps."
            )
        log, failures = self.path / "log.txt", self.path / FAILURES_FILE
        cause = " Its failed episodes are in failures.jsonl." if _size(failures) else ""
        return f"This run has completed no step; see {log}.{cause}"


class Library:
    """Owns the runs below some directories; they are searched again now and then."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises `ConfigError` if a directory does not exist or has no runs in it."""
        self._roots = _name_roots([root.resolve() for root in roots])
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._sweeps: dict[str, Path] = {}
        self._scanned_s = 0.0
        for root in roots:
            if not root.is_dir():
                raise ConfigError(
                    f"{root}: no such directory; give the directory of a run, or one of runs"
                )
        if not self.runs() and not self.sweeps():
            raise ConfigError(
                f"{', '.join(map(str, roots))}: has no runs, which have a config.yaml and a"
                " metrics.jsonl; give the directory of a run, or one of runs"
            )

    def runs(self) -> dict[str, Run]:
        """Return the runs by id, which is their path below the given directory."""
        self._scan()
        return self._runs

    def sweeps(self) -> dict[str, Path]:
        self._scan()
        return self._sweeps

    def run(self, run_id: str) -> Run:
        """Return a run. Raises `ConfigError` if there is none."""
        found = self.runs().get(run_id)
        if found is None:
            raise ConfigError(f"{run_id[:200]}: no such run; it may have been moved or removed")
        return found

    def _scan(self) -> None:
        with self._lock:
            if time.monotonic() - self._scanned_s < SCAN_AGAIN_S and self._scanned_s:
                return
            runs: dict[str, Run] = {}
            sweeps: dict[str, Path] = {}
            for root, root_name in self._roots.items():
                for path, kind in _find(root):
                    name = self._name(root, root_name, path)
                    if kind == "sweep":
                        sweeps[name] = path
                    elif len(runs) < MAX_RUNS:
                        known = self._runs.get(name)
                        runs[name] = known if known and known.path == path else Run(name, path)
            for name in self._runs.keys() - runs.keys():
                self._runs[name].close()
            self._runs, self._sweeps = runs, sweeps
            self._scanned_s = time.monotonic()

    def _name(self, root: Path, root_name: str, path: Path) -> str:
        if path == root:
            return root_name
        inner = path.relative_to(root).as_posix()
        return inner if len(self._roots) == 1 else f"{root_name}/{inner}"


def _name_roots(roots: Sequence[Path]) -> dict[Path, str]:
    """Return a name for each directory: as much of the end of its path as distinguishes it."""
    names: dict[Path, str] = {}
    for root in roots:
        ends = ("/".join(root.parts[-n:]) for n in range(1, len(root.parts) + 1))
        names[root] = next((end for end in ends if end not in names.values()), str(root))
    return names


def _find(folder: Path, depth: int = 0) -> Iterator[tuple[Path, str]]:
    """Yield run and sweep directories; nothing is searched below a run."""
    try:
        with os.scandir(folder) as entries:
            names = {entry.name: entry for entry in entries}
    except OSError:
        return
    if SWEEP_FILE in names:
        yield folder, "sweep"
    elif any(names.keys() >= files for files in RUN_FILES):
        yield folder, "run"
        return
    if depth < MAX_DEPTH:
        for name in sorted(names):
            if not name.startswith(".") and names[name].is_dir():
                yield from _find(folder / name, depth + 1)


@lru_cache(maxsize=256)
def _flat_configuration(path: Path, _modified_ns: int) -> dict[str, str]:
    try:
        tree, _ = parse(path.read_text(encoding="utf-8"), Where(0, 0, str(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); restore it") from error
    return dict(_flatten(tree.plain() if tree is not None else {}))


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield prefix, value if isinstance(value, str) else dump_json(value)


def _is_python(pid: int) -> bool:
    """Whether a process lives and can be a run, since ids are given again."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
