"""Trials of a sweep file: points of its axes times seeds, all checked before anything starts."""

import json
import math
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylearner.config.document import Node, parse
from raylearner.config.loader import load, load_section
from raylearner.config.null_words import is_null_word
from raylearner.config.problems import ConfigProblems, Problem, Where
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.errors import ConfigError
from raylearner.jobs.sweep.checks import check
from raylearner.jobs.sweep.section import (
    AxisSection,
    Choice,
    Draw,
    IntUniform,
    LogUniform,
    SweepSection,
)
from raylearner.observability import run_directory
from raylearner.text import visible

SIGNIFICANT_DIGITS = 4
"""Significant digits of numbers that are drawn."""
BARE_WORD = re.compile(r"[\w./-]+", re.ASCII)
MAX_TRIALS = 1000
"""Maximum number of trials in a sweep; each is a Ray job."""
MAX_CROSSED = 100 * MAX_TRIALS
"""Maximum number of combinations before exclusions and equal draws are removed."""

Values = dict[str, Any]
"""Values by dotted key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a sweep: a point of the axes and a seed."""

    number: int
    values: Values
    seed: int
    overrides: tuple[str, ...]
    """Overrides of the base configuration, name and seed included."""
    config: RunConfig

    @property
    def label(self) -> str:
        """The axes' values in short form."""
        return label(self.values)

    @property
    def cpus(self) -> float:
        """CPUs that its actors reserve; generating a tiny model at startup takes one."""
        minimum = 1.0 if isinstance(self.config.model, TinyModel) else 0.0
        return max(self.config.cpus_needed, minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A sweep and all its trials, in order."""

    sweep: SweepSection
    trials: tuple[Trial, ...]


def read(path: str) -> Plan:
    """Return every trial of a sweep file. Raises `ConfigProblems` with all problems of file and trials."""
    sweep = load_section(path, SweepSection)
    tree, _ = parse(Path(path).read_text(encoding="utf-8-sig"), Where(-1, 0, path))
    assert tree is not None, "load_section has parsed it"
    problems = check(sweep, tree)
    valid = _drop_invalid(sweep, problems)
    trials: list[Trial] = []
    try:
        all_values = make_points(valid)
    except ConfigError as error:
        raise ConfigProblems(
            [*problems, Problem(tree.place(("axes",)), "axes", str(error))]
        ) from error
    problems_of_trials: dict[tuple[str, str, str], Problem] = {}
    for values in all_values:
        for seed in sweep.seeds:
            chosen = _make_overrides(sweep, values, seed=seed, number=len(trials))
            overrides = tuple(f"{key}={to_override(value)}" for key, value in chosen.items())
            try:
                config = load(sweep.base, overrides)
            except ConfigProblems as error:
                for problem in error.problems:
                    if valid is sweep or problem.is_unknown_key:
                        place = (str(problem.where), problem.key, problem.text)
                        problems_of_trials.setdefault(
                            place, _place_in_file(problem, sweep, chosen, tree)
                        )
                continue
            trials.append(
                Trial(
                    number=len(trials), values=values, seed=seed, overrides=overrides, config=config
                )
            )
    problems += problems_of_trials.values()
    if not all_values and not problems:
        problems.append(Problem(tree.place(("exclude",)), "exclude", "leaves no trial"))
    early = sweep.early_stopping
    if early is not None and trials and valid is sweep:
        num_steps = min(trial.config.run.num_steps for trial in trials)
        if early.grace_steps >= num_steps:
            key = ("early_stopping", "grace_steps")
            text = f"must be < run.num_steps = {num_steps}, got {early.grace_steps}"
            problems.append(Problem(tree.place(key), ".".join(key), text))
    if problems:
        raise ConfigProblems(problems)
    return Plan(sweep=sweep, trials=tuple(trials))


def _drop_invalid(sweep: SweepSection, problems: Sequence[Problem]) -> SweepSection:
    """Return the sweep without the axes and exclusions that have problems."""
    wrong = {tuple(problem.key.split(".")[:2]) for problem in problems}
    axes = tuple(a for i, a in enumerate(sweep.axes) if ("axes", str(i)) not in wrong)
    exclude = tuple(e for i, e in enumerate(sweep.exclude) if ("exclude", str(i)) not in wrong)
    if (axes, exclude) == (sweep.axes, sweep.exclude):
        return sweep
    return sweep.model_copy(update={"axes": axes, "exclude": exclude})


def _make_overrides(sweep: SweepSection, values: Values, *, seed: int, number: int) -> Values:
    return {
        **sweep.overrides,
        **values,
        "run.seed": seed,
        "run.name": f"{sweep.name}-{number:03d}",
    }


def _place_in_file(problem: Problem, sweep: SweepSection, chosen: Values, tree: Node) -> Problem:
    """Return the problem with the line in the sweep's file that set the override."""
    if not problem.where.override:
        return problem
    key, value = list(chosen.items())[problem.where.rank - len(sweep.base)]
    index = next((i for i, axis in enumerate(sweep.axes) if axis.key == key), None)
    if index is not None:
        values = sweep.axes[index].values
        choice = ("sample",) if values is None else ("values", values.index(value))
        path = ("axes", index, *choice)
    elif key in sweep.overrides:
        path = ("overrides", key)
    else:
        path = ("seeds",) if key == "run.seed" else ("name",)
    return Problem(tree.place(path), ".".join(map(str, path[:2])), problem.message)


def to_override(value: object) -> str:
    """Return a value as an override: JSON, or a bare word if that is read as the same value."""
    if isinstance(value, str) and BARE_WORD.fullmatch(value):
        tree, _ = parse(value, Where(-1, 0, ""))
        if tree is not None and tree.value == value and not is_null_word(value):
            return value
    return json.dumps(value)


def label(values: Values, *, separator: str = "  ") -> str:
    """Return values in short form, with the last part of each key."""
    return separator.join(
        f"{key.rsplit('.', 1)[-1]}={format_value(v)}" for key, v in values.items()
    )


def format_value(value: object) -> str:
    """Return a value in short form for tables: a section as its kind and other keys."""
    if isinstance(value, Mapping):
        rest = [f"{k}={format_value(v)}" for k, v in value.items() if k != "kind"]
        head = str(value["kind"]) if "kind" in value else ""
        return f"{head}({', '.join(rest)})" if rest else head
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else visible(str(value))


def arguments(plan: Plan, trial: Trial) -> list[str]:
    """Return the arguments of the command line for a trial, without its directory."""
    return ["train", *plan.sweep.base, *trial.overrides]


def folder(name: str) -> Path:
    """Return the folder of a sweep."""
    return run_directory.resolve(Path("runs/sweeps", name))


def run_dir(folder: Path, number: int) -> Path:
    """Return the run directory of a trial in the folder of its sweep."""
    return folder / "trials" / f"{number:03d}"


def commands(plan: Plan) -> dict[int, str]:
    """Return the command line that the sweep runs for each trial, by number, with the trial's directory."""
    there = folder(plan.sweep.name)
    return {
        trial.number: to_command(
            [*arguments(plan, trial), f"run.dir={run_dir(there, trial.number)}"]
        )
        for trial in plan.trials
    }


def to_command(arguments: Sequence[str]) -> str:
    """Return arguments as a command for a shell."""
    return shlex.join(["raylearner", *arguments])


def make_points(sweep: SweepSection) -> list[Values]:
    """Return the grid, with each point repeated `num_samples` times if any axis is drawn; no point twice.

    Axes that neither are drawn nor depend on a draw make the grid; the others follow at each of its
    points, in order. Raises `ConfigError` beyond `MAX_TRIALS`.
    """
    drawn: set[str] = set()
    for axis in sweep.axes:
        if axis.sample is not None or not drawn.isdisjoint(axis.when):
            drawn.add(axis.key)
    grid: list[Values] = [{}]
    for axis in sweep.axes:
        if axis.key not in drawn:
            grid = _cross(sweep, grid, axis, 0)
    num_samples = sweep.num_samples if drawn else 1
    if len(grid) * num_samples > MAX_CROSSED:
        raise _too_many(sweep, len(grid) * num_samples)
    found: dict[str, Values] = {}
    for point in grid:
        for index in range(num_samples):
            extended = [point]
            for axis in sweep.axes:
                if axis.key in drawn:
                    extended = _cross(sweep, extended, axis, index)
            for one in extended:
                in_order = {axis.key: one[axis.key] for axis in sweep.axes if axis.key in one}
                found.setdefault(json.dumps(in_order, sort_keys=True), in_order)
            if len(found) * len(sweep.seeds) > MAX_TRIALS:
                raise _too_many(sweep, len(found))
    return list(found.values())


def _cross(
    sweep: SweepSection, so_far: list[Values], axis: AxisSection, index: int
) -> list[Values]:
    """Return every point with each value of the axis where it applies, without excluded combinations."""
    extended: list[Values] = []
    for point in so_far:
        if not all(key in point and point[key] in allowed for key, allowed in axis.when.items()):
            extended.append(point)
        elif axis.sample is not None:
            extended.append({**point, axis.key: _draw(sweep, point, axis.key, axis.sample, index)})
        else:
            extended += [{**point, axis.key: value} for value in axis.values or ()]
        if len(extended) > MAX_CROSSED:
            raise _too_many(sweep, len(extended))
    return [p for p in extended if not any(_has(p, excluded) for excluded in sweep.exclude)]


def _has(point: Values, excluded: Values) -> bool:
    return all(key in point and point[key] == value for key, value in excluded.items())


def _draw(sweep: SweepSection, point: Values, key: str, source: Draw, index: int) -> Any:
    """Return a value drawn for this point alone: other points and later draws do not change it."""
    rng = random.Random(json.dumps([sweep.sample_seed, key, index, point], sort_keys=True))
    match source:
        case Choice(values=values):
            return rng.choice(values)
        case IntUniform(low=low, high=high):
            return rng.randint(low, high)
        case LogUniform(low=low, high=high):
            value = math.exp(rng.uniform(math.log(low), math.log(high)))
        case source:
            value = rng.uniform(source.low, source.high)
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _too_many(sweep: SweepSection, num_points: int) -> ConfigError:
    num_trials = num_points * len(sweep.seeds)
    return ConfigError(
        f"{num_trials} trials or more, but a sweep has at most {MAX_TRIALS}; use fewer values, seeds or"
        " num_samples, or split it into several sweeps"
    )
