"""What all sections of the configuration share."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
AutoFloat = NonNegativeFloat | Literal["auto"]
"""A number, or what follows from the machines that a run finds itself on."""


def number(value: float | Literal["auto"]) -> float:
    """The number; 0 for what is not resolved yet."""
    return 0.0 if value == "auto" else value


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
