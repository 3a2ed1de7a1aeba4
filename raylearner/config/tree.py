"""What the user wrote as a tree that remembers its places, and how several trees become one."""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from raylearner.config.problems import Where

Scalar: TypeAlias = str | int | float | bool | None

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
