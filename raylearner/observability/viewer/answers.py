"""What the page asks about runs, as plain values."""

from collections.abc import Sequence
from typing import Any

from raylearner.errors import ConfigError
from raylearner.observability import metrics
from raylearner.observability.viewer.failures import read_failures
from raylearner.observability.viewer.index import FOLDERS
from raylearner.observability.viewer.query import Filters, Kind, Sort
from raylearner.observability.viewer.runs import Run

EVALUATION = "evaluation/"
"""Prefix of the keys of eval.jsonl."""
MAX_FAILURES = 50
"""Maximum number of failed episodes shown, the latest ones."""
Json = dict[str, Any]


def describe_run(run: Run) -> Json:
    steps = {kind: run.index.steps(kind) for kind in FOLDERS}
    return {
        **run.summary(),
        "path": str(run.path),
        "steps": steps,
        "failures": read_failures(run.path)[-MAX_FAILURES:],
        "empty": "" if any(steps.values()) else run.without_trajectories(),
    }


def describe_keys(runs: Sequence[Run]) -> dict[str, Json]:
    """Return unit and meaning of every metric that one of the runs has."""
    keys: dict[str, Json] = {}
    for run in runs:
        run.metrics.refresh()
        run.evaluations.refresh()
        evaluated = (f"{EVALUATION}{key}" for key in run.evaluations.names())
        for key in [*run.metrics.names(), *evaluated]:
            spec = metrics.spec_of(key)
            unit, meaning = (spec.unit, spec.description) if spec else ("", "")
            keys[key] = {"unit": unit, "meaning": meaning}
    return keys


def curve(run: Run, key: str, max_points: int) -> list[list[float]]:
    """Return steps and values of a metric."""
    if key.startswith(EVALUATION):
        return list(run.evaluations.points(key.removeprefix(EVALUATION), max_points))
    return list(run.metrics.points(key, max_points))


def compare_configurations(runs: Sequence[Run]) -> Json:
    found = [run.configuration() for run in runs]
    keys = sorted({key for values in found for key in values})
    return {"rows": [{"key": key, "values": [values.get(key) for values in found]} for key in keys]}


def list_trajectories(
    run: Run,
    filters: Filters,
    *,
    by: str,
    sort: Sort,
    is_descending: bool,
    offset: int,
    limit: int,
) -> Json:
    num_read, num_files = run.index.refresh(filters.kind, filters.step)
    select = run.index.groups if by == "groups" else run.index.trajectories
    order = "reward" if by == "trajectories" and sort == "spread" else sort
    total, rows = select(
        filters, sort=order, is_descending=is_descending, offset=offset, limit=limit
    )
    return {
        "total": total,
        "rows": rows,
        "files": {"read": num_read, "total": num_files},
        "facets": run.index.facets(filters.kind, filters.step),
        "problems": run.index.problems(filters.kind),
    }


def show_group(run: Run, kind: Kind, step: int, group: str) -> Json:
    """Return a group with its members. Raises `ConfigError` if there is none."""
    run.index.refresh(kind, step)
    shown = run.index.group(kind, step, group)
    if not shown["members"]:
        raise ConfigError(f"{run.id}: step {step} has no group {group[:200]}")
    return shown


def load_record(run: Run, kind: Kind, step: int, line: int) -> Json:
    """Return a trajectory as it was recorded. Raises `ConfigError` if there is none."""
    record = run.index.load(kind, step, line)
    if record is None:
        steps = run.index.steps(kind)
        last = f"the last step is {steps[-1]}" if steps else "it has no trajectories"
        raise ConfigError(f"{run.id}: step {step} has no trajectory in line {line}; {last}")
    return record
