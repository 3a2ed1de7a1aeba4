"""Spellings of null that YAML reads as text."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from raylearner.config.document import NULL_WORDS, Node
from raylearner.config.problems import Problem
from raylearner.config.section import KeyPath, item_type, section_for


def ambiguous_words(
    tree: Node, root: type[BaseModel], *, allows_lower_case: bool = False
) -> list[Problem]:
    """Return a problem for each spelling of null, such as `None`, that YAML reads as text.

    Where text may be null, such words are problems even in quotes; elsewhere quotes make them text.
    With `allows_lower_case`, `none` is a valid choice of that name.
    """
    return [
        Problem(tree.place(path), tree.key(path), text)
        for path, text in _ambiguous_in(tree, root, (), allows_lower_case)
    ]


def is_null_word(value: object) -> bool:
    """Return whether a value is a spelling of null."""
    return isinstance(value, str) and value.strip().lower() in NULL_WORDS


def admits_null(annotation: Any) -> bool:
    """Return whether null is valid."""
    return NoneType in _alternatives(annotation)


def _ambiguous_in(
    node: Node, annotation: Any, path: KeyPath, allows_lower_case: bool
) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(node.value, dict):
        model = section_for(annotation, node.plain())
        for key, child in node.value.items():
            if model is None:
                inner = Any if annotation is Any else item_type(annotation)
            else:
                field = model.model_fields.get(key)
                inner = field.annotation if field is not None else None
            yield from _ambiguous_in(child, inner, (*path, key), allows_lower_case)
    elif isinstance(node.value, list):
        inner = Any if annotation is Any else item_type(annotation)
        for index, child in enumerate(node.value):
            yield from _ambiguous_in(child, inner, (*path, index), allows_lower_case)
    elif isinstance(node.value, str):
        text = _ambiguity(node.value, node.is_bare, _alternatives(annotation), allows_lower_case)
        if text is not None:
            yield path, text


def _ambiguity(
    value: str, is_bare: bool, alternatives: frozenset[Any], allows_lower_case: bool
) -> str | None:
    if value in alternatives or not alternatives & {str, Any}:
        return None
    is_nullable_text = NoneType in alternatives and Any not in alternatives
    if is_null_word(value) and (is_nullable_text or is_bare):
        if allows_lower_case and value == value.lower():
            return None
        quoted = "" if is_nullable_text else ", or put it in quotes to use it as text"
        return f"{value!r} is text in YAML, not null; write null{quoted}"
    return None


def _alternatives(annotation: Any) -> frozenset[Any]:
    """Return the plain types and literal values of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return frozenset(found for part in get_args(annotation) for found in _alternatives(part))
    if origin is Literal:
        return frozenset(get_args(annotation))
    return frozenset({annotation})
