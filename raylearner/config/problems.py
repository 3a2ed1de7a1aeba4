"""Problems in a configuration, with their places."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from raylearner.credentials import mask
from raylearner.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Where:
    """A place in the user's input: a file and line, or one override."""

    rank: int
    """Position of the file on the command line; overrides come last."""
    line: int
    """1-based; 0 for the whole file."""
    label: str
    """The file as the user named it, or `override`."""
    override: str = ""
    """The override as typed."""

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of the report."""

    where: Where
    key: str
    """Dotted key; empty where the problem is a whole file's."""
    text: str
    is_unknown_key: bool = False
    """Whether no section has this key, whatever its value and all other keys are."""

    @property
    def message(self) -> str:
        """Return the line without its place; an override is shown as it was typed."""
        override = self.where.override
        if override and override.split("=", 1)[0].strip() != self.key and self.key:
            return f"{override}: {self.key}: {self.text}"
        subject = override or self.key
        return f"{subject}: {self.text}" if subject else self.text


class ConfigProblems(ConfigError):
    """All problems of a configuration; `str` returns the report."""

    closing: ClassVar[str] = "nothing was started."

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(sorted(problems, key=lambda problem: problem.where))

    def __str__(self) -> str:
        places = [str(problem.where) for problem in self.problems]
        width = max(map(len, places), default=0)
        lines = [
            f"{place:<{width}}  {problem.message}"
            for place, problem in zip(places, self.problems, strict=True)
        ]
        count = len(self.problems)
        return mask("\n".join([*lines, f"{count} problem{'s' * (count != 1)}; {self.closing}"]))


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the nearest choice, or an empty string."""
    near = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object, *, limit: int = 80) -> str:
    """Return `repr`, cut in the middle if it is long, without credentials."""
    text = mask(repr(value))
    return text if len(text) <= limit else f"{text[: limit - 20]}...{text[-17:]}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem found by a check, before its place is known."""

    key: str
    text: str
