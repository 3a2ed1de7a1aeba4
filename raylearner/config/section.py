"""What all sections of the configuration share."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=FILE_NAME)]
"""A name that folders, actors and jobs bear, and so the addresses of their pages."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What every generator of random numbers takes."""
AutoFloat = NonNegativeFloat | Literal["auto"]
"""A number, or what follows from the machines that a run finds itself on."""


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    try:
        is_whole = bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # a port that is no number
        is_whole = False
    if parts.scheme not in ("http", "https") or not is_whole:
        raise ValueError(f"must be like http://host:port, got {value!r}")
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
"""Where a service answers."""


def number(value: float | Literal["auto"]) -> float:
    """The number; 0 for what is not resolved yet."""
    return 0.0 if value == "auto" else value


class OneOrMore:
    """Marks a tuple of sections for which a single section may be written.

    Files are read strictly as JSON, where the loader has made the list already.
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
    """What all sections share: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
