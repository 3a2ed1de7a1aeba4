"""State of a sweep on disk, from which an interrupted one resumes, and the progress of its trials."""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raylearner.config.report import config_hash
from raylearner.errors import ConfigError
from raylearner.jobs.sweep.plan import Plan, arguments, run_dir
from raylearner.jobs.sweep.section import SweepMetric
from raylearner.text import dump_json

FILE = "sweep.json"


class Status(StrEnum):
    """Status of a trial."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    STOPPED_EARLY = "stopped early"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (Status.DONE, Status.STOPPED_EARLY, Status.FAILED)


@dataclass(slots=True, kw_only=True)
class TrialState:
    """State of one trial. Times in seconds since the epoch."""

    number: int
    status: Status = Status.WAITING
    num_attempts: int = 0
    submission_id: str | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    step: int = 0
    value: float | None = None
    failed_fraction: float = 0.0
    """Share of failed episodes behind `value`."""
    error: str | None = None
    is_stopped_early: bool = False
    """Whether early stopping chose it; its job is then stopped."""


class SweepState:
    """Owns a sweep's folder: `sweep.json`, and `trials/NNN`, the run directory of each trial.

    `sweep.json` also names the metric, and each trial's point and arguments, for readers without the sweep
    file.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Load the folder's state. Raises `ConfigError` if it is of another sweep or not a folder."""
        check_folder(folder)
        self.folder = folder
        self._plan_hash = plan_hash(plan)
        self._head = {
            "name": plan.sweep.name,
            "metric": plan.sweep.metric.model_dump(mode="json"),
            "points": [
                {
                    "seed": trial.seed,
                    "num_steps": trial.config.run.num_steps,
                    "values": trial.values,
                    "arguments": arguments(plan, trial),
                }
                for trial in plan.trials
            ],
        }
        self.trials = [TrialState(number=trial.number) for trial in plan.trials]
        path = folder / FILE
        self.is_resumed = path.is_file()
        if self.is_resumed:
            self._load(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def run_dir(self, number: int) -> Path:
        return run_dir(self.folder, number)

    def save(self) -> None:
        """Replace the file atomically."""
        trials = [asdict(trial) for trial in self.trials]
        record = {"plan": self._plan_hash, **self._head, "trials": trials}
        draft = self.folder / f"{FILE}.partial"
        draft.write_text(dump_json(record, indent=1), encoding="utf-8")
        os.replace(draft, self.folder / FILE)

    def _load(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            plan, trials = record["plan"], _TRIALS.validate_python(record["trials"])
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("trials", *first["loc"])))
            raise _unreadable(path, f"{where}: {first['msg']}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, str(error)) from error
        if plan != self._plan_hash:
            raise ConfigError(
                f"{self.folder}: holds trials of an earlier version of this sweep, whose axes, seeds, metric or"
                " base files differ; give the new version another name, or remove the folder"
            )
        if [trial.number for trial in trials] != [trial.number for trial in self.trials]:
            raise _unreadable(path, f"{len(trials)} trials, expected {len(self.trials)} in order")
        self.trials = trials


_TRIALS = TypeAdapter(list[TrialState])


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if the sweep's folder exists and is not a folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder}: is a file, not the sweep's folder; move it, or give the sweep another name"
        )


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({why}); remove the folder to start the sweep over")


def plan_hash(plan: Plan) -> str:
    """Return a hash of everything that defines the trials; `max_concurrent` and `early_stopping` may change."""
    trials = [[trial.values, config_hash(trial.config)] for trial in plan.trials]
    text = json.dumps([trials, plan.sweep.metric.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


EVALUATION = "evaluation/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a trial, from the files in its run directory."""

    num_steps: int
    """Learner steps on record."""
    curve: list[tuple[int, float]]
    """Step and value so far, in order; the value at a step is the mean over the last few."""
    num_damaged: int
    """Number of lines that are not rows; they are skipped."""
    failed_fraction: float = 0.0
    """Share of failed episodes: of the last evaluation, or the mean over the last few steps."""


def read_progress(run_dir: Path, metric: SweepMetric) -> Progress:
    rows, num_damaged = _rows(run_dir / "metrics.jsonl")
    num_steps = rows[-1]["step"] if rows else 0
    curve: list[tuple[int, float]] = []
    if metric.key.startswith(EVALUATION):
        key = metric.key.removeprefix(EVALUATION)
        evaluations, also_damaged = _rows(run_dir / "eval.jsonl")
        num_damaged += also_damaged
        for row in evaluations:
            value = _number(row.get(key))
            if value is not None:
                curve.append((row["step"], value))
        last = evaluations[-1] if evaluations else {}
        return Progress(
            num_steps=num_steps,
            curve=curve,
            num_damaged=num_damaged,
            failed_fraction=_number(last.get("failed_fraction")) or 0.0,
        )
    recent: list[float] = []
    for row in rows:
        value = _number(row.get(metric.key))
        if value is not None:
            recent = [*recent, value][-metric.last_steps :]
            curve.append((row["step"], sum(recent) / len(recent)))
    failed = [_number(row.get("rollout/stop/error")) or 0.0 for row in rows[-metric.last_steps :]]
    return Progress(
        num_steps=num_steps,
        curve=curve,
        num_damaged=num_damaged,
        failed_fraction=sum(failed) / len(failed) if failed else 0.0,
    )


def _rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows in order, and the number of lines that are not rows."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # the last one is being written
    except FileNotFoundError:
        return [], 0
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):  # pyright: ignore[reportUnknownMemberType]
            rows.append(row)  # pyright: ignore[reportUnknownArgumentType]
    return rows, len(lines) - len(rows)


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
