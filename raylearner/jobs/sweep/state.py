"""What became of each trial, on disk: a sweep that was interrupted goes on from it."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from raylearner import strict_json
from raylearner.errors import ConfigError
from raylearner.jobs import jobs
from raylearner.jobs.sweep.plan import Plan

FILE = "sweep.json"


class Status(StrEnum):
    """Where a trial stands."""

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
    """One trial's standing. Times in seconds since the epoch."""

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
    is_given_up: bool = False
    """Early stopping chose it, and its job is to end."""


class SweepState:
    """Owns a sweep's folder: `sweep.json`, and `trials/NNN`, the run directory of each trial."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Takes up what the folder holds. Raises `ConfigError` where that is another sweep, or no folder."""
        refuse_file(folder)
        self.folder = folder
        self._plan_hash = plan_hash(plan)
        self.trials = [TrialState(number=trial.number) for trial in plan.trials]
        path = folder / FILE
        self.is_taken_up = path.is_file()
        if self.is_taken_up:
            self._load(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.save()

    def run_dir(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03d}"

    def save(self) -> None:
        """Whole or not at all."""
        record = {"plan": self._plan_hash, "trials": [asdict(trial) for trial in self.trials]}
        draft = self.folder / f"{FILE}.partial"
        draft.write_text(strict_json.dumps(record, indent=1), encoding="utf-8")
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
                f"{self.folder}: holds trials of a sweep of this name that was another: its axes,"
                " seeds, metric or base files have changed since; give the changed one another name,"
                " or remove the folder"
            )
        if [trial.number for trial in trials] != [trial.number for trial in self.trials]:
            raise _unreadable(path, f"{len(trials)} trials, expected {len(self.trials)} in order")
        self.trials = trials


_TRIALS = TypeAdapter(list[TrialState])


def refuse_file(folder: Path) -> None:
    """Raises `ConfigError` where something else lies in the place of a sweep's folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder}: is a file where the sweep's folder should be; move it, or give the sweep"
            " another name"
        )


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({why}); remove the folder to start the sweep over")


def plan_hash(plan: Plan) -> str:
    """Of what decides the trials, whatever file says it; how many run at once, and what stops them,
    may change."""
    said = [[trial.values, jobs.config_hash(trial.config)] for trial in plan.trials]
    text = json.dumps([said, plan.sweep.metric.model_dump()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
