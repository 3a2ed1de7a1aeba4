"""Unions of sections by `kind` that stay open: a kind with a colon names something of the user's."""

import importlib
from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from raylearner.errors import ConfigError

OPEN_KIND = "module:name"
"""Stands in lists of kinds for all that a user may name."""


def kind_tag(value: Any) -> str | None:
    """The tag that chooses a member of an open union: its kind, or `OPEN_KIND` for the user's own."""
    is_mapping = isinstance(value, dict)
    kind: Any = value.get("kind") if is_mapping else getattr(value, "kind", None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(kind, str):
        return None
    return OPEN_KIND if ":" in kind else kind


def _two_parts(value: str) -> str:
    module, _, name = value.partition(":")
    if not module or not name or ":" in name:
        raise ValueError(f"must be written {OPEN_KIND}")
    return value


Reference = Annotated[str, AfterValidator(_two_parts)]
"""`module:name`, importable where the run is started and where its actors live."""


def load_reference(path: str) -> Callable[..., Any]:
    """The callable at `module:name`. Raises `ConfigError` with the cause, without naming a key."""
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything while it is imported
        said = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{path!r} cannot be imported: {type(error).__name__}: {said}; modules are looked for"
            " in the working directory and on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(f"{path!r} is not callable")
    return cast(Callable[..., Any], found)
