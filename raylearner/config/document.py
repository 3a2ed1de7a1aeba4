"""Read YAML 1.2 into a tree that keeps line numbers, and merge such trees.

ruamel.yaml parses. This module refuses with their lines: keys that occur twice, merge keys (`<<`), tags
beyond YAML's own, values that refer to themselves, and documents that are too deep or too large once
their aliases are expanded. Dates are text.
"""

import io
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from raylearner.config.problems import Problem, Where, shown

Scalar: TypeAlias = str | int | float | bool | None

NULL_WORDS = frozenset({"none", "nil", "null", "~"})
"""Spellings of null in other languages; YAML reads `None` as text."""
DEFAULTS = Where(rank=-1, line=0, label="default")


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place; entries of a mapping have the line of their key."""

    value: "Scalar | list[Node] | dict[str, Node]"
    where: Where
    is_lone: bool = False
    """Whether this is a list of one item that was written without the list."""
    is_bare: bool = False
    """Whether this is a scalar without quotes."""

    @classmethod
    def of(cls, value: Any, where: Where) -> "Node":
        """Return a tree whose parts all have one place."""
        if isinstance(value, dict):
            return cls({str(k): cls.of(v, where) for k, v in value.items()}, where)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(value, list | tuple):
            return cls([cls.of(item, where) for item in value], where)  # pyright: ignore[reportUnknownVariableType]
        return cls(value, where)

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, part: str | int) -> "Node | None":
        if isinstance(self.value, dict):
            return self.value.get(str(part))
        if isinstance(self.value, list) and isinstance(part, int) and part < len(self.value):
            return self.value[part]
        return None

    def place(self, path: "tuple[str | int, ...]") -> Where:
        """Return the place of `path`, or else of its nearest ancestor that was written."""
        where, node = self.where, self
        for part in path:
            child = node.child(part)
            if child is None:
                break
            node = child
            if node.where != DEFAULTS:
                where = node.where
        return where

    def key(self, path: "tuple[str | int, ...]") -> str:
        """Return the dotted key of `path` as it was written: a lone item has no position."""
        parts: list[str] = []
        node: Node | None = self
        for part in path:
            if node is None or not node.is_lone:
                parts.append(str(part))
            node = node.child(part) if node is not None else None
        return ".".join(parts)

    def with_value(self, path: "tuple[str | int, ...]", value: Scalar) -> "Node":
        """Return the tree with another scalar at an existing path."""
        if not path:
            return replace(self, value=value)
        head, rest = path[0], path[1:]
        if isinstance(self.value, dict):
            key = str(head)
            entries = self.value | {key: self.value[key].with_value(rest, value)}
            return replace(self, value=entries)
        assert isinstance(self.value, list)
        assert isinstance(head, int)
        items = list(self.value)
        items[head] = items[head].with_value(rest, value)
        return replace(self, value=items)


def merge(base: Node, overlay: Node) -> Node:
    """Merge mappings key by key, and replace lists, scalars and sections of another `kind`.

    An overlay mapping whose keys are all list positions, as in `functions.0.weight=2`, changes those items
    of a list.
    """
    old, new = base.value, overlay.value
    if isinstance(old, list) and isinstance(new, dict) and _are_positions(new, len(old)):
        items = list(old)
        for key, child in new.items():
            items[int(key)] = merge(items[int(key)], child)
        return Node(items, overlay.where)
    if not isinstance(old, dict) or not isinstance(new, dict) or _has_other_kind(old, new):
        return overlay
    entries = dict(old)
    for key, child in new.items():
        entries[key] = merge(entries[key], child) if key in entries else child
    return Node(entries, base.where if overlay.where == DEFAULTS else overlay.where)


def _are_positions(entries: dict[str, Node], size: int) -> bool:
    return bool(entries) and all(key.isdecimal() and int(key) < size for key in entries)


def _has_other_kind(old: dict[str, Node], new: dict[str, Node]) -> bool:
    return "kind" in old and "kind" in new and old["kind"].value != new["kind"].value


_TAG = "tag:yaml.org,2002:"
MAX_DEPTH = 50
"""Maximum depth of nested lists and mappings; the configuration's own is about a dozen."""
MAX_NODES = 100_000
"""Maximum number of values, each alias counted at its expanded size."""
_TEXT = ("str", "timestamp", "value")
"""Tags of plain scalars that are text here: ruamel.yaml also finds dates and `=`."""


