"""From a sweep file to its trials, every one of them checked before anything starts."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raylearner.config.document import Node, parse
from raylearner.config.loader import load, load_section
from raylearner.config.problems import ConfigProblems, Problem, Where
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.errors import ConfigError
from raylearner.jobs.sweep.checks import check
from raylearner.jobs.sweep.points import Values, points
from raylearner.jobs.sweep.section import SweepSection

UNKNOWN = "unknown key"
"""Problems that begin so are certain even where some axes could not be read."""


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
    """Every trial of a sweep file. Raises `ConfigProblems` with the problems of file and trials."""
    sweep = load_section(path, SweepSection)
    tree, _ = parse(Path(path).read_text(encoding="utf-8-sig"), Where(-1, 0, path))
    assert tree is not None, "it was read a moment ago"
    problems = check(sweep, tree)
    sound = _sound(sweep, problems)
    trials: list[Trial] = []
    try:
        all_values = points(sound)
    except ConfigError as error:
        raise ConfigProblems(
            [*problems, Problem(tree.place(("axes",)), "axes", str(error))]
        ) from error
    found: dict[tuple[str, str, str], Problem] = {}
    for values in all_values:
        for seed in sweep.seeds:
            chosen = _chosen(sweep, values, seed=seed, number=len(trials))
            overrides = tuple(f"{key}={written(value)}" for key, value in chosen.items())
            try:
                config = load(sweep.base, overrides)
            except ConfigProblems as error:
                for problem in error.problems:
                    if sound is sweep or problem.text.startswith(UNKNOWN):
                        said = (str(problem.where), problem.key, problem.text)
                        found.setdefault(said, _placed(problem, sweep, chosen, tree))
                continue
            trials.append(
                Trial(
                    number=len(trials), values=values, seed=seed, overrides=overrides, config=config
                )
            )
    problems += found.values()
    if not all_values and not problems:
        problems.append(Problem(tree.place(("exclude",)), "exclude", "leaves no trial"))
    early = sweep.early_stopping
    if early is not None and trials and sound is sweep:
        num_steps = min(trial.config.run.num_steps for trial in trials)
        if early.grace_steps >= num_steps:
            key = ("early_stopping", "grace_steps")
            text = f"must be < run.num_steps = {num_steps}, got {early.grace_steps}"
            problems.append(Problem(tree.place(key), ".".join(key), text))
    if problems:
        raise ConfigProblems(problems)
    return Plan(sweep=sweep, trials=tuple(trials))


def _sound(sweep: SweepSection, problems: Sequence[Problem]) -> SweepSection:
    """The sweep itself, or without the axes and exclusions that have problems."""
    wrong = {tuple(problem.key.split(".")[:2]) for problem in problems}
    axes = tuple(a for i, a in enumerate(sweep.axes) if ("axes", str(i)) not in wrong)
    exclude = tuple(e for i, e in enumerate(sweep.exclude) if ("exclude", str(i)) not in wrong)
    if (axes, exclude) == (sweep.axes, sweep.exclude):
        return sweep
    return sweep.model_copy(update={"axes": axes, "exclude": exclude})


def _chosen(sweep: SweepSection, values: Values, *, seed: int, number: int) -> Values:
    return {
        **sweep.overrides,
        **values,
        "run.seed": seed,
        "run.name": f"{sweep.name}-{number:03d}",
    }


def _placed(problem: Problem, sweep: SweepSection, chosen: Values, tree: Node) -> Problem:
    """The problem at the line of the sweep's file that gave the override it is about."""
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
