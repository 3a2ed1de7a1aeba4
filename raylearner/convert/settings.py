"""The settings that a user's file gives, and their values by type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raylearner.config.problems import ConfigProblems, Problem, Where, did_you_mean, shown
from raylearner.convert.table import Row, Table

TRUE_WORDS, FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")
MAX_SUGGESTIONS = 50
"""Number of unknown keys for which the nearest one is searched."""
T = TypeVar("T")


class ConversionProblems(ConfigProblems):
    """All problems of a file that cannot be converted."""

    closing = "nothing was written."


@dataclass(frozen=True, slots=True)
class Setting:
    """A value, and the place that gives it."""

    key: str
    value: Any
    where: Where
    unset: tuple[str, ...] = ()
    """Variables in the value that only the shell of a launch knows."""

    def problem(self, text: str) -> Problem:
        return Problem(self.where, self.key, text)


@dataclass(slots=True)
class Reading:
    """The content of a file: settings by dotted key, problems, and what could not be followed."""

    settings: dict[str, Setting] = field(default_factory=dict[str, Setting])
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Facts beside the settings, such as the number of processes of a launcher."""
    _sections: set[str] = field(default_factory=set[str])

    def add(self, setting: Setting) -> None:
        """Add a setting; it replaces one of the same key, and all below it."""
        if setting.key in self._sections:
            below = [key for key in self.settings if key.startswith(f"{setting.key}.")]
            for key in below:
                del self.settings[key]
        self.settings[setting.key] = setting
        section = setting.key
        while (section := section.rpartition(".")[0]) and section not in self._sections:
            self._sections.add(section)


class Settings:
    """The settings of a file with the project's defaults behind them.

    A value of the wrong type is a problem, and the default is taken in its place.
    """

    def __init__(self, table: Table, reading: Reading) -> None:
        self.table = table
        self.given: Mapping[str, Setting] = reading.settings
        self.facts: Mapping[str, Any] = reading.facts
        self.problems = reading.problems
        self.used: set[str] = set()
        self.unset: dict[str, tuple[str, ...]] = {}
        """Settings whose value is unknown, with its variables."""

    def has(self, key: str) -> bool:
        """Return whether the file gives a value that is not null."""
        return key in self.given and self.given[key].value is not None

    def row(self, key: str) -> Row:
        row = self.table.find(key)
        assert row is not None, f"{key} is not in the table of {self.table.name}"
        return row

    def value(self, key: str) -> Any:
        """Return the value as it was written, or the project's default."""
        row = self.row(key)
        self.used.add(key)
        return self.given[key].value if self.has(key) else row.default

    def whole(self, key: str) -> int:
        return self._typed(key, _whole, "a whole number")

    def number(self, key: str) -> float:
        return self._typed(key, _number, "a number")

    def flag(self, key: str) -> bool:
        return self._typed(key, _flag, "true or false")

    def text(self, key: str) -> str:
        return self._typed(key, _text, "text")

    def listed(self, key: str) -> list[Any]:
        """Return a list; a single value is a list of one, null and an absent one an empty list."""
        value = self.value(key)
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def below(self, key: str) -> dict[str, Any]:
        """Return the settings below a key as one mapping."""
        prefix = f"{key}."
        found: dict[str, Any] = {}
        whole = self.given.get(key)
        if whole is not None and isinstance(whole.value, dict):
            self.used.add(key)
            found |= whole.value
        for name, setting in self.given.items():
            if not name.startswith(prefix):
                continue
            self.used.add(name)
            *parents, last = name.removeprefix(prefix).split(".")
            place = found
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = setting.value
        return found

    def as_default(self, key: str) -> Any:
        """Return the value, with the type of the project's default if that is a single value."""
        default = self.row(key).default
        match default:
            case bool():
                return self.flag(key)
            case int():
                return self.whole(key)
            case float():
                return self.number(key)
            case str():
                return self.text(key)
            case _:
                return self.value(key)

    def where(self, *keys: str) -> str:
        """Return the keys that the file gives, for a comment."""
        return ", ".join(key for key in keys if self.has(key))

    def _typed(self, key: str, convert: Callable[[Any], T], expected: str) -> T:
        default = self.row(key).default
        value = self.value(key)
        if self.has(key) and self.given[key].unset and not isinstance(default, str | None):
            self.unset[key] = self.given[key].unset
            return convert(default)
        try:
            return convert(value)
        except (TypeError, ValueError):
            if not self.has(key):
                raise
            found = self.given[key].problem(f"must be {expected}, got {shown(value)}")
            if found not in self.problems:
                self.problems.append(found)
            return convert(default if default is not None else _ANY[expected])

    def unknown(self) -> list[Problem]:
        """Return the settings that the project does not have."""
        names = [key for key in self.table.rows if not key.endswith("*")]
        found: list[Problem] = []
        for key, setting in self.given.items():
            likely = self.table.likely_key(key)
            if likely is not None:
                found.append(
                    setting.problem(f"not a key of {self.table.title}; did you mean {likely!r}?")
                )
            elif self.table.find(key) is None and not self.table.is_section(key):
                near = did_you_mean(key, names) if len(found) < MAX_SUGGESTIONS else ""
                found.append(setting.problem(f"not a key of {self.table.title}{near}"))
        return found


_ANY: dict[str, Any] = {"a whole number": 1, "a number": 1.0, "true or false": False, "text": ""}


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = float(value.replace("_", "") if isinstance(value, str) else value)
    if number != int(number):
        raise ValueError
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    word = str(value).strip().lower()
    if word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError
    return word in TRUE_WORDS


def _text(value: Any) -> str:
    if value is None or isinstance(value, list | dict):
        raise TypeError
    return str(value)
