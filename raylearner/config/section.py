"""Common parts of all sections: types of values, open unions by `kind`, and lookups in the schema."""

import importlib
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from raylearner.credentials import mask
from raylearner.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=FILE_NAME)]
"""A name of folders, actors and jobs, which occurs in addresses of web pages."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""A seed that every random number generator accepts."""
AutoFloat = NonNegativeFloat | Literal["auto"]
"""A number, or `auto`, which is resolved for the machines of a run."""


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    try:
        is_valid = bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:  # the port is not a number
        is_valid = False
    if parts.scheme not in ("http", "https") or not is_valid:
        raise ValueError(f"must be like http://host:port, got {mask(repr(value))}")
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
"""Address of a service."""


def number(value: float | Literal["auto"]) -> float:
    """Return the number, or 0 for `auto`."""
    return 0.0 if value == "auto" else value


class OneOrMore:
    """Marks a tuple of sections that accepts a single section.

    The loader converts those in files; this converts them in Python.
    """

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        many = handler(source)
        python = core_schema.no_info_before_validator_function(_listed, many)
        return core_schema.json_or_python_schema(json_schema=many, python_schema=python)


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, dict | BaseModel) else value  # pyright: ignore[reportUnknownVariableType]


ONE_OR_MORE = OneOrMore()


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, and values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


OPEN_KIND = "module:name"
"""The kind that is shown for user code in lists of kinds."""


def kind_tag(value: Any) -> str | None:
    """Return the tag of a member of an open union: its kind, or `OPEN_KIND` for user code."""
    is_mapping = isinstance(value, dict)
    kind: Any = value.get("kind") if is_mapping else getattr(value, "kind", None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(kind, str):
        return None
    return OPEN_KIND if ":" in kind else kind


def _two_parts(value: str) -> str:
    module, _, name = value.partition(":")
    if not module or not name or ":" in name:
        raise ValueError(f"must have the form {OPEN_KIND}")
    return value


Reference = Annotated[str, AfterValidator(_two_parts)]
"""`module:name`, which can be imported where the run starts and where its actors run."""


def load_reference(path: str) -> Callable[..., Any]:
    """Return the callable at `module:name`. Raises `ConfigError` with the cause, without a key."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{path!r} cannot be imported: {type(error).__name__}: {reason}; modules are searched in"
            " the working directory and on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(f"{path!r} is not callable")
    return cast(Callable[..., Any], found)


KeyPath = tuple[str | int, ...]


def section_types(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return section_types(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [model for part in get_args(annotation) for model in section_types(part)]
    return [annotation] if _is_section(annotation) else []


def sections_by_kind(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return sections by the `kind` that selects them; those without one are left out.

    The section for user code has `OPEN_KIND`.
    """
    found: dict[str, type[BaseModel]] = {}
    for model in section_types(annotation):
        field = model.model_fields.get("kind")
        if field is not None and get_origin(field.annotation) is Literal:
            found |= {str(kind): model for kind in get_args(field.annotation)}
        elif field is not None and field.annotation is str:
            found[OPEN_KIND] = model
    return found


def section_for(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the section class that a mapping selects; None if its kind is missing or unknown."""
    models = section_types(annotation)
    if len(models) == 1:
        return models[0]
    tag = kind_tag(value) if isinstance(value, dict) else None
    return None if tag is None else sections_by_kind(annotation).get(tag)


def item_type(annotation: Any) -> Any:
    """Return the annotation of the items of a list, tuple or mapping; None for any other type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return item_type(arguments[0])
    if origin in (Union, UnionType):
        parts = [part for part in arguments if part is not NoneType]
        return item_type(parts[0]) if len(parts) == 1 else None
    if origin in (list, tuple) and arguments:
        return arguments[0]
    return arguments[1] if origin is dict else None


def user_path(root: type[BaseModel], location: KeyPath) -> tuple[KeyPath, Any]:
    """Return the user's path for a pydantic location, and the annotation at its end.

    Pydantic puts the tag of a discriminated union into the location; the user wrote no such key.
    """
    annotation: Any = root
    path: KeyPath = ()
    for part in location:
        models = section_types(annotation)
        if len(models) > 1:
            annotation = sections_by_kind(annotation).get(str(part))
            continue
        if models and str(part) not in models[0].model_fields and _is_choice(annotation):
            annotation = models[
                0
            ]  # pydantic's tag of one of several types, of which one is a section
            continue
        if models:
            path = (*path, part)
            field = models[0].model_fields.get(str(part))
            annotation = field.annotation if field is not None else None
            continue
        inner = item_type(annotation)
        if inner is None:
            break
        path, annotation = (*path, part), inner
    return path, annotation


def _is_choice(annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_choice(arguments[0])
    return origin in (Union, UnionType) and len([a for a in arguments if a is not NoneType]) > 1


def dotted_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Return every key of the schema, including sections of every kind."""
    for name, field in root.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        for model in section_types(field.annotation):
            yield from dotted_keys(model, f"{key}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class HttpSection(Section):
    """Limits and retries of requests to a service."""

    timeout_s: PositiveFloat = 30.0
    """Maximum wait for one reply, connecting included."""
    retries: NaturalInt = 5
    """Number of further tries after a failed one."""
    retry_delay_s: PositiveFloat = 1.0
    """Wait before the first further try."""
    retry_backoff: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Factor by which the wait grows with each try."""
    max_concurrent: PositiveInt = 256
    """Maximum number of requests in flight per process; others wait."""
    max_reply_bytes: PositiveInt = 32 << 20
    """A longer reply is an error."""
