"""Plots of a sweep: the metric against each axis, and learning curves."""

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylearner.errors import ConfigError
from raylearner.jobs.sweep.plan import format_value, label
from raylearner.jobs.sweep.results import Combination, Result, Results, half_interval
from raylearner.jobs.sweep.state import Status

LOG_SCALE_FROM = 5.0
"""Ratio of an axis' largest to smallest value from which its scale is logarithmic."""
MAX_LINES = 8
"""Maximum number of learning curves in one panel, the best ones."""
MAX_PANELS = 6
"""Maximum number of panels of learning curves."""
MAX_SERIES = 10
"""Maximum number of series in a plot of an axis that are told apart."""
MAX_TICKS = 8
"""Maximum number of values of an axis that all get a tick."""
MAX_CHARACTERS = 48
"""Maximum length of a label."""
SPREAD = 0.5
"""Part of the distance between two categories over which the series at a category spread."""


def check_matplotlib() -> None:
    """Raise `ConfigError` before a sweep starts, since plots are drawn at its end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots: matplotlib is not installed; `pip install matplotlib`")


def plot(found: Results, folder: Path) -> list[Path]:
    """Write a picture for each axis, and one of learning curves; return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    paths: list[Path] = []
    for key in found.axes:
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        _draw_axis(axes, found, key)
        axes.set_xlabel(key)
        axes.set_ylabel(found.metric.key)
        axes.set_title(found.name)
        paths.append(folder / f"{key.replace('.', '_')}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    if any(trial.curve for trial in found.trials):
        figure = _draw_curves(pyplot, found)
        paths.append(folder / "learning_curves.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _draw_axis(axes: Any, found: Results, key: str) -> None:
    """Draw a series for each combination of the other axes: a line where the axis is a number, and points
    beside each other where it is a category; seeds as dots, intervals as bands or bars, crosses for trials
    that did not complete. Many series, as from drawn values, are a cloud of dots.
    """
    combinations = [c for c in found.in_order() if key in c.values]
    places, ticks = _places([trial.values[key] for trial in found.trials if key in trial.values])
    series: dict[str, list[tuple[float, list[float]]]] = {}
    for combination in combinations:
        done = [t for t in combination.trials if t.state.status is Status.DONE]
        values = [t.state.value for t in done if t.state.value is not None]
        if values:
            others = {k: v for k, v in combination.values.items() if k != key}
            place = places[format_value(combination.values[key])]
            series.setdefault(label(others, separator=", "), []).append((place, values))
    is_cloud = len(series) > MAX_SERIES
    for index, (name, points) in enumerate(series.items()):
        if is_cloud:
            _draw_seeds(axes, points, "C0")
        elif ticks is None:
            _draw_line(axes, name, sorted(points))
        else:
            shift = SPREAD * ((index + 0.5) / len(series) - 0.5)
            _draw_points(axes, name, [(x + shift, values) for x, values in points])
    has_crosses = _draw_unfinished(axes, combinations, key, places)
    if ticks is not None:
        axes.set_xticks(list(range(len(ticks))), [_short(tick) for tick in ticks])
        axes.set_xlim(-0.5, len(ticks) - 0.5)
    elif _spans_much(list(places.values())):
        axes.set_xscale("log")
    elif len(places) <= MAX_TICKS:
        axes.set_xticks(sorted(places.values()))
    if has_crosses or (any(series) and not is_cloud):
        axes.legend(fontsize="small")


def _draw_line(axes: Any, name: str, points: Sequence[tuple[float, list[float]]]) -> None:
    xs = [x for x, _ in points]
    means = [statistics.fmean(values) for _, values in points]
    halves = [half_interval(values) or 0.0 for _, values in points]
    (drawn,) = axes.plot(xs, means, marker="o", label=_short(name) or None)
    _draw_band(axes, xs, means, halves, drawn.get_color())
    _draw_seeds(axes, points, drawn.get_color())


def _draw_points(axes: Any, name: str, points: Sequence[tuple[float, list[float]]]) -> None:
    drawn = axes.errorbar(
        [x for x, _ in points],
        [statistics.fmean(values) for _, values in points],
        yerr=[half_interval(values) or 0.0 for _, values in points],
        fmt="o",
        capsize=3,
        label=_short(name) or None,
    )
    _draw_seeds(axes, points, drawn[0].get_color())


def _draw_seeds(axes: Any, points: Sequence[tuple[float, list[float]]], color: str) -> None:
    for x, values in points:
        axes.plot([x] * len(values), values, ".", color=color, alpha=0.6)


def _draw_band(
    axes: Any, xs: Sequence[float], means: Sequence[float], halves: Sequence[float], color: str
) -> None:
    low = [m - h for m, h in zip(means, halves, strict=True)]
    high = [m + h for m, h in zip(means, halves, strict=True)]
    axes.fill_between(xs, low, high, color=color, alpha=0.15)


def _draw_unfinished(
    axes: Any, combinations: Sequence[Combination], key: str, places: dict[str, float]
) -> bool:
    """Draw a cross for each trial with a value that did not complete; return whether there is any."""
    points = [
        (places[format_value(trial.values[key])], trial.state.value)
        for combination in combinations
        for trial in combination.trials
        if trial.state.value is not None and trial.state.status is not Status.DONE
    ]
    if points:
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, "x", color="gray", label="did not complete")
    return bool(points)


def _places(values: Sequence[object]) -> tuple[dict[str, float], list[str] | None]:
    """Return the position of each value on the axis, and the tick labels of values that are not numbers."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return {format_value(v): float(v) for v in values if isinstance(v, int | float)}, None
    names = list(dict.fromkeys(format_value(value) for value in values))
    return {name: float(index) for index, name in enumerate(names)}, names


def _short(text: str) -> str:
    """Return text for a picture: cut in the middle if it is long, and not read as a formula."""
    half = MAX_CHARACTERS // 2
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:half]}..{text[-half:]}"
    return cut.replace("$", r"\$")


def _spans_much(places: Sequence[float]) -> bool:
    return min(places) > 0 and max(places) / min(places) >= LOG_SCALE_FROM


def _draw_curves(pyplot: Any, found: Results) -> Any:
    """Draw the mean over seeds by step; a panel for each value of one axis if there are many combinations."""
    panels = _panels(found)
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        *(rows, columns),
        figsize=(max(7, 4 * columns), 4 * rows),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    cells = grid.flatten()
    for axes, (title, lines) in zip(cells, panels.items(), strict=False):
        for name, combination in lines:
            _draw_curve(axes, name, combination)
        axes.set_title(_short(title), fontsize="medium")
        axes.set_xlabel("step")
        axes.tick_params(labelbottom=True)
        axes.legend(fontsize="small")
    for axes in cells[len(panels) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel(found.metric.key)
    figure.suptitle(found.name)
    return figure


def _panels(found: Results) -> dict[str, list[tuple[str, Combination]]]:
    """Return the lines of each panel by its title."""
    combinations = [c for c in found.in_order() if any(trial.curve for trial in c.trials)]
    by_axis = {
        key: list(dict.fromkeys(format_value(c.values.get(key, "-")) for c in combinations))
        for key in found.axes
    }
    several = {key: names for key, names in by_axis.items() if 2 <= len(names) <= MAX_PANELS}
    if len(combinations) <= MAX_LINES:
        return {"": [(label(c.values, separator=", "), c) for c in combinations]}
    if not several:
        best = [c for c in found.combinations() if c in combinations][:MAX_LINES]
        return {
            f"the best {MAX_LINES} combinations": [
                (label(c.values, separator=", "), c) for c in best
            ]
        }
    key = max(several, key=lambda key: len(several[key]))
    panels: dict[str, list[tuple[str, Combination]]] = {}
    for name in several[key]:
        inside = [c for c in combinations if format_value(c.values.get(key, "-")) == name]
        lines = [
            (label({k: v for k, v in c.values.items() if k != key}), c) for c in inside[:MAX_LINES]
        ]
        panels[f"{key.rsplit('.', 1)[-1]}={name}"] = lines
    return panels


def _draw_curve(axes: Any, name: str, combination: Combination) -> None:
    """Draw the mean over seeds at the steps that all of them have, and its interval."""
    curves = [dict(trial.curve) for trial in _with_curve(combination)]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [statistics.fmean([curve[step] for curve in curves]) for step in steps]
    halves = [half_interval([curve[step] for curve in curves]) or 0.0 for step in steps]
    (drawn,) = axes.plot(steps, means, label=_short(name) or None)
    _draw_band(axes, steps, means, halves, drawn.get_color())


def _with_curve(combination: Combination) -> list[Result]:
    with_curve = [trial for trial in combination.trials if trial.curve]
    done = [trial for trial in with_curve if trial.state.status is Status.DONE]
    return done or with_curve
