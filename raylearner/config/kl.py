"""KL to a reference policy."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)


class FrozenReference(Section):
    """The initial policy, or another model, for the whole run."""

    kind: Literal["frozen"]
    path: str | None = None
    """Checkpoint directory or hub id. Default: the initial policy."""


class RefreshedReference(Section):
    """Moved toward the policy now and then (TRL's sync_ref_model, 2404.09656)."""

    kind: Literal["refreshed"]
    every_steps: PositiveInt = 512
    """Policy versions between two refreshes."""
    mix: Fraction = 0.6
    """Share of the policy in the new reference; 1 copies it."""


class AdapterOffReference(Section):
    """The policy without its LoRA adapter."""

    kind: Literal["adapter_off"]


ReferenceSection = Annotated[
    FrozenReference | RefreshedReference | AdapterOffReference, Field(discriminator="kind")
]


class FixedCoefficient(Section):
    """The coefficient never changes."""

    kind: Literal["fixed"]


class AdaptiveCoefficient(Section):
    """The coefficient follows a target (1909.08593, section 2.2)."""

    kind: Literal["adaptive"]
    target: PositiveFloat = 0.1
    """KL per token to hold, in nats."""
    horizon: PositiveFloat = 10000.0
    """Episodes over which a deviation works out."""


ControllerSection = Annotated[FixedCoefficient | AdaptiveCoefficient, Field(discriminator="kind")]


class KlSection(Section):
    """A pull toward a reference policy."""

    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken from the reward: of each token, or of the episode where the advantage is one per episode."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """With d = log current - log reference: d, d^2 / 2, e^-d - 1 + d, |d|."""
    straight_through: bool = False
    """Keep the value, take the gradient of k2, whose expectation is that of the KL. In the loss only."""
    weighted: bool = False
    """Multiply by the ratio current/proximal, which unbiases it off-policy (2512.02556). In the loss only."""
    value_limit: PositiveFloat | None = 10.0
    """Bound of a token's k3; None for none, as in TRL."""
    coefficient: NonNegativeFloat = 1e-3
    """Weight; with 0 no reference is loaded."""
    controller: ControllerSection = FixedCoefficient(kind="fixed")
    """How the coefficient changes."""
    reference: ReferenceSection | None = None
    """What the policy is pulled to; required where the coefficient is above 0."""
