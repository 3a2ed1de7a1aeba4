"""A sweep as a page shows it: its axes, and each trial's point, value and run."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from raylearner.errors import ConfigError
from raylearner.observability.viewer.answers import EVALUATION
from raylearner.observability.viewer.runs import SWEEP_FILE, Run

RESULTS_FILE = "results.csv"


def read(sweep_id: str, folder: Path, runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return a sweep's axes and trials. Raises `ConfigError` if its record is damaged."""
    path = folder / SWEEP_FILE
    try:
        record = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        points: list[dict[str, Any]] = record["points"]
        metric: dict[str, Any] = record["metric"]
        states: list[dict[str, Any]] = record["trials"]
        by_path = {run.path: run for run in runs.values()}
        commands = _commands(folder / RESULTS_FILE)
        trials = [
            _trial(folder, point, state, metric, by_path, commands)
            for point, state in zip(points, states, strict=True)
        ]
        axes = _axes(points)
    except KeyError as error:
        raise ConfigError(
            f"{path}: has no {error}; it was written by another version of raylearner, and results.md"
            " beside it has the results"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    return {
        "id": sweep_id,
        "name": str(record.get("name") or folder.name),
        "metric": metric,
        "axes": axes,
        "trials": trials,
    }


def summary(sweep_id: str, folder: Path) -> dict[str, Any]:
    """Return a row of the list of sweeps."""
    try:
        record = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
        statuses = [str(trial["status"]) for trial in record["trials"]]
    except (OSError, ValueError, KeyError, TypeError):
        statuses = []
    return {"id": sweep_id, "statuses": {name: statuses.count(name) for name in set(statuses)}}


def _axes(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that vary; one is a number if every value of it is."""
    keys = list(dict.fromkeys(key for point in points for key in point["values"]))
    axes: list[dict[str, Any]] = []
    for key in keys:
        values = [point["values"][key] for point in points if key in point["values"]]
        is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        labels = dict.fromkeys(label(v) for v in (sorted(values) if is_number else values))
        axes.append({"key": key, "is_number": is_number, "labels": list(labels)})
    return axes


def _trial(
    folder: Path,
    point: dict[str, Any],
    state: dict[str, Any],
    metric: dict[str, Any],
    runs: Mapping[Path, Run],
    commands: Mapping[str, str],
) -> dict[str, Any]:
    number = int(state["number"])
    run = runs.get(folder / "trials" / f"{number:03d}")
    value, step = state.get("value"), state.get("step")
    if run is not None and value is None:
        value, step = _progress(run, metric)
    return {
        "number": number,
        "values": {key: label(v) for key, v in point["values"].items()},
        "numbers": {k: v for k, v in point["values"].items() if isinstance(v, int | float)},
        "seed": point["seed"],
        "num_steps": point.get("num_steps"),
        "status": str(state["status"]),
        "step": step,
        "value": value,
        "failed_fraction": state.get("failed_fraction"),
        "error": state.get("error"),
        "run": None if run is None else run.id,
        "command": commands.get(str(number)),
    }


def _progress(run: Run, metric: dict[str, Any]) -> tuple[float | None, int]:
    """Return the value of a trial so far, and its step."""
    run.metrics.refresh()
    steps, _ = run.metrics.points("time_s", 2**31)
    key = str(metric["key"])
    if key.startswith(EVALUATION):
        run.evaluations.refresh()
        value = run.evaluations.last(key.removeprefix(EVALUATION))
        return value, int(steps[-1]) if steps else 0
    last = run.metrics.points(key, 2**31)[1][-int(metric.get("last_steps") or 1) :]
    return (sum(last) / len(last) if last else None), int(steps[-1]) if steps else 0


def _commands(path: Path) -> dict[str, str]:
    """Return the command of each trial, by number, once the sweep has written its results."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {row["trial"]: row["command"] for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError, csv.Error):
        return {}


def label(value: object) -> str:
    """Return a value in short form; a section by its kind, and its other keys if it has any."""
    if isinstance(value, dict):
        section = cast(dict[str, Any], value)
        others = [f"{k}={label(v)}" for k, v in section.items() if k != "kind"]
        kind = [str(section["kind"])] if "kind" in section else []
        return " ".join([*kind, *others])
    if isinstance(value, list):
        return ", ".join(map(label, cast(list[Any], value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
