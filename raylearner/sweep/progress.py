"""How far a trial is and how good, read from its run directory."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raylearner.config.sweep import SweepMetric
from raylearner.observability.jsonl import read_lines

EVALUATION = "evaluation/"


def curve(run_dir: Path, metric: SweepMetric) -> list[tuple[int, float]]:
    """Step and value so far, in order; the value at a step is the mean over the last few."""
    if metric.key.startswith(EVALUATION):
        key = metric.key.removeprefix(EVALUATION)
        rows = _rows(run_dir / "eval.jsonl")
        return [
            (row["step"], value) for row in rows if (value := _number(row.get(key))) is not None
        ]
    found: list[tuple[int, float]] = []
    recent: list[float] = []
    for row in _rows(run_dir / "metrics.jsonl"):
        value = _number(row.get(metric.key))
        if value is not None:
            recent = [*recent, value][-metric.last_steps :]
            found.append((row["step"], sum(recent) / len(recent)))
    return found


def num_steps(run_dir: Path) -> int:
    """Learner steps on record, which are in order."""
    lines = _lines(run_dir / "metrics.jsonl")
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, _lines(path))


def _lines(path: Path) -> list[str]:
    return read_lines(path) if path.is_file() else []


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
