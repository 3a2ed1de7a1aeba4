"""Words that YAML reads as text and people mean as nothing.

`None` is text in YAML. Where a key takes text, or anything, it would be taken silently.
"""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from raylearner.config import shape
from raylearner.config.problems import Problem
from raylearner.config.tree import Node

NULL_WORDS = frozenset({"none", "nil", "null", "~"})


def ambiguous_words(
    tree: Node, root: type[BaseModel], *, allows_lower_case: bool = False
) -> list[Problem]:
    """A problem for each of these words that stands where text or anything may stand.

    Text that may be null is never such a word for null, in quotes or not; elsewhere quotes say that
    the word itself is meant. With `allows_lower_case`, `none` counts as a choice of that name.
    """
    return [
        Problem(tree.place(path), tree.key(path), text)
        for path, text in _problems(tree, root, (), allows_lower_case)
    ]


def is_null_word(value: object) -> bool:
    """Whether text is a word for nothing."""
    return isinstance(value, str) and value.strip().lower() in NULL_WORDS


def admits_null(annotation: Any) -> bool:
    """Whether null may stand there."""
    return NoneType in _alternatives(annotation)


def _problems(
    node: Node, annotation: Any, path: shape.Path, allows_lower_case: bool
) -> Iterator[tuple[shape.Path, str]]:
    if isinstance(node.value, dict):
        model = shape.section_for(annotation, node.plain())
        for key, child in node.value.items():
            if model is None:
                inner = Any if annotation is Any else shape.item(annotation)
            else:
                field = model.model_fields.get(key)
                inner = field.annotation if field is not None else None
            yield from _problems(child, inner, (*path, key), allows_lower_case)
    elif isinstance(node.value, list):
        inner = Any if annotation is Any else shape.item(annotation)
        for index, child in enumerate(node.value):
            yield from _problems(child, inner, (*path, index), allows_lower_case)
    elif isinstance(node.value, str):
        text = _problem(node.value, node.is_bare, _alternatives(annotation), allows_lower_case)
        if text is not None:
            yield path, text


def _problem(
    value: str, is_bare: bool, alternatives: frozenset[Any], allows_lower_case: bool
) -> str | None:
    if value in alternatives or not alternatives & {str, Any}:
        return None
    is_nullable_text = NoneType in alternatives and Any not in alternatives
    if is_null_word(value) and (is_nullable_text or is_bare):
        if allows_lower_case and value == value.lower():
            return None
        quoted = "" if is_nullable_text else ", or put it in quotes for the word itself"
        return f"{value!r} is a word in YAML, not null; write null{quoted}"
    return None


def _alternatives(annotation: Any) -> frozenset[Any]:
    """Plain types and literal values that an annotation admits."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return frozenset(found for part in get_args(annotation) for found in _alternatives(part))
    if origin is Literal:
        return frozenset(get_args(annotation))
    return frozenset({annotation})
