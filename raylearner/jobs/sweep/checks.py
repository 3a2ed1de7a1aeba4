"""Checks of a sweep's own file; its trials' configurations are checked by `plan`."""

import os
from pathlib import Path

from raylearner.config.document import Node
from raylearner.config.problems import Problem, did_you_mean, shown
from raylearner.jobs.sweep.section import AxisSection, Choice, IntUniform, SweepSection
from raylearner.observability import run_directory
from raylearner.observability.metrics import METRICS, spec_of

WITHOUT_FAILED = "_without_failed"
SET_HERE = ("run.seed", "run.dir", "run.name")
"""Keys that the sweep sets for each trial."""


def check(sweep: SweepSection, tree: Node) -> list[Problem]:
    """Return all problems of a sweep, with their lines in `tree`, its file."""
    problems: list[Problem] = []

    def refuse(path: tuple[str | int, ...], text: str) -> None:
        problems.append(Problem(tree.place(path), ".".join(map(str, path)), text))

    here = Path.cwd()
    is_package = run_directory.JOB_FILES in here.parts
    for index, base in enumerate(sweep.base):
        is_inside = Path(os.path.abspath(base)).is_relative_to(here)
        if not is_inside and (is_package or not os.path.isabs(base)):
            refuse(
                ("base", index),
                "must be a file in this directory, which is copied to the trials' jobs, got "
                f"{base!r}",
            )
    earlier: dict[str, AxisSection] = {}
    for index, axis in enumerate(sweep.axes):
        place = ("axes", index)
        if (axis.values is None) == (axis.sample is None):
            refuse(place, f"axis {axis.key!r} must have either values or sample")
        if axis.values is not None and not axis.values:
            refuse((*place, "values"), f"axis {axis.key!r} has no values")
        if axis.sample is not None and not isinstance(axis.sample, Choice):
            low, high = axis.sample.low, axis.sample.high
            if not low < high:
                refuse((*place, "sample"), f"low must be < high, got {low:g} and {high:g}")
        if axis.key in earlier:
            refuse((*place, "key"), f"{axis.key!r} is already an axis")
        if not all(axis.key.split(".")):
            refuse((*place, "key"), f"must read section.key, got {axis.key!r}")
        if axis.key in SET_HERE:
            refuse((*place, "key"), f"{axis.key!r} is set by the sweep; use seeds for repetitions")
        for key, allowed in axis.when.items():
            if key not in earlier:
                refuse((*place, "when", key), f"{key!r} is not an earlier axis")
            elif not allowed:
                refuse((*place, "when", key), "has no value, so the axis would never apply")
            else:
                for value in allowed:
                    if problem := _never_has(earlier[key], value):
                        refuse((*place, "when", key), problem)
        earlier.setdefault(axis.key, axis)
    for key in sweep.overrides:
        if key in SET_HERE:
            refuse(("overrides", key), "is set by the sweep; use seeds for repetitions")
        if key in earlier:
            refuse(("overrides", key), "is also an axis, which takes precedence; remove it here")
    if len(set(sweep.seeds)) < len(sweep.seeds):
        refuse(("seeds",), "a seed is repeated, which would give the same trial twice")
    key = sweep.metric.key
    if spec_of(key) is None:
        refuse(
            ("metric", "key"),
            f"{key!r} is not a metric{did_you_mean(key, METRICS)}; see docs/metrics.md",
        )
    elif key.endswith(WITHOUT_FAILED):
        refuse(
            ("metric", "key"),
            f"{key!r} leaves out failed episodes, so failures would improve a trial; use"
            f" {key.removesuffix(WITHOUT_FAILED)!r}, which counts them as not solved",
        )
    for index, excluded in enumerate(sweep.exclude):
        if not excluded:
            refuse(("exclude", index), "has no axis, and would exclude every trial")
        for key, value in excluded.items():
            if key not in earlier:
                refuse(("exclude", index), f"{key!r} is not an axis")
            elif problem := _never_has(earlier[key], value):
                refuse(("exclude", index), problem)
    return problems


def _never_has(axis: AxisSection, value: object) -> str:
    """Return why the axis never takes the value, or an empty string if it may."""
    match axis.sample:
        case None:
            values = axis.values or ()
        case Choice(values=values):
            pass
        case IntUniform(low=low, high=high):
            is_within = isinstance(value, int) and low <= value <= high
            return (
                ""
                if is_within
                else f"{axis.key!r} is never {value!r}: it is drawn from {low} to {high}"
            )
        case source:
            return (
                f"{axis.key!r} is drawn from {source.low:g} to {source.high:g} and practically never"
                f" {value!r}; narrow its bounds instead"
            )
    if value in values or not values:
        return ""
    return f"{axis.key!r} is never {value!r}; its values: {', '.join(shown(v) for v in values)}"
