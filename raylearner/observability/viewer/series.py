"""The columns of a run's metrics, read on as the run writes them."""

import bisect
import json
import math
import threading
from array import array
from pathlib import Path
from typing import Any, cast

NAN = float("nan")


class Series:
    """Owns the numbers of one JSON-lines file by key. Safe to use from several threads.

    A file that was replaced, as after a rollback, is read from its start. Lines that are not rows are
    counted and skipped; an incomplete last line is read when it is complete.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._inode = self._offset = 0
        self.num_damaged = 0
        self._steps: array[int] = array("q")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> str:
        """Read what is new, and return a stamp of the content."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    stat = self._path.stat()
                    if stat.st_ino != self._inode or stat.st_size < self._offset:
                        self._reset()
                        self._inode = stat.st_ino
                    file.seek(self._offset)
                    content = file.read()
            except OSError:
                self._reset()
                return "none"
            complete = content[: content.rfind(b"\n") + 1]
            for line in complete.splitlines():
                self._add(line)
            self._offset += len(complete)
            return f"{self._inode}.{self._offset}"

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            row: object = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        values = cast(dict[str, Any], row) if isinstance(row, dict) else {}
        step = values.get("step")
        if type(step) is not int or not 0 <= step < 2**62:
            self.num_damaged += 1
            return
        num_before = len(self._steps)
        self._steps.append(step)
        for key, value in values.items():
            if key == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = array("d", [NAN]) * num_before
            column.extend([NAN] * (num_before - len(column)))
            column.append(float(value))

    @property
    def num_rows(self) -> int:
        return len(self._steps)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    def last(self, key: str) -> float | None:
        """Return the last number of a key."""
        with self._lock:
            column = self._columns.get(key, ())
            return next((v for v in reversed(column) if not math.isnan(v)), None)

    def points(self, key: str, max_points: int) -> tuple[list[float], list[float]]:
        """Return steps and values of a key, without gaps; means of neighbours if there are more."""
        with self._lock:
            column = self._columns.get(key, array("d"))
            pairs = [(s, v) for s, v in zip(self._steps, column, strict=False) if not math.isnan(v)]
        width = max(1, math.ceil(len(pairs) / max_points))
        bins = [pairs[i : i + width] for i in range(0, len(pairs), width)]
        return (
            [found[-1][0] for found in bins],
            [sum(v for _, v in found) / len(found) for found in bins],
        )

    def rows(self) -> list[dict[str, float]]:
        """Return the rows with their numbers, in order; for short files."""
        with self._lock:
            return [
                {
                    "step": step,
                    **{
                        key: column[i]
                        for key, column in self._columns.items()
                        if i < len(column) and not math.isnan(column[i])
                    },
                }
                for i, step in enumerate(self._steps)
            ]

    def version_before(self, step: int) -> int | None:
        """Return the learner's policy version when it took the trajectories of a step."""
        self.refresh()
        with self._lock:
            if step <= 1:
                return 0
            versions = self._columns.get("policy_version", array("d"))
            at = bisect.bisect_right(self._steps, step - 1) - 1
            if not 0 <= at < len(versions) or self._steps[at] != step - 1:
                return None
            return None if math.isnan(versions[at]) else int(versions[at])