def parse(text: str, where: Where) -> tuple[Node | None, list[Problem]]:
    """Return the tree of one document and its problems; the tree of an empty or broken one is None."""
    yaml = _yaml()
    reader = _Reader(where, yaml.constructor)
    try:
        root = yaml.compose(text)
        tree = None if root is None else reader.node(root, (), root.start_mark.line + 1)
    except MarkedYAMLError as error:
        details: Any = error
        mark = details.problem_mark or details.context_mark
        reason = str(details.problem or details.context or "cannot be read")
        if reason.startswith("but "):  # the end of a sentence that the context begins
            reason = f"{details.context} {reason}; split it into files, which merge left to right"
        elif "'\\t'" in reason:
            reason += "; indent with spaces"
        line = mark.line + 1 if mark is not None else 1
        return None, [Problem(_at(where, line), "", f"is not valid YAML: {reason}")]
    except YAMLError as error:
        reason = " ".join(str(error).split())
        return None, [Problem(where, "", f"is not valid YAML: {reason}")]
    except RecursionError:
        return None, [Problem(where, "", f"is nested deeper than {MAX_DEPTH} levels")]
    except _TooLarge:
        return None, [Problem(where, "", f"has more than {MAX_NODES:,} values, aliases expanded")]
    return tree, reader.problems


def dump(value: Any) -> str:
    """Return plain mappings, lists and scalars as YAML that `parse` reads back unchanged."""
    yaml = _yaml()
    yaml.allow_unicode, yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = (
        True,
        False,
        False,
    )
    yaml.representer.add_representer(str, _represent_text)
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def _yaml() -> Any:
    return YAML(typ="safe", pure=True)


def _represent_text(representer: Any, text: str) -> Any:
    """Quote spellings of null, which `null_words.ambiguous_words` would refuse."""
    style = "'" if text.lower() in NULL_WORDS else None
    return representer.represent_scalar(_TAG + "str", text, style=style)


def _at(where: Where, line: int) -> Where:
    if where.override:
        return where
    return Where(where.rank, line, where.label)


class _TooLarge(Exception):
    """Raised for a document with more values than a configuration could have."""


class _Reader:
    """Turns composed YAML nodes into a tree and collects its problems."""

    def __init__(self, where: Where, constructor: Any) -> None:
        self.where = where
        self.problems: list[Problem] = []
        self._constructor = constructor
        self._open: set[int] = set()
        self._num_nodes = 0

    def node(self, node: Any, path: tuple[str, ...], line: int) -> Node:
        where = _at(self.where, line)
        if id(node) in self._open:
            self._refuse(line, path, "refers to itself; write the value out")
            return Node(None, where)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise _TooLarge
        if len(path) > MAX_DEPTH:
            raise RecursionError
        self._open.add(id(node))
        try:
            if node.id == "mapping":
                return Node(self._mapping(node, path), where)
            if node.id == "sequence":
                items = enumerate(cast(list[Any], node.value))
                return Node(
                    [self.node(x, (*path, str(i)), x.start_mark.line + 1) for i, x in items], where
                )
            return Node(self._scalar(node, path), where, is_bare=node.style is None)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: Any, path: tuple[str, ...]) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                self._refuse(line, path, "merge keys (<<) are not supported; use an overlay file")
                continue
            if key_node.id != "scalar":
                self._refuse(line, path, "a key must be text, not a list or a mapping")
                continue
            key = str(key_node.value)
            if key_node.tag != _TAG + "str":
                self._refuse(line, path, f"a key must be text, got {key}; put it in quotes")
                continue
            if key in entries:
                first = entries[key].where
                place = f"first on line {first.line}" if first.line else "twice in one mapping"
                self._refuse(line, (*path, key), f"key occurs twice, {place}; keep one of them")
                continue
            entries[key] = self.node(value_node, (*path, key), line)
        return entries

    def _scalar(self, node: Any, path: tuple[str, ...]) -> Scalar:
        text, line = str(node.value), node.start_mark.line + 1
        tag = str(node.tag).removeprefix(_TAG)
        if tag in _TEXT:
            return text
        if tag not in ("null", "bool", "int", "float"):
            self._refuse(line, path, f"tag {str(node.tag)!r} is not supported; write a plain value")
            return None
        try:
            return self._constructor.construct_object(node)
        except (ValueError, KeyError, IndexError, YAMLError):
            self._refuse(line, path, f"{shown(text)} does not fit its tag {str(node.tag)!r}")
            return None

    def _refuse(self, line: int, path: tuple[str, ...], text: str) -> None:
        self.problems.append(Problem(_at(self.where, line), ".".join(path), text))
