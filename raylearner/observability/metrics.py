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
def entry_of(key: str) -> tuple[str, dict[str, str]] | None:
    """The key or pattern of the table that covers `key`, with what stands for its placeholders.

    `tools/search/calls` is covered by `tools/<name>/calls` with `{"name": "search"}`; None for an
    undocumented key.
    """
    if key in METRICS:
        return key, {}
    for entry, pattern in _patterns().items():
        if match := pattern.fullmatch(key):
            return entry, match.groupdict()
    return None


def spec_of(key: str) -> MetricSpec | None:
    """The spec that covers `key`; None for an undocumented one."""
    entry = entry_of(key)
    return METRICS[entry[0]] if entry is not None else None


def placeholders(entry: str) -> tuple[str, ...]:
    """The names of a pattern's placeholders, in order."""
    return tuple(re.findall(r"<([a-z_]+)>", entry))


def undocumented(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if spec_of(key) is None)


@lru_cache(maxsize=1)
def gauge_names() -> dict[str, str]:
    """The name of the Ray metric of every entry of the table; Prometheus puts `ray_` before it.

    Where dropping a placeholder leaves the name of another entry, its tag stays in the name.
    """
    bare = {entry: _spelled(re.sub(r"<[a-z_]+>", "", entry)) for entry in METRICS}
    taken = {name for entry, name in bare.items() if not placeholders(entry)}
    return {
        entry: f"{name}_by_{'_'.join(placeholders(entry))}"
        if placeholders(entry) and name in taken
        else name
        for entry, name in bare.items()
    }


def _spelled(key: str) -> str:
    return "raylearner_" + re.sub(r"[^a-z0-9]+", "_", key).strip("_")


@lru_cache(maxsize=1)
def _patterns() -> dict[str, re.Pattern[str]]:
    return {key: re.compile(_expression(key)) for key in METRICS if "<" in key}


def _expression(key: str) -> str:
    parts = re.split(r"(<[a-z_]+>)", key)
    any_of = {"<key>": ".+"}
    return "".join(
        f"(?P{part}{any_of.get(part, '[^/]+')})" if part.startswith("<") else re.escape(part)
        for part in parts
    )
