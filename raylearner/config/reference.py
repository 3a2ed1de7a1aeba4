"""The schema as a document: every key with its type, default, meaning and effect."""

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raylearner.config import shape
from raylearner.config.schema import RunConfig
from raylearner.config.sweep import SweepSection

HEAD = """# Configuration

Made from the schema in `raylearner/config/` by `make docs`; `python -m raylearner check` validates
a configuration against it and prints what follows.

Files merge left to right, `key=value` overrides come last: `learner.learning_rate=2e-6`,
`environment.tools.0.max_results=3`, `learner.loss={kind: gspo}`. A mapping merges key by key, a list
or a section of another `kind` is replaced. A section marked *absent* is switched on by writing it.
"""


def markdown() -> str:
    """The whole of docs/configuration.md."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        parts += _section(f"`{name}`", name, field.annotation, level=2)
    parts.append(
        "## Sweep files\n\n`python -m raylearner sweep FILE`; examples are in `configs/sweeps/`.\n"
    )
    parts += _keys(SweepSection, "", level=3)
    return "\n".join(parts)


def _section(title: str, path: str, annotation: Any, *, level: int) -> Iterator[str]:
    """A heading and the keys of a section, or of each of its kinds."""
    yield f"{'#' * level} {title}\n"
    kinds = shape.kinds(annotation)
    models = list(dict.fromkeys(shape.sections(annotation)))
    if len(models) == 1 and not kinds:
        yield f"{_first_paragraph(models[0])}\n"
    for model in models:
        named = [kind for kind, of in kinds.items() if of is model]
        if named:
            kind = " or ".join(f"`{name}`" for name in named)
            yield f"**kind: {kind}** {_first_paragraph(model)}\n"
        yield from _keys(model, path, level=level + 1)


def _keys(model: type[BaseModel], path: str, *, level: int) -> Iterator[str]:
    fields = {n: f for n, f in model.model_fields.items() if n != "kind"}
    if fields:
        rows = [_row(name, field) for name, field in fields.items()]
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for name, field in fields.items():
        inner = _inner(field.annotation)
        if inner is not None:
            key = f"{path}.{name}" if path else name
            yield from _section(f"`{key}`", key, inner, level=min(level, 5))


def _inner(annotation: Any) -> Any:
    """What holds sections: the annotation itself, or the item of a list."""
    if shape.sections(annotation):
        return annotation
    item = shape.item(annotation)
    return item if item is not None and shape.sections(item) else None


def _row(name: str, field: FieldInfo) -> str:
    annotation = field.annotation
    if field.metadata:
        annotation = Annotated[annotation, *field.metadata]
    cells = (f"`{name}`", _type(annotation), _default(field), field.description or "")
    return (
        "| " + " | ".join(cell.replace("|", "&#124;").replace("\n", " ") for cell in cells) + " |"
    )


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "empty"
    default: Any = field.default
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "*absent*"
    if isinstance(default, BaseModel):
        said = default.model_dump(mode="json", exclude_unset=True)
        return f"`{json.dumps(said)}`" if said else "its defaults"
    if isinstance(default, tuple):
        plain: Any = [_plain(item) for item in default]  # pyright: ignore[reportUnknownVariableType]
        return f"`{json.dumps(plain)}`"
    return f"`{json.dumps(_plain(default))}`"


def _plain(value: Any) -> Any:
    is_section = isinstance(value, BaseModel)
    return value.model_dump(mode="json", exclude_unset=True) if is_section else value


_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "anything",
}
_BOUNDS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0]) + _bounds(arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if shape.sections(annotation):
        kinds = shape.kinds(annotation)
        return "section by kind" if kinds else "section"
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not NoneType)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type(arguments[1])}"
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))


def _bounds(metadata: tuple[Any, ...]) -> str:
    said: list[str] = []
    for item in metadata:
        parts: list[Any] = [item]
        if isinstance(item, FieldInfo):
            parts = item.metadata
        for part in parts:
            if isinstance(part, MinLen):
                said.append("not empty")
            for kind, sign in _BOUNDS.items():
                if isinstance(part, kind):
                    bound: Any = getattr(part, {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}[kind])
                    said.append(f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}")
    return f" {', '.join(said)}" if said else ""


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").strip().split("\n\n", maxsplit=1)[0].split())
