"""Interpolations of OmegaConf in values: `${key}`, `${.relative}`, `${oc.select:key,default}`.

They refer to settings of the file, or to a key of the project with its default. Environment variables
are not read: a converted file must not depend on where it was converted.
"""

import re
from typing import Any

from raylearner.config.problems import did_you_mean
from raylearner.convert.overrides import read_value
from raylearner.convert.settings import Reading, Setting
from raylearner.convert.table import Table

_OPEN = re.compile(r"\$\{")
_IGNORED = "hydra"
"""Section of Hydra itself, whose resolvers need a running program."""
MAX_CHARACTERS = 100_000
"""Maximum length of a resolved text."""


def resolve(reading: Reading, table: Table) -> None:
    """Replace all interpolations of a file, and add a problem for each that refers to nothing."""
    resolver = _Resolver(reading, table)
    for key in list(reading.settings):
        if key.split(".")[0] != _IGNORED:
            resolver.resolve(key)


class _Unresolved(Exception):
    """Raised with the reason."""


class _Resolver:
    def __init__(self, reading: Reading, table: Table) -> None:
        self._reading, self._table = reading, table
        self._open: list[str] = []
        self._done: set[str] = set()

    def resolve(self, key: str) -> None:
        """Resolve one setting in place."""
        setting = self._reading.settings[key]
        if key in self._done:
            return
        self._open.append(key)
        try:
            value = self._value(setting.value, key)
        except _Unresolved as error:
            self._reading.problems.append(setting.problem(str(error)))
            value = None
        self._open.pop()
        self._done.add(key)
        self._reading.settings[key] = Setting(key, value, setting.where, setting.unset)

    def _value(self, value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [self._value(item, key) for item in value]
        if isinstance(value, dict):
            return {name: self._value(item, key) for name, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        start, end = _span(value)
        if (start, end) == (0, len(value)):
            return self._interpolation(value[2:-1], key)
        found = self._interpolation(value[start + 2 : end - 1], key)
        text = f"{value[:start]}{'' if found is None else found}{value[end:]}"
        if len(text) > MAX_CHARACTERS:
            raise _Unresolved(f"becomes longer than {MAX_CHARACTERS:,} characters; write it out")
        return self._value(text, key)

    def _interpolation(self, text: str, key: str) -> Any:
        name, colon, rest = text.partition(":")
        if not colon or "${" in name:
            return self._lookup(str(self._value(text, key)).strip(), key)
        first, _, default = _split(rest)
        match name.strip():
            case "oc.select":
                try:
                    found = self._lookup(first, key)
                except _Unresolved:
                    found = None
                return self._default(default, key) if found is None else found
            case "oc.env":
                if default:
                    return self._default(default, key)
                raise _Unresolved(f"refers to the environment variable {first}; write its value")
            case "oc.decode":
                return read_value(str(self._value(rest, key)))
            case other:
                raise _Unresolved(f"resolver {other!r} is not supported; write the value")

    def _default(self, text: str, key: str) -> Any:
        return self._value(text.strip(), key) if "${" in text else read_value(text)

    def _lookup(self, name: str, key: str) -> Any:
        target = name
        if name.startswith("."):
            dots = len(name) - len(name.lstrip("."))
            parents = key.split(".")[:-dots]
            target = ".".join([*parents, name.lstrip(".")])
        if target in self._open:
            chain = " -> ".join([*self._open[self._open.index(target) :], target])
            raise _Unresolved(f"refers to itself: {chain}; write the value out")
        if target in self._reading.settings:
            self.resolve(target)
            return self._reading.settings[target].value
        row, own = self._table.find(target), self._table.find(key)
        if row is not None and row.key == target:
            return row.default
        if row is not None and (own is None or own.fate in ("auto", "no")):
            return None
        known = [*self._reading.settings, *(k for k in self._table.rows if not k.endswith("*"))]
        raise _Unresolved(f"${{{name}}} refers to an unknown key{did_you_mean(target, known)}")


def _span(text: str) -> tuple[int, int]:
    """Return the first interpolation of a text, with what is nested in it."""
    found = _OPEN.search(text)
    assert found is not None
    depth, position = 0, found.start()
    while position < len(text):
        if text.startswith("${", position):
            depth += 1
            position += 2
            continue
        if text[position] == "}":
            depth -= 1
            if not depth:
                return found.start(), position + 1
        position += 1
    raise _Unresolved(f"{text!r} has an interpolation without an end; close it with }}")


def _split(text: str) -> tuple[str, str, str]:
    """Split the arguments of a resolver at the first comma that is not nested."""
    depth = 0
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            return text[:position].strip(), ",", text[position + 1 :].strip()
    return text.strip(), "", ""
