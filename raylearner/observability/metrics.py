"""Metric keys: what each one means.

`METRICS` is the one table; docs/observability.md holds a copy, which a test keeps equal.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from raylearner.observability.metric_table import TABLE


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
