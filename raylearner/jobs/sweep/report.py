"""The report of a sweep: `results.md`, three CSV files and plots."""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from raylearner.config.loader import load_section
from raylearner.errors import ConfigError
from raylearner.jobs.sweep import plan, results
from raylearner.jobs.sweep.figures import plot
from raylearner.jobs.sweep.plan import format_value, label
from raylearner.jobs.sweep.results import Combination, Result, Results, half_interval
from raylearner.jobs.sweep.section import SweepSection
from raylearner.jobs.sweep.state import Status
from raylearner.text import visible

QUARTERS = (0.25, 0.5, 0.75, 1.0)
"""Parts of a run at which learning curves are summarized."""


def find(path: str) -> Path:
    """Return the folder of a sweep, named by itself or by the sweep file. Raises `ConfigError`."""
    if Path(path).is_dir():
        return Path(path)
    folder = plan.folder(load_section(path, SweepSection).name)
    if not folder.is_dir():
        raise ConfigError(f"{path}: has no results yet; `raylearner sweep {path}` runs it")
    return folder


def write(folder: Path) -> str:
    """Write the report of a sweep into its folder and return its Markdown. Raises `ConfigError`."""
    found = results.read(folder)
    text = markdown(found)
    (folder / "results.md").write_text(text, encoding="utf-8")
    _write_csv(folder / "results.csv", [_trial_row(found, trial) for trial in found.trials])
    _write_csv(
        folder / "combinations.csv",
        [_combination_row(found, combination) for combination in found.combinations()],
    )
    _write_csv(
        folder / "curves.csv",
        [
            {"trial": trial.number, "seed": trial.seed, "step": step, "value": repr(value)}
            for trial in found.trials
            for step, value in trial.curve
        ],
    )
    if any(trial.state.value is not None for trial in found.trials):
        plot(found, folder / "plots")
    return text


def markdown(found: Results) -> str:
    """Return the report: the best, combinations, learning curves, failed trials, commands."""
    ranked = found.combinations()
    parts = [
        [f"# {found.name}", "", _about(found)],
        _best(found, ranked),
        ["## Combinations, from best to worst", "", *_combinations(found, ranked)],
        ["## Learning curves", "", *_curves(found, ranked)],
        _failed(found),
        [
            "## Repeat a trial",
            "",
            "The directory is a new one. A trial that has started is repeated with the configuration that it"
            " ran with.",
            "",
            *(f"- {trial.number:03d}: `{trial.command}`" for trial in found.trials),
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _about(found: Results) -> str:
    metric = found.metric
    better = "larger" if metric.goal == "max" else "smaller"
    counts = Counter(trial.state.status for trial in found.trials)
    states = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    return (
        f"`{metric.key}`, mean over the last {metric.last_steps} steps of a trial; {better} is better."
        f" {len(found.trials)} trials: {states}. ± is half the 95% confidence interval of the mean over"
        " seeds (Student's t)."
    )


def _best(found: Results, ranked: Sequence[Combination]) -> list[str]:
    trial = found.best_trial()
    if trial is None:
        return ["No trial has completed with a value."]
    first = ranked[0]
    return [
        f"- **Best combination**: {_named(first.values)}: {_value(first)} over {_seeds(first)} seeds",
        f"- **Best trial**: {trial.number:03d} ({_named(trial.values)}, seed {trial.seed}):"
        f" {_number(trial.state.value)}, in `{trial.run_dir}`",
    ]


def _combinations(found: Results, ranked: Sequence[Combination]) -> list[str]:
    rows = [
        [*_point(found, c), _value(c), _seeds(c), ", ".join(map(_with_status, c.trials))]
        for c in ranked
    ]
    return _table([*(f"`{key}`" for key in found.axes), "value", "seeds", "trials"], rows)


def _curves(found: Results, ranked: Sequence[Combination]) -> list[str]:
    heads = ["first step", *(f"{part:.0%} of the steps" for part in QUARTERS)]
    rows = [
        [
            *_point(found, combination),
            *(
                _spread(
                    [value for t in combination.measured if (value := _at(t, part)) is not None]
                )
                for part in (0.0, *QUARTERS)
            ),
        ]
        for combination in ranked
    ]
    about = "Mean over seeds of the metric so far; `curves.csv` has every step."
    return [about, "", *_table([*(f"`{key}`" for key in found.axes), *heads], rows)]


def _at(trial: Result, part: float) -> float | None:
    """Return the metric after this part of the steps; None if the trial did not get there."""
    step = max(round(part * trial.num_steps), trial.curve[0][0]) if trial.curve else 0
    reached = [value for at, value in trial.curve if at <= step]
    return reached[-1] if reached and trial.state.step >= step else None


def _failed(found: Results) -> list[str]:
    failed = [trial for trial in found.trials if trial.state.error]
    lines = [
        f"- {trial.number:03d} ({_named(trial.values)}, seed {trial.seed}):"
        f" {_line(trial.state.error or '')}; `{trial.run_dir}`"
        for trial in failed
    ]
    return ["## Failed", "", *lines] if lines else []


def _point(found: Results, combination: Combination) -> list[str]:
    return [
        format_value(combination.values[key]) if key in combination.values else "-"
        for key in found.axes
    ]


def _value(combination: Combination) -> str:
    failed = combination.failed_fraction
    note = f" ({failed:.1%} of the episodes failed)" if failed else ""
    return f"{_spread(combination.numbers)}{note}"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    half = half_interval(values)
    mean = _number(sum(values) / len(values))
    return mean if half is None else f"{mean} ± {_number(half)}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def _seeds(combination: Combination) -> str:
    return f"{len(combination.measured)} of {len(combination.trials)}"


def _with_status(trial: Result) -> str:
    status = trial.state.status
    return f"{trial.number:03d}" + ("" if status is Status.DONE else f" ({status})")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *([_cell(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _named(values: plan.Values) -> str:
    return _cell(label(values, separator=", "))


def _line(text: str) -> str:
    return " ".join(visible(text).split())


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _trial_row(found: Results, trial: Result) -> dict[str, object]:
    state = trial.state
    seconds = ""
    if state.started_at_s is not None and state.finished_at_s is not None:
        seconds = f"{state.finished_at_s - state.started_at_s:.1f}"
    return {
        "trial": trial.number,
        **{key: format_value(trial.values.get(key, "")) for key in found.axes},
        "seed": trial.seed,
        "status": str(state.status),
        "attempts": state.num_attempts,
        "step": state.step,
        "value": "" if state.value is None else repr(state.value),
        "failed_episodes": f"{state.failed_fraction:.4g}",
        "seconds": seconds,
        "run_dir": trial.run_dir,
        "job": state.submission_id or "",
        "error": visible(state.error or ""),
        "command": trial.command,
    }


def _combination_row(found: Results, combination: Combination) -> dict[str, object]:
    mean, half = combination.mean, half_interval(combination.numbers)
    low = high = ""
    if mean is not None and half is not None:
        low, high = repr(mean - half), repr(mean + half)
    return {
        **{key: format_value(combination.values.get(key, "")) for key in found.axes},
        "mean": "" if mean is None else repr(mean),
        "low_95": low,
        "high_95": high,
        "seeds": len(combination.measured),
        "failed_episodes": f"{combination.failed_fraction:.4g}",
        "trials": " ".join(f"{trial.number:03d}" for trial in combination.trials),
    }


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        if rows:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
