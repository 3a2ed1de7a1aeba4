"""From a sweep file to its trials, every one of them checked before anything starts."""

import json
import math
import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylearner.config.loader import load, load_section
from raylearner.config.problems import ConfigProblems, Problem, Where, did_you_mean
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.config.sweep import AxisSection, Choice, Draw, IntUniform, LogUniform, SweepSection
from raylearner.observability.metrics import METRICS, spec_of

SIGNIFICANT_DIGITS = 4
"""Of numbers that are drawn: enough, and they read well."""

SET_HERE = ("run.seed", "run.dir", "run.name")
"""Keys that differ from trial to trial without an axis."""

Values = dict[str, Any]
"""Dotted keys and what they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep: a point of the axes and a seed."""

    number: int
    values: Values
    seed: int
    overrides: tuple[str, ...]
    """What the command line adds to the base, name and seed included."""
    config: RunConfig

    @property
    def label(self) -> str:
        """The axes' values as a person reads them."""
        return "  ".join(f"{key.rsplit('.', 1)[-1]}={shown(v)}" for key, v in self.values.items())

    @property
    def cpus(self) -> float:
        """CPUs that its actors reserve; a model made on the spot takes one before they start."""
        least = 1.0 if isinstance(self.config.model, TinyModel) else 0.0
        return max(self.config.cpus_needed, least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sweep and all its trials, in order."""

    sweep: SweepSection
    trials: tuple[Trial, ...]


def read(path: str) -> Plan:
    """Every trial of a sweep file. Raises `ConfigProblems` with the problems of all of them."""
    sweep = load_section(path, SweepSection)
    problems = _axis_problems(sweep, path)
    if problems:
        raise ConfigProblems(problems)
    trials: list[Trial] = []
    found: dict[str, Problem] = {}
    for values in points(sweep):
        for seed in sweep.seeds:
            overrides = _overrides(sweep, values, seed=seed, number=len(trials))
            try:
                config = load(sweep.base, overrides)
            except ConfigProblems as error:
                found |= {p.message: p for p in error.problems}
                continue
            trials.append(
                Trial(
                    number=len(trials),
                    values=values,
                    seed=seed,
                    overrides=tuple(overrides),
                    config=config,
                )
            )
    if found:
        raise ConfigProblems(list(found.values()))
    if not trials:
        raise ConfigProblems([Problem(Where(0, 0, path), "exclude", "leaves no trial")])
    return Plan(sweep=sweep, trials=tuple(trials))


def points(sweep: SweepSection) -> list[Values]:
    """The grid, each point `num_samples` times where something is drawn at it; no point twice."""
    grid: list[Values] = [{}]
    for axis in sweep.axes:
        grid = [extended for point in grid for extended in _extended(point, axis)]
    grid = [p for p in grid if not any(_has(p, excluded) for excluded in sweep.exclude)]
    rng = random.Random(sweep.sample_seed)
    sampled: list[Values] = []
    for point in grid:
        drawn = any(isinstance(value, _Pending) for value in point.values())
        sampled += [
            {k: v.draw(rng) if isinstance(v, _Pending) else v for k, v in point.items()}
            for _ in range(sweep.num_samples if drawn else 1)
        ]
    by_text = {json.dumps(point, sort_keys=True): point for point in sampled}
    return list(by_text.values())


@dataclass(frozen=True, slots=True)
class _Pending:
    """A value still to be drawn."""

    source: Draw

    def draw(self, rng: random.Random) -> Any:
        match self.source:
            case Choice(values=values):
                return rng.choice(values)
            case IntUniform(low=low, high=high):
                return rng.randint(low, high)
            case LogUniform(low=low, high=high):
                value = math.exp(rng.uniform(math.log(low), math.log(high)))
            case source:
                value = rng.uniform(source.low, source.high)
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _extended(point: Values, axis: AxisSection) -> list[Values]:
    if any(point.get(key) not in allowed for key, allowed in axis.when.items()):
        return [point]
    if axis.sample is not None:
        return [{**point, axis.key: _Pending(axis.sample)}]
    return [{**point, axis.key: value} for value in axis.values or ()]


def _has(point: Values, excluded: Mapping[str, Any]) -> bool:
    return all(key in point and point[key] == value for key, value in excluded.items())


def _axis_problems(sweep: SweepSection, path: str) -> list[Problem]:
    problems: list[Problem] = []

    def refuse(key: str, text: str) -> None:
        problems.append(Problem(Where(0, 0, path), key, text))

    seen: list[str] = []
    for index, axis in enumerate(sweep.axes):
        place = f"axes.{index}"
        if (axis.values is None) == (axis.sample is None):
            refuse(place, f"axis {axis.key!r} must have either values or sample")
        if axis.values is not None and not axis.values:
            refuse(f"{place}.values", f"axis {axis.key!r} has no values")
        if axis.sample is not None and not isinstance(axis.sample, Choice):
            low, high = axis.sample.low, axis.sample.high
            if not low < high:
                refuse(f"{place}.sample", f"low must be < high, got {low:g} and {high:g}")
        if axis.key in seen:
            refuse(f"{place}.key", f"{axis.key!r} is an axis already")
        if not all(axis.key.split(".")):
            refuse(f"{place}.key", f"must read section.key, got {axis.key!r}")
        if axis.key in SET_HERE:
            refuse(f"{place}.key", f"{axis.key!r} is set by the sweep; repetitions go into seeds")
        for key in axis.when:
            if key not in seen:
                refuse(f"{place}.when", f"{key!r} is no earlier axis")
        seen.append(axis.key)
    for key in sweep.overrides:
        if key in SET_HERE:
            refuse(f"overrides.{key}", "is set by the sweep; repetitions go into seeds")
        if key in seen:
            refuse(f"overrides.{key}", "is an axis, whose values win; remove it here")
    if len(set(sweep.seeds)) < len(sweep.seeds):
        refuse("seeds", "a seed stands there twice, and would be the same trial")
    key = sweep.metric.key
    if spec_of(key) is None:
        refuse(
            "metric.key",
            f"{key!r} is no metric of a run{did_you_mean(key, METRICS)}; see docs/observability.md",
        )
    for excluded in sweep.exclude:
        for key in excluded:
            if key not in seen:
                refuse("exclude", f"{key!r} is no axis")
    return problems


def _overrides(sweep: SweepSection, values: Values, *, seed: int, number: int) -> list[str]:
    chosen = {
        **sweep.overrides,
        **values,
        "run.seed": seed,
        "run.name": f"{sweep.name}-{number:03d}",
    }
    return [f"{key}={written(value)}" for key, value in chosen.items()]


def written(value: object) -> str:
    """A value as an override spells it: JSON, or bare where that reads back as the same."""
    if isinstance(value, str) and value.replace("_", "").replace("-", "").isalpha():
        return json.dumps(value) if value in ("true", "false", "null") else value
    return json.dumps(value)


def shown(value: object) -> str:
    """Short, for tables: a section by its kind and what else it says."""
    if isinstance(value, Mapping):
        rest = [f"{k}={shown(v)}" for k, v in value.items() if k != "kind"]
        head = str(value["kind"]) if "kind" in value else ""
        return f"{head}({', '.join(rest)})" if rest else head
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def arguments(plan: Plan, trial: Trial, run_dir: Path) -> list[str]:
    """What `python -m raylearner` is called with for a trial."""
    return ["train", *plan.sweep.base, *trial.overrides, f"run.dir={run_dir}"]


def axis_keys(trials: Sequence[Trial]) -> list[str]:
    """The keys of all axes, in order; one that does not count for a trial is missing there."""
    return list(dict.fromkeys(key for trial in trials for key in trial.values))


def commands(plan: Plan, folder: Path | None = None) -> dict[int, str]:
    """The command line that runs each trial again, by number, in a directory of its own."""
    folder = folder or Path("runs", plan.sweep.name)
    return {
        trial.number: shlex.join(
            ["python", "-m", "raylearner", *arguments(plan, trial, folder / f"{trial.number:03d}")]
        )
        for trial in plan.trials
    }
