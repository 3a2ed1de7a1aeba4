"""How far a trial is and how good, read from its run directory."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylearner.jobs.sweep.section import SweepMetric

EVALUATION = "evaluation/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a run's files say by now."""

    num_steps: int
    """Learner steps on record."""
    curve: list[tuple[int, float]]
    """Step and value so far, in order; the value at a step is the mean over the last few."""
    num_damaged: int
    """Lines that are no rows; they are passed over."""
    failed_fraction: float = 0.0
    """Share of failed episodes: of the last evaluation, or the mean over the last few steps."""


def read(run_dir: Path, metric: SweepMetric) -> Progress:
    rows, num_damaged = _rows(run_dir / "metrics.jsonl")
    num_steps = rows[-1]["step"] if rows else 0
    curve: list[tuple[int, float]] = []
    if metric.key.startswith(EVALUATION):
        key = metric.key.removeprefix(EVALUATION)
        evaluations, also_damaged = _rows(run_dir / "eval.jsonl")
        num_damaged += also_damaged
        for row in evaluations:
            value = _number(row.get(key))
            if value is not None:
                curve.append((row["step"], value))
        last = evaluations[-1] if evaluations else {}
        return Progress(
            num_steps=num_steps,
            curve=curve,
            num_damaged=num_damaged,
            failed_fraction=_number(last.get("failed_fraction")) or 0.0,
        )
    recent: list[float] = []
    for row in rows:
        value = _number(row.get(metric.key))
        if value is not None:
            recent = [*recent, value][-metric.last_steps :]
            curve.append((row["step"], sum(recent) / len(recent)))
    failed = [_number(row.get("rollout/stop/error")) or 0.0 for row in rows[-metric.last_steps :]]
    return Progress(
        num_steps=num_steps,
        curve=curve,
        num_damaged=num_damaged,
        failed_fraction=sum(failed) / len(failed) if failed else 0.0,
    )


def _rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows in order, and how many lines are none."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # the last one is being written
    except FileNotFoundError:
        return [], 0
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):  # pyright: ignore[reportUnknownMemberType]
            rows.append(row)  # pyright: ignore[reportUnknownArgumentType]
    return rows, len(lines) - len(rows)


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
