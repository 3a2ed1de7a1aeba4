"""What is wrong with a value, in the user's words."""

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from raylearner.config.document import Node
from raylearner.config.null_words import admits_null, is_null_word
from raylearner.config.problems import did_you_mean, shown
from raylearner.config.section import (
    FILE_NAME,
    KeyPath,
    dotted_keys,
    item_type,
    kind_tag,
    section_for,
    sections_by_kind,
)


def other_file(keys: Collection[str], *, is_run: bool) -> str:
    """Return what a file with these top-level keys is instead of a run's configuration, or a sweep; else
    nothing.
    """
    is_sweep = {"base", "axes"} <= set(keys)
    if is_run and is_sweep:
        return "is a sweep file: run it with `raylearner sweep FILE`"
    if is_run and "actor_rollout_ref" in keys:
        return "is a configuration of verl: translate it with `raylearner convert FILE`"
    if not is_run and not is_sweep and not {"model", "data", "actors", "learner"}.isdisjoint(keys):
        return "is the configuration of a run, not a sweep file; a sweep file names it in `base`"
    return ""


def describe(
    detail: ErrorDetails, path: KeyPath, annotation: Any, tree: Node, root: type[BaseModel]
) -> str:
    """Return what an error of pydantic means for the value at `path`."""
    value: Any = detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, tree, root)
        case "missing":
            return _missing(path, annotation)
        case "union_tag_invalid":
            found, choices = context["tag"], list(sections_by_kind(annotation))
            return f"unknown kind {found!r}; must be one of {_listed(choices)}{did_you_mean(found, choices)}"
        case "union_tag_not_found":
            return f"required, but missing; must be one of {_listed(sections_by_kind(annotation))}"
        case "literal_error":
            expected = str(context["expected"])
            choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
            one_of = "must be" if len(choices) == 1 else "must be one of"
            return f"{one_of} {expected}, got {shown(value)}{did_you_mean(value, choices)}"
        case "greater_than_equal":
            return f"must be >= {_bound(context['ge'])}, got {shown(value)}"
        case "greater_than":
            return f"must be > {_bound(context['gt'])}, got {shown(value)}"
        case "less_than_equal":
            return f"must be <= {_bound(context['le'])}, got {shown(value)}"
        case "less_than":
            return f"must be < {_bound(context['lt'])}, got {shown(value)}"
        case "too_short":
            return f"must have at least {context['min_length']}, got {shown(value)}"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch" if context["pattern"] in _PATTERNS:
            return f"{_PATTERNS[context['pattern']]}, got {shown(value)}"
        case "value_error":
            message = str(context["error"])
            has_value = isinstance(detail["input"], dict) or ", got " in message
            return message if has_value else f"{message}, got {shown(value)}"
        case kind if kind in _EXPECTED:
            advice = _advice(kind, value, admits_null(annotation))
            return f"must be {_EXPECTED[kind]}, got {shown(value)}{advice}"
        case _:
            expected = detail["msg"].removeprefix("Input should be ")
            return f"must be {expected}, got {shown(value)}"


def _advice(kind: str, value: object, is_nullable: bool) -> str:
    if kind == "string_type" and _is_number(value):
        return "; put it in quotes"
    if kind == "model_type" and _is_switch(value, "on"):
        return "; write {} for its defaults"
    if kind == "model_type" and is_nullable and (is_null_word(value) or _is_switch(value, "off")):
        return "; write null to switch it off"
    if is_null_word(value) and is_nullable:
        return "; write null for no value"
    return ""


_SWITCHES = {"on": {"true", "on", "yes"}, "off": {"false", "off", "no"}}


def _is_switch(value: object, state: str) -> bool:
    return str(value).lower() in _SWITCHES[state]


def _bound(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


_PATTERNS = {
    FILE_NAME: "must be a name of letters, digits, '.', '_' and '-' that does not begin with '.' or '-'"
}

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section",
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _listed(choices: Any) -> str:
    return ", ".join(repr(choice) for choice in choices)


def _missing(path: KeyPath, annotation: Any) -> str:
    if isinstance(path[-1], int):
        return "required, but the list is shorter"
    options = list(sections_by_kind(annotation))
    return "required, but missing" + (f"; a section of kind {_listed(options)}" if options else "")


def _unknown_key(path: KeyPath, tree: Node, root: type[BaseModel]) -> str:
    """Suggest the nearest key of the section, or else the section that has this key."""
    node: Node = tree
    annotation: Any = root
    for part in path[:-1]:
        model = section_for(annotation, node.plain())
        annotation = model.model_fields[str(part)].annotation if model else item_type(annotation)
        child = node.child(part)
        assert child is not None
        node = child
    model = section_for(annotation, node.plain())
    assert model is not None, path
    name, valid = str(path[-1]), list(model.model_fields)
    if near := did_you_mean(name, valid):
        return f"unknown key{near}"
    elsewhere = [key for key in dotted_keys(root) if key.rsplit(".", 1)[-1] == name]
    if tree.key(path) in elsewhere:
        kind = kind_tag(node.plain())
        return f"unknown key for kind {kind!r}; another kind has it; valid keys: {', '.join(valid)}"
    if elsewhere:
        return f"unknown key; did you mean {min(elsewhere, key=lambda key: key.count('.'))!r}?"
    return f"unknown key; valid keys: {', '.join(valid)}"
