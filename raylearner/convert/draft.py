"""The converted configuration: values by dotted key with their origin, written as YAML with comments."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raylearner.config.document import dump
from raylearner.text import visible

WIDTH = 100
SECTIONS = (
    "run",
    "cluster",
    "model",
    "data",
    "environment",
    "renderer",
    "sampling",
    "rewards",
    "actors",
    "replay",
    "learner",
    "weights",
    "evaluation",
    "observability",
)
DECIDE = "DECIDE"
"""Mark of comments at values that need a decision."""


@dataclass(slots=True)
class Entry:
    """A value with the keys that it comes from."""

    value: Any
    origin: str = ""
    decide: str = ""
    """What to decide about it."""


@dataclass(slots=True)
class Draft:
    """A configuration that is being written."""

    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    lost: list[str] = field(default_factory=list[str])
    """Parts of values that have no counterpart, with the reason."""

    def set(self, key: str, value: Any, origin: str = "", *, decide: str = "") -> None:
        """Set a key; a later value replaces an earlier one."""
        self.entries[key] = Entry(value, origin, decide)

    def copy(self, key: str, read: Callable[[str], Any], origin: str) -> None:
        """Set a key to what `read` returns for the project's own key."""
        self.set(key, read(origin), origin)

    def get(self, key: str, default: Any = None) -> Any:
        entry = self.entries.get(key)
        return default if entry is None else entry.value

    def decide(self, key: str, text: str) -> None:
        """Add something to decide about a key that is set."""
        entry = self.entries[key]
        entry.decide = f"{entry.decide} {text}".strip()

    @property
    def decisions(self) -> list[tuple[str, str]]:
        """Return all keys that need a decision, in the order of the file."""
        return [
            (key, self.entries[key].decide) for key in self._ordered() if self.entries[key].decide
        ]

    def paths(self) -> list[tuple[str, str]]:
        """Return keys whose value is the path of a local file, and the path."""
        found: list[tuple[str, str]] = []
        for key, entry in self.entries.items():
            for place, value in _texts(key, entry.value):
                if place.rpartition(".")[2] == "path" and (
                    value.startswith(("/", "~", "."))
                    or value.endswith((".parquet", ".jsonl", ".json", ".py"))
                ):
                    found.append((place, value))
        return found

    def missing_paths(self) -> list[tuple[str, str]]:
        """Return those of `paths` that do not exist on this machine."""
        return [(key, path) for key, path in self.paths() if not _exists(path)]

    def yaml(self, heading: str) -> str:
        """Return the file, with a comment at each value."""
        lines = [
            f"# {line}" if line else "#" for line in textwrap.wrap(visible(heading), WIDTH - 2)
        ]
        opened: tuple[str, ...] = ()
        for key in self._ordered():
            *parents, name = key.split(".")
            common = 0
            while common < min(len(parents), len(opened)) and parents[common] == opened[common]:
                common += 1
            for depth in range(common, len(parents)):
                lines += [""] * (depth == 0) + [f"{'  ' * depth}{parents[depth]}:"]
            lines += [""] * (not parents)
            opened = tuple(parents)
            lines += _written(name, self.entries[key], len(parents))
        return "\n".join(lines) + "\n"

    def _ordered(self) -> list[str]:
        """Return all keys by section, each section's keys together, `kind` first."""
        order: dict[str, int] = {}
        for position, key in enumerate(self.entries):
            parts = key.split(".")
            for depth in range(1, len(parts) + 1):
                order.setdefault(".".join(parts[:depth]), position)

        def rank(key: str) -> tuple[Any, ...]:
            parts = key.split(".")
            ranks: list[tuple[int, int]] = [(0, SECTIONS.index(parts[0]))]
            for depth in range(2, len(parts) + 1):
                part = ".".join(parts[:depth])
                is_section = depth < len(parts)
                ranks.append(
                    (-1, 0) if parts[depth - 1] == "kind" else (int(is_section), order[part])
                )
            return tuple(ranks)

        return sorted(self.entries, key=rank)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _texts(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(key, value)]
    if isinstance(value, dict):
        return [found for name, inner in value.items() for found in _texts(f"{key}.{name}", inner)]
    if isinstance(value, list):
        return [found for i, inner in enumerate(value) for found in _texts(f"{key}.{i}", inner)]
    return []


def _written(name: str, entry: Entry, depth: int) -> list[str]:
    indent = "  " * depth
    lines: list[str] = []
    if entry.decide:
        text = visible(f"{DECIDE}: {entry.decide}")
        lines += [f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - 2 - len(indent))]
    body = [f"{indent}{line}" for line in _body(name, entry.value)]
    if entry.origin and len(body) == 1 and len(body[0]) + len(entry.origin) + 4 <= WIDTH + 20:
        body[0] += f"  # {entry.origin}"
    elif entry.origin:
        lines += [
            f"{indent}# {line}" for line in textwrap.wrap(entry.origin, WIDTH - 2 - len(indent))
        ]
    return lines + body


def _body(name: str, value: Any) -> list[str]:
    """Return the lines of one key; a list of numbers or short texts is one line."""
    text = dump({name: value}).rstrip("\n")
    if (
        isinstance(value, list)
        and value
        and not any(isinstance(item, list | dict) for item in value)
    ):
        items = [line.removeprefix("- ") for line in text.split("\n")[1:]]
        if len(items) == len(value) and not any("," in item or "[" in item for item in items):
            return [f"{name}: [{', '.join(items)}]"]
    return text.split("\n")
