"""Results of a sweep, from its folder: `sweep.json` and the metrics of its trials."""

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raylearner.errors import ConfigError
from raylearner.jobs.sweep.plan import Values, run_dir, to_command
from raylearner.jobs.sweep.section import SweepMetric
from raylearner.jobs.sweep.state import FILE, Status, TrialState, read_progress

# fmt: off
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
"""97.5% quantiles of Student's t for 1, 2, .. degrees of freedom."""
T_95_OF_MANY = 2.0
"""The same for more degrees of freedom, at most 2% too small or large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One trial: its point, what became of it, and the metric by step."""

    values: Values
    seed: int
    num_steps: int
    """Number of steps of a complete run."""
    state: TrialState
    curve: list[tuple[int, float]]
    run_dir: Path
    command: str
    """Command line that repeats it, in a directory beside."""

    @property
    def number(self) -> int:
        return self.state.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """All seeds of one point of the axes."""

    trials: Sequence[Result]

    @property
    def values(self) -> Values:
        return self.trials[0].values

    @property
    def measured(self) -> list[Result]:
        """The trials that completed; if none did, those that have a value."""
        with_value = [trial for trial in self.trials if trial.state.value is not None]
        done = [trial for trial in with_value if trial.state.status is Status.DONE]
        return done or with_value

    @property
    def numbers(self) -> list[float]:
        """Values of the metric, one for each measured trial."""
        return [trial.state.value for trial in self.measured if trial.state.value is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.numbers) if self.numbers else None

    @property
    def failed_fraction(self) -> float:
        """Share of failed episodes behind the mean."""
        shares = [trial.state.failed_fraction for trial in self.measured]
        return statistics.fmean(shares) if shares else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A whole sweep, finished or not."""

    name: str
    metric: SweepMetric
    folder: Path
    trials: tuple[Result, ...]

    @property
    def axes(self) -> list[str]:
        """Keys of all axes, in order; trials lack axes that do not apply to them."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))

    def combinations(self) -> list[Combination]:
        """Return the combinations from best to worst; of equal ones, that with fewer failed episodes first."""
        return sorted(self.in_order(), key=self._rank)

    def in_order(self) -> list[Combination]:
        """Return the combinations in the order of the sweep file."""
        by_point: dict[str, list[Result]] = {}
        for trial in self.trials:
            by_point.setdefault(json.dumps(trial.values, sort_keys=True), []).append(trial)
        return [Combination(trials=group) for group in by_point.values()]

    def best_trial(self) -> Result | None:
        """Return the best of the trials that completed; None if none did."""
        done = [
            Combination(trials=(trial,))
            for trial in self.trials
            if trial.state.status is Status.DONE
        ]
        ranked = sorted((one for one in done if one.mean is not None), key=self._rank)
        return ranked[0].trials[0] if ranked else None

    def _rank(self, combination: Combination) -> tuple[float, float]:
        mean = combination.mean
        if mean is None:
            return (math.inf, math.inf)
        return (-mean if self.metric.goal == "max" else mean, combination.failed_fraction)


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% confidence interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    t = T_95[degrees - 1] if degrees <= len(T_95) else T_95_OF_MANY
    return t * statistics.stdev(values) / math.sqrt(len(values))


def read(folder: Path) -> Results:
    """Return the results so far of the sweep in this folder. Raises `ConfigError`."""
    path = folder / FILE
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        metric = SweepMetric.model_validate(record["metric"])
        points: list[dict[str, Any]] = record["points"]
        states = _STATES.validate_python(record["trials"])
        pairs = list(zip(points, states, strict=True))
        trials = tuple(_result(folder, metric, point, state) for point, state in pairs)
        return Results(name=record["name"], metric=metric, folder=folder, trials=trials)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: has no {FILE}: not the folder of a sweep, or the sweep has not started"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))} of {error.title}: {first['msg']}"
        raise ConfigError(
            f"{path}: cannot be read ({reason}); it is damaged, or of another version: `raylearner sweep"
            " FILE` writes it anew if the sweep has not changed"
        ) from error


_STATES = TypeAdapter(list[TrialState])


def _result(folder: Path, metric: SweepMetric, point: dict[str, Any], state: TrialState) -> Result:
    there = run_dir(folder, state.number)
    progress = read_progress(there, metric)
    if progress.curve:
        state.step, state.value = progress.num_steps, progress.curve[-1][1]
        state.failed_fraction = progress.failed_fraction
    saved = there / "config.yaml"
    arguments = ["train", str(_shown(saved))] if saved.is_file() else point["arguments"]
    repeat = _shown(folder / "repeats" / f"{state.number:03d}")
    return Result(
        values=point["values"],
        seed=point["seed"],
        num_steps=point["num_steps"],
        state=state,
        curve=progress.curve,
        run_dir=there,
        command=to_command([*arguments, f"run.dir={repeat}"]),
    )


def _shown(path: Path) -> Path:
    """Return the path as seen from the current directory, if it is below that."""
    here = Path(os.path.realpath(Path.cwd()))
    there = Path(os.path.realpath(path))
    return there.relative_to(here) if there.is_relative_to(here) else path.absolute()
