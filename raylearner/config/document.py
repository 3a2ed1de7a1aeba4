"""YAML text to a tree with line numbers, by YAML 1.2's rules for plain scalars.

What differs from PyYAML's own reading: `1e-6` is a number, `yes`, `on` and dates are text, `010`
is ten. Underscores between digits are allowed (`1_000`). Keys that occur twice, merge keys (`<<`)
and tags beyond YAML's own are problems, not values.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias, cast

import yaml

from raylearner.config.problems import Problem, Where, shown

Scalar: TypeAlias = str | int | float | bool | None

NULL_WORDS = frozenset({"none", "nil", "null", "~"})
"""Words that people write for no value; YAML reads `None` as text."""
DEFAULTS = Where(rank=-1, line=0, label="default")


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it was written; a mapping's entries have the line of their key."""

    value: "Scalar | list[Node] | dict[str, Node]"
    where: Where
    is_lone: bool = False
    """A list of one whose item was written without a list around it."""
    is_bare: bool = False
    """A scalar that was written without quotes."""

    @classmethod
    def of(cls, value: Any, where: Where) -> "Node":
        """A tree whose parts are all in one place."""
        if isinstance(value, dict):
            return cls({str(k): cls.of(v, where) for k, v in value.items()}, where)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(value, list | tuple):
            return cls([cls.of(item, where) for item in value], where)  # pyright: ignore[reportUnknownVariableType]
        return cls(value, where)

    def plain(self) -> Any:
        """The bare value."""
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
        """Where `path` was written, or else its nearest written ancestor."""
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
        """The dotted key of `path` as it was written: a lone item has no position."""
        parts: list[str] = []
        node: Node | None = self
        for part in path:
            if node is None or not node.is_lone:
                parts.append(str(part))
            node = node.child(part) if node is not None else None
        return ".".join(parts)

    def with_value(self, path: "tuple[str | int, ...]", value: Scalar) -> "Node":
        """The same tree with another scalar at an existing path."""
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
    """Mappings merge key by key; lists, scalars and sections of another `kind` are replaced.

    An overlay mapping whose keys are all list positions, as `functions.0.weight=2` gives, changes
    those entries of a list.
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


_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.(?:[0-9]+(?:_[0-9]+)*)?)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
MAX_DEPTH = 50
"""Of lists and mappings in each other; the configuration's own are a dozen deep at most."""
_PLAIN: dict[str, str] = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": _INT.pattern,
    "float": _FLOAT.pattern,
    "merge": r"<<",
}


class Loader(yaml.SafeLoader):
    """Composes nodes; values are constructed here, never by PyYAML."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


class Dumper(yaml.SafeDumper):
    """Quotes what `Loader` would not read back as text."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


for _kind, _pattern in _PLAIN.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), None)  # pyright: ignore[reportUnknownMemberType]
_words = "|".join(re.escape(word) for word in sorted(NULL_WORDS))
Dumper.add_implicit_resolver(_TAG + "word", re.compile(rf"^(?i:{_words})$"), None)  # pyright: ignore[reportUnknownMemberType]


def parse(text: str, where: Where) -> tuple[Node | None, list[Problem]]:
    """The tree of one document, None where it is empty or broken, and what is wrong with it."""
    reader = _Reader(where)
    try:
        root = cast(yaml.Node | None, yaml.compose(text, Loader=Loader))  # pyright: ignore[reportUnknownMemberType]
        tree = root and reader.node(root, (), root.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        said = error.problem or error.context or "cannot be read"
        if said.startswith("but "):  # the end of a sentence that the context begins
            said = f"{error.context} {said}; make files of them, merged left to right"
        elif "'\\t'" in said:
            said += "; indent with spaces"
        return None, [Problem(_at(where, line), "", f"is not valid YAML: {said}")]
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        return None, [Problem(where, "", f"is not valid YAML: {said}")]
    except RecursionError:
        return None, [Problem(where, "", f"is nested deeper than {MAX_DEPTH} levels")]
    return tree, reader.problems


def _at(where: Where, line: int) -> Where:
    if where.override:
        return where
    return Where(where.rank, line, where.label)


class _Reader:
    """Turns composed YAML nodes into a tree and collects what it refuses."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.problems: list[Problem] = []
        self._open: set[int] = set()

    def node(self, node: yaml.Node, path: tuple[str, ...], line: int) -> Node:
        where = _at(self.where, line)
        if id(node) in self._open:
            self._refuse(line, path, "refers to itself; write the value out")
            return Node(None, where)
        if len(path) > MAX_DEPTH:
            raise RecursionError
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Node(self._mapping(node, path), where)
            if isinstance(node, yaml.SequenceNode):
                items = enumerate(node.value)
                return Node(
                    [self.node(x, (*path, str(i)), x.start_mark.line + 1) for i, x in items], where
                )
            assert isinstance(node, yaml.ScalarNode)
            return Node(self._scalar(node, path), where, is_bare=node.style is None)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _TAG + "merge":
                self._refuse(line, path, "merge keys (<<) are not read; use an overlay file")
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(line, path, "a key must be text, not a list or a mapping")
                continue
            key = str(key_node.value)
            if key_node.tag != _TAG + "str":
                self._refuse(line, path, f"a key must be text, got {key}; put it in quotes")
                continue
            if key in entries:
                first = entries[key].where
                seen = f"first on line {first.line}" if first.line else "twice in one mapping"
                self._refuse(line, (*path, key), f"key occurs twice, {seen}; keep one of them")
                continue
            entries[key] = self.node(value_node, (*path, key), line)
        return entries

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> Scalar:
        text = str(node.value)
        construct = _CONSTRUCT.get(node.tag.removeprefix(_TAG))
        line = node.start_mark.line + 1
        if construct is None:
            self._refuse(line, path, f"tag {node.tag!r} is not read; write a plain value")
            return None
        try:
            return construct(text)
        except ValueError:
            self._refuse(line, path, f"{shown(text)} does not fit its tag {node.tag!r}")
            return None

    def _refuse(self, line: int, path: tuple[str, ...], text: str) -> None:
        self.problems.append(Problem(_at(self.where, line), ".".join(path), text))


def _integer(text: str) -> int:
    for prefix, base in (("0o", 8), ("0x", 16)):
        if text.startswith(prefix):
            return int(text[2:], base)
    return int(text)


def _number(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_CONSTRUCT: dict[str, Callable[[str], Scalar]] = {
    "null": lambda text: None,
    "bool": _boolean,
    "int": _integer,
    "float": _number,
    "str": str,
}
