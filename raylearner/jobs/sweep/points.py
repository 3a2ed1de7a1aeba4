"""The points of a sweep: values crossed, draws made, then what is conditional or excluded left out."""

import json
import math
import random
from typing import Any

from raylearner.errors import ConfigError
from raylearner.jobs.sweep.section import (
    AxisSection,
    Choice,
    Draw,
    IntUniform,
    LogUniform,
    SweepSection,
)

SIGNIFICANT_DIGITS = 4
"""Of numbers that are drawn: enough, and they read well."""
MAX_TRIALS = 1000
"""Most that a sweep may have: each is a job of its own."""
MAX_CROSSED = 100 * MAX_TRIALS
"""Most combinations before `exclude` and draws that are alike thin them out."""

Values = dict[str, Any]
"""Dotted keys and what they take."""


def points(sweep: SweepSection) -> list[Values]:
    """The grid, each point `num_samples` times where something is drawn at it; no point twice.

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
            grid = _crossed(sweep, grid, axis, 0)
    num_samples = sweep.num_samples if drawn else 1
    if len(grid) * num_samples > MAX_CROSSED:
        raise _too_many(sweep, len(grid) * num_samples)
    found: dict[str, Values] = {}
    for point in grid:
        for index in range(num_samples):
            extended = [point]
            for axis in sweep.axes:
                if axis.key in drawn:
                    extended = _crossed(sweep, extended, axis, index)
            for one in extended:
                in_order = {axis.key: one[axis.key] for axis in sweep.axes if axis.key in one}
                found.setdefault(json.dumps(in_order, sort_keys=True), in_order)
            if len(found) * len(sweep.seeds) > MAX_TRIALS:
                raise _too_many(sweep, len(found))
    return list(found.values())


def _crossed(
    sweep: SweepSection, so_far: list[Values], axis: AxisSection, index: int
) -> list[Values]:
    """Every point with each value of the axis where it counts, but for what is excluded."""
    extended: list[Values] = []
    for point in so_far:
        if not all(key in point and point[key] in allowed for key, allowed in axis.when.items()):
            extended.append(point)
        elif axis.sample is not None:
            extended.append({**point, axis.key: _drawn(sweep, point, axis.key, axis.sample, index)})
        else:
            extended += [{**point, axis.key: value} for value in axis.values or ()]
        if len(extended) > MAX_CROSSED:
            raise _too_many(sweep, len(extended))
    return [p for p in extended if not any(_has(p, excluded) for excluded in sweep.exclude)]


def _has(point: Values, excluded: Values) -> bool:
    return all(key in point and point[key] == value for key, value in excluded.items())


def _drawn(sweep: SweepSection, point: Values, key: str, source: Draw, index: int) -> Any:
    """A draw of its own for each point: what is drawn at others, or later, does not change it."""
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
        f"{num_trials} trials or more, where a sweep may have {MAX_TRIALS}; name fewer values,"
        " seeds or num_samples, or make several sweeps of it"
    )
