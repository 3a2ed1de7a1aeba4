"""Metric keys: how values of one step combine, and what each key means.

`METRICS` is the one table; docs/observability.md holds a copy, which a test keeps equal.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from raylearner.observability.metric_table import TABLE

Combination: TypeAlias = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What one key, or every key of one pattern, means."""

    description: str
    unit: str = ""


METRICS: dict[str, MetricSpec] = {
    key: MetricSpec(description, unit) for key, unit, description in TABLE
}
"""Specs by key. `<kind>` in a key stands for any one part, `<key>` for one or more."""


@lru_cache(maxsize=4096)
def spec_of(key: str) -> MetricSpec | None:
    """The spec that covers `key`; None for an undocumented one."""
    if key in METRICS:
        return METRICS[key]
    return next((METRICS[p] for p, pattern in _patterns().items() if pattern.fullmatch(key)), None)


def undocumented(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if spec_of(key) is None)


@lru_cache(maxsize=1)
def _patterns() -> dict[str, re.Pattern[str]]:
    return {key: re.compile(_expression(key)) for key in METRICS if "<" in key}


def _expression(key: str) -> str:
    parts = re.split(r"(<[a-z_]+>)", key)
    any_of = {"<key>": ".+"}
    return "".join(
        any_of.get(part, "[^/]+") if part.startswith("<") else re.escape(part) for part in parts
    )


@dataclass(slots=True)
class _Entry:
    combination: Combination
    value: float
    weight: float


class MetricLog:
    """Collects values between two learner steps and combines those of one key.

    A key keeps its combination: asking for another one is a bug of ours.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def mean(self, key: str, value: float, *, weight: float = 1.0) -> None:
        self._add(key, _Entry("mean", value * weight if weight else 0.0, weight))

    def sum(self, key: str, value: float) -> None:
        self._add(key, _Entry("sum", value, 1.0))

    def max(self, key: str, value: float) -> None:
        self._add(key, _Entry("max", value, 1.0))

    def min(self, key: str, value: float) -> None:
        self._add(key, _Entry("min", value, 1.0))

    def last(self, key: str, value: float) -> None:
        self._add(key, _Entry("last", value, 1.0))

    def update(self, values: Mapping[str, float]) -> None:
        """Each value as the last of its key."""
        for key, value in values.items():
            self.last(key, value)

    def merge(self, other: "MetricLog") -> None:
        for key, entry in other._entries.items():
            self._add(key, _Entry(entry.combination, entry.value, entry.weight))

    def drain(self) -> dict[str, float]:
        """The combined values, keys sorted; the log is empty afterwards."""
        values = {key: _finished(entry) for key, entry in sorted(self._entries.items())}
        self._entries.clear()
        return values

    def _add(self, key: str, new: _Entry) -> None:
        old = self._entries.setdefault(key, new)
        if old is new:
            return
        assert old.combination == new.combination, (key, old.combination, new.combination)
        old.weight += new.weight
        match new.combination:
            case "mean" | "sum":
                old.value += new.value
            case "max":
                old.value = max(old.value, new.value)
            case "min":
                old.value = min(old.value, new.value)
            case "last":
                old.value = new.value


def _finished(entry: _Entry) -> float:
    if entry.combination != "mean":
        return float(entry.value)
    return float(entry.value / entry.weight) if entry.weight else float("nan")
