"""Questions to the schema: which section class a value belongs to, which keys and kinds exist."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from raylearner.config.kind import OPEN_KIND, kind_tag

Path = tuple[str | int, ...]


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that an annotation admits, `None` and metadata left out."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return sections(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [model for part in get_args(annotation) for model in sections(part)]
    return [annotation] if _is_section(annotation) else []


def kinds(annotation: Any) -> dict[str, type[BaseModel]]:
    """Sections by the `kind` that chooses them; those without one are left out.

    The section for what the user names has `OPEN_KIND`.
    """
    found: dict[str, type[BaseModel]] = {}
    for model in sections(annotation):
        field = model.model_fields.get("kind")
        if field is not None and get_origin(field.annotation) is Literal:
            found |= {str(kind): model for kind in get_args(field.annotation)}
        elif field is not None and field.annotation is str:
            found[OPEN_KIND] = model
    return found


def section_for(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The section class that a mapping is meant for; None while its kind is missing or unknown."""
    models = sections(annotation)
    if len(models) == 1:
        return models[0]
    tag = kind_tag(value) if isinstance(value, dict) else None
    return None if tag is None else kinds(annotation).get(tag)


def item(annotation: Any) -> Any:
    """What a list, tuple or mapping holds; None where it holds nothing with a shape."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return item(arguments[0])
    if origin in (Union, UnionType):
        parts = [part for part in arguments if part is not NoneType]
        return item(parts[0]) if len(parts) == 1 else None
    if origin in (list, tuple) and arguments:
        return arguments[0]
    return arguments[1] if origin is dict else None


def user_path(root: type[BaseModel], location: Path) -> tuple[Path, Any]:
    """The user's path behind a pydantic location, and the annotation at its end.

    Pydantic puts the tag of a discriminated union into the location; the user wrote no such key.
    """
    annotation: Any = root
    path: Path = ()
    for part in location:
        models = sections(annotation)
        if len(models) > 1:
            annotation = kinds(annotation).get(str(part))
            continue
        if models:
            path = (*path, part)
            field = models[0].model_fields.get(str(part))
            annotation = field.annotation if field is not None else None
            continue
        inner = item(annotation)
        if inner is None:
            break
        path, annotation = (*path, part), inner
    return path, annotation


def dotted_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the schema, sections of every kind included."""
    for name, field in root.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        for model in sections(field.annotation):
            yield from dotted_keys(model, f"{key}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
