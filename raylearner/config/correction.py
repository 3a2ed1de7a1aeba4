"""Corrections for tokens that an older or slightly different policy sampled.

All look at the ratio proximal/behavior, or current/behavior where `learner.proximal` is `behavior`.
"""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import NonNegativeFloat, PositiveFloat, Section

Level = Literal["token", "sequence", "geometric"]


class _Weights(Section):
    normalize: Literal["none", "token", "row"] = "none"
    """Divide the weights by their mean over the batch's trained tokens, or over its rows."""


class Tis(_Weights):
    """Truncated importance sampling (fengyao.notion.site/off-policy-rl)."""

    kind: Literal["tis"]
    level: Level = "token"
    """Ratio of the token, of the whole row, or of the row's geometric mean."""
    low: NonNegativeFloat | None = None
    """Smallest weight; None for no bound."""
    high: PositiveFloat | None = 2.0
    """Largest weight; None for plain importance sampling."""


class Icepop(_Weights):
    """Weights outside the bounds are 0 (2510.18855)."""

    kind: Literal["icepop"]
    level: Level = "token"
    """Ratio of the token, of the whole row, or of the row's geometric mean."""
    low: NonNegativeFloat | None = 0.5
    """Tokens of smaller ratio are rejected; None for no bound."""
    high: PositiveFloat = 5.0
    """Tokens of larger ratio are rejected."""


class Mis(_Weights):
    """Masked importance sampling: rows of too large a ratio are rejected, others weighed."""

    kind: Literal["mis"]
    level: Level = "sequence"
    """Ratio of the token, of the whole row, or of the row's geometric mean."""
    low: NonNegativeFloat | None = None
    """Smaller ratios are rejected; None for no bound."""
    high: PositiveFloat = 2.0
    """Larger ratios are rejected."""


class Rejection(Section):
    """Tokens or rows outside the bounds are rejected, all others weigh 1 (richardli.xyz/rl-collapse)."""

    kind: Literal["rejection"]
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Of what the statistic is taken: a token, or the sum, mean or maximum over a row."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The log-ratio l, l^2 / 2, or e^l - 1 - l."""
    low: PositiveFloat | None = None
    """k1: smallest ratio, 1/high by default. k2 and k3 have no lower bound."""
    high: PositiveFloat = 2.0
    """k1: largest ratio. k2 and k3: largest statistic, in nats."""


class Geometric(Section):
    """Rows are rejected by the geometric mean of their ratios (richardli.xyz/rl-collapse)."""

    kind: Literal["geometric"]
    low: PositiveFloat | None = None
    """Smallest ratio; 1/high by default."""
    high: PositiveFloat = 1.001
    """Largest ratio."""


class Opsm(Section):
    """Off-policy sequence mask: stale rows of negative advantage are dropped (2512.02556)."""

    kind: Literal["opsm"]
    threshold: NonNegativeFloat = 0.5
    """Most drift from the behavior policy that such a row may have, in nats per token."""


class Veto(Section):
    """A row is dropped for one token with a ratio below the threshold (slime)."""

    kind: Literal["veto"]
    threshold: PositiveFloat = 1e-4
    """Smallest ratio."""


class M2po(Section):
    """Second-moment trust region (2510.01161): tokens that would move further from the behavior policy are rejected above a bound on the squared log-ratio, which the batch's second moment sets."""

    kind: Literal["m2po"]
    threshold: PositiveFloat = 0.04
    """Largest mean of the squared log-ratios, each capped at the bound, over the tokens that would move further away: those with a ratio above 1 and a positive advantage, or below 1 and a negative one."""


CorrectionSection = Annotated[
    Tis | Icepop | Mis | Rejection | Geometric | Opsm | Veto | M2po, Field(discriminator="kind")
]

WEIGHING = frozenset({"tis", "icepop", "mis"})
"""Kinds that weigh tokens by the ratio; the others only reject."""
