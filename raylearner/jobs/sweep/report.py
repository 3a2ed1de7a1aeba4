"""Reports of a sweep: a live table while it runs; CSV, Markdown and plots of its results."""

import csv
import importlib.util
import logging
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raylearner.errors import ConfigError
from raylearner.jobs.sweep.plan import Plan, Trial, axis_keys, format_value
from raylearner.jobs.sweep.state import Status, SweepState, TrialState
from raylearner.observability.lines import clock
from raylearner.text import visible

logger = logging.getLogger(__name__)

Pair = tuple[Trial, TrialState]

LOG_SCALE_FROM = 5.0
"""Ratio of an axis' largest to smallest value from which its scale is logarithmic."""


def check_matplotlib() -> None:
    """Raise `ConfigError` before a sweep starts, since plots are drawn at its end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots: matplotlib is not installed; `pip install matplotlib`")


def write(plan: Plan, state: SweepState, commands: Mapping[int, str]) -> None:
    """Write `results.csv`, `results.md` and `plots/*.png`; `commands` repeat the trials, by number."""
    pairs = list(zip(plan.trials, state.trials, strict=True))
    _write_csv(state.folder / "results.csv", pairs, state, commands)
    (state.folder / "results.md").write_text(markdown(plan, pairs, commands), encoding="utf-8")
    if any(s.value is not None for _, s in pairs):
        plot(plan, pairs, state.folder / "plots")


def _write_csv(
    path: Path, pairs: Sequence[Pair], sweep_state: SweepState, commands: Mapping[int, str]
) -> None:
    keys = axis_keys([trial for trial, _ in pairs])
    records = [
        {
            "trial": trial.number,
            **{key: format_value(trial.values.get(key, "")) for key in keys},
            "seed": trial.seed,
            "status": str(state.status),
            "attempts": state.num_attempts,
            "step": state.step,
            "value": "" if state.value is None else repr(state.value),
            "failed_episodes": f"{state.failed_fraction:.4g}",
            "seconds": _seconds(state),
            "run_dir": sweep_state.run_dir(trial.number),
            "job": state.submission_id or "",
            "error": visible(state.error or ""),
            "command": commands[trial.number],
        }
        for trial, state in pairs
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, fieldnames=list(records[0]))
        rows.writeheader()
        rows.writerows(records)


def _seconds(state: TrialState) -> str:
    if state.started_at_s is None or state.finished_at_s is None:
        return ""
    return f"{state.finished_at_s - state.started_at_s:.1f}"


def markdown(plan: Plan, pairs: Sequence[Pair], commands: Mapping[int, str]) -> str:
    """Return combinations from best to worst, each over its seeds, then every trial's command."""
    keys = axis_keys([trial for trial, _ in pairs])
    metric = plan.sweep.metric
    lines = [
        f"# {plan.sweep.name}",
        "",
        f"`{metric.key}`, mean over the last {metric.last_steps} steps, then over the seeds that"
        " completed; ± is the standard deviation over seeds.",
        "",
        "| "
        + " | ".join([*(f"`{key}`" for key in keys), "value", "failed episodes", "seeds", "trials"])
        + " |",
        "|" + "---|" * (len(keys) + 4),
    ]
    groups = sorted(_by_point(pairs).values(), key=lambda g: _rank(g, goal=metric.goal))
    for group in groups:
        cells = [format_value(group[0][0].values.get(key, "-")) for key in keys]
        lines.append("| " + " | ".join([*cells, *_summary(group)]) + " |")
    failed = [(trial, state) for trial, state in pairs if state.error]
    if failed:
        lines += ["", "## Failed", ""]
        lines += [f"- {trial.number:03d} ({trial.label}): {state.error}" for trial, state in failed]
    lines += ["", "## Repeat a trial", ""]
    lines += [f"- {trial.number:03d}: `{commands[trial.number]}`" for trial, _ in pairs]
    return "\n".join(lines) + "\n"


def _by_point(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = {}
    for trial, state in pairs:
        groups.setdefault(repr(sorted(trial.values.items())), []).append((trial, state))
    return groups


def _measured(group: Sequence[Pair]) -> list[tuple[float, float]]:
    """Return values and shares of failed episodes of the trials that completed, or of those stopped early
    if none completed."""
    measured = [(f.status, f.value, f.failed_fraction) for _, f in group if f.value is not None]
    done = [(value, failed) for status, value, failed in measured if status is Status.DONE]
    return done or [(value, failed) for _, value, failed in measured]


def _rank(group: Sequence[Pair], *, goal: str) -> tuple[float, float]:
    """Return the sort key: the mean, then the share of failed episodes."""
    measured = _measured(group)
    if not measured:
        return (math.inf, math.inf)
    mean = statistics.fmean(value for value, _ in measured)
    failed = statistics.fmean(failed for _, failed in measured)
    return (-mean if goal == "max" else mean, failed)


def _summary(group: Sequence[Pair]) -> list[str]:
    values = [value for value, _ in _measured(group)]
    failed = [failed for _, failed in _measured(group)]
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    value = f"{statistics.fmean(values):.4f}{spread}" if values else "-"
    numbers = ", ".join(
        f"{trial.number:03d}" + ("" if state.status == "done" else f" ({state.status})")
        for trial, state in group
    )
    if any(failed):
        value += f" ({statistics.fmean(failed):.1%} of the episodes failed)"
    return [value, f"{len(values)} of {len(group)}", numbers]


def plot(plan: Plan, pairs: Sequence[Pair], folder: Path) -> list[Path]:
    """Plot the metric against each axis: a line for each combination of the others, seeds as dots, a band of
    one standard deviation, crosses for trials that did not complete."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    paths: list[Path] = []
    keys = axis_keys([trial for trial, _ in pairs])
    for key in keys:
        with_key = [pair for pair in pairs if key in pair[0].values]
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        _draw(axes, key, [k for k in keys if k != key], with_key)
        axes.set_xlabel(key)
        axes.set_ylabel(plan.sweep.metric.key)
        axes.set_title(plan.sweep.name)
        paths.append(folder / f"{key.replace('.', '_')}.png")
        figure.savefig(paths[-1], dpi=120)
        pyplot.close(figure)
    return paths


def _draw(axes: Any, key: str, others: Sequence[str], pairs: Sequence[Pair]) -> None:
    places, ticks = _places([trial.values[key] for trial, _ in pairs])
    lines: dict[str, dict[float, list[float]]] = {}
    has_crosses = False
    for trial, state in pairs:
        if state.value is not None and state.status is not Status.DONE:
            label = None if has_crosses else "did not complete"
            has_crosses = True
            axes.plot(
                places[format_value(trial.values[key])], state.value, "x", color="gray", label=label
            )
        elif state.value is not None:
            there = [other for other in others if other in trial.values]
            named = [f"{o.rsplit('.', 1)[-1]}={format_value(trial.values[o])}" for o in there]
            line = lines.setdefault(", ".join(named), {})
            line.setdefault(places[format_value(trial.values[key])], []).append(state.value)
    for name, by_place in sorted(lines.items()):
        xs = sorted(by_place)
        means = [statistics.fmean(by_place[x]) for x in xs]
        spreads = [statistics.stdev(by_place[x]) if len(by_place[x]) > 1 else 0.0 for x in xs]
        (drawn,) = axes.plot(xs, means, marker="o", label=name or None)
        low = [m - s for m, s in zip(means, spreads, strict=True)]
        high = [m + s for m, s in zip(means, spreads, strict=True)]
        axes.fill_between(xs, low, high, color=drawn.get_color(), alpha=0.15)
        for x in xs:
            axes.plot([x] * len(by_place[x]), by_place[x], ".", color=drawn.get_color(), alpha=0.6)
    if ticks is not None:
        axes.set_xticks(list(range(len(ticks))), ticks)
    elif _spans_much(list(places.values())):
        axes.set_xscale("log")
    if has_crosses or any(lines):
        axes.legend(fontsize="small")


def _places(values: Sequence[object]) -> tuple[dict[str, float], list[str] | None]:
    """Return the position of each value on the axis, and the tick labels of values that are not numbers."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return {format_value(v): float(v) for v in values if isinstance(v, int | float)}, None
    names = list(dict.fromkeys(format_value(value) for value in values))
    return {name: float(index) for index, name in enumerate(names)}, names


def _spans_much(places: Sequence[float]) -> bool:
    return min(places) > 0 and max(places) / min(places) >= LOG_SCALE_FROM


STYLES = {
    Status.RUNNING: "cyan",
    Status.DONE: "green",
    Status.STOPPED_EARLY: "yellow",
    Status.FAILED: "red",
}


class Board:
    """A live table of all trials on a terminal, and a log line for each change of status."""

    def __init__(self, plan: Plan, state: SweepState, console: Console | None = None) -> None:
        self._plan = plan
        self._state = state
        self._console = console or Console(file=sys.stderr)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, get_renderable=self.table, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def log_change(self, state: TrialState) -> None:
        """Log the new status of a trial."""
        trial = self._plan.trials[state.number]
        parts = [f"trial {state.number:03d} {state.status}", trial.label, f"seed {trial.seed}"]
        if state.status.is_final:
            parts.append(f"value {_value(state)} at step {state.step} in {_duration(state)}")
        if state.error:
            parts.append(state.error)
        logger.info("%s", "  ".join(parts))

    def table(self) -> Table:
        table = Table(title=Text(self._plan.sweep.name), title_justify="left")
        for head in ("trial", "combination", "seed", "status", "step", "value", "time"):
            table.add_column(head)
        for trial, state in zip(self._plan.trials, self._state.trials, strict=True):
            num_steps = trial.config.run.num_steps
            table.add_row(
                f"{trial.number:03d}",
                Text(trial.label),
                str(trial.seed),
                Text(str(state.status), style=STYLES.get(state.status, "dim")),
                f"{state.step}/{num_steps}",
                _value(state),
                _duration(state),
            )
        return table


def _value(state: TrialState) -> str:
    return "-" if state.value is None else f"{state.value:.4f}"


def _duration(state: TrialState) -> str:
    if state.started_at_s is None:
        return "-"
    return clock((state.finished_at_s or time.time()) - state.started_at_s)
