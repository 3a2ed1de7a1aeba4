"""Policy losses and how they become one number: one section per loss.

A section's fields are the options of the function of the same kind in `learner.losses`.
"""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    Section,
)

AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]


class _Clipped(Section):
    clip_low: PositiveFloat = 0.2
    """The ratio current/proximal is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""


class Ppo(_Clipped):
    """Clipped ratio per token (1707.06347); clip_high 0.28 is DAPO's (2503.14476)."""

    kind: Literal["ppo"]
    dual_clip: AboveOne | None = 3.0
    """Most that a negative advantage is multiplied by (1912.09729); None for off."""
    delta: AboveOne | None = None
    """Caps the unclipped ratio (2505.07291); above 1 + clip_high, None for off."""


class DecoupledPpo(_Clipped):
    """PPO around the proximal policy times proximal/behavior (2505.24298)."""

    kind: Literal["decoupled_ppo"]
    dual_clip: AboveOne | None = None
    """Most that a negative advantage is multiplied by; None for off."""
    behavior_cap: PositiveFloat | None = 2.0
    """Largest weight proximal/behavior; AReaL takes 5."""
    behavior_low: PositiveFloat | None = None
    """Smallest weight; None for no bound."""
    behavior_mode: Literal["cap", "filter"] = "cap"
    """Weights outside the bounds are clamped, or set to 0 as AReaL does."""
    behavior_level: Literal["token", "geometric"] = "token"
    """One weight per token, or per row from its mean log-ratio."""


class SequenceRatio(_Clipped):
    """Clipped product of a row's ratios, as in TRL's RLOO (2402.14740). A loss by row."""

    kind: Literal["sequence_ratio"]


class Gspo(Section):
    """Clipped geometric mean of a row's ratios (2507.18071)."""

    kind: Literal["gspo"]
    clip_low: PositiveFloat = 3e-4
    """Lower clip range."""
    clip_high: PositiveFloat = 4e-4
    """Upper clip range."""
    form: Literal["token", "sequence"] = "token"
    """Token losses, for sequence_mean_of_means; or losses by row."""
    max_log_ratio: PositiveFloat = 10.0
    """The log-ratio is clamped here."""


class Gmpo(Section):
    """Geometric mean of ratios clipped in log space (2507.20673). A loss by row."""

    kind: Literal["gmpo"]
    clip_low: PositiveFloat = 0.4
    """Log-ratios are clipped below -clip_low."""
    clip_high: PositiveFloat = 0.4
    """Log-ratios are clipped above clip_high."""


class Cispo(Section):
    """Policy gradient weighed by a clipped, detached ratio (2506.13585, 2510.13786)."""

    kind: Literal["cispo"]
    ratio_min: NonNegativeFloat = 0.0
    """Smallest ratio."""
    ratio_max: PositiveFloat = 5.0
    """Largest ratio, itself and not its distance from 1."""


class Sapo(Section):
    """A smooth gate in the place of a clip (2511.20347); for sequence_mean_of_means."""

    kind: Literal["sapo"]
    tau_positive: PositiveFloat = 1.0
    """Sharpness for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Sharpness for negative ones."""


class DppoTv(Section):
    """Trust region of total variation (2602.04879)."""

    kind: Literal["dppo_tv"]
    divergence_low: PositiveFloat = 0.15
    """A probability may fall by so much."""
    divergence_high: PositiveFloat = 0.15
    """A probability may rise by so much."""
    ratio_cap: PositiveFloat = 20.0
    """Largest ratio."""


class DppoKl(Section):
    """Trust region of binary KL (2602.04879)."""

    kind: Literal["dppo_kl"]
    divergence_low: PositiveFloat = 0.05
    """Bound for negative advantages, in nats."""
    divergence_high: PositiveFloat = 0.05
    """Bound for positive advantages, in nats."""
    ratio_cap: PositiveFloat = 20.0
    """Largest ratio."""


class Dro(Section):
    """Squared regression instead of a ratio (Kimi k1.5, 2501.12599)."""

    kind: Literal["dro"]
    beta: PositiveFloat = 0.05
    """Weight of the squared log-ratio."""
    form: Literal["token", "sequence"] = "token"
    """Log-ratios per token, or summed over the row as Kimi writes it (a loss by row)."""


class Gppo(_Clipped):
    """PPO whose clipped tokens keep a gradient (2508.07629)."""

    kind: Literal["gppo"]


class Topr(Section):
    """Bad rows tapered by their ratio current/behavior, good ones not (2503.14286)."""

    kind: Literal["topr"]
    level: Literal["token", "sequence"] = "sequence"
    """Ratio of the token, or of the whole row as in the paper."""
    ratio_cap: PositiveFloat = 1.0
    """Largest ratio."""


class ClipCov(_Clipped):
    """PPO without a random few of the tokens of high covariance (2505.22617)."""

    kind: Literal["clip_cov"]
    drop_ratio: Fraction = 0.0002
    """Share of the update's tokens that get no gradient; one at least."""
    covariance_low: float = 1.0
    """Candidates have a covariance of advantage and log-probability above this,"""
    covariance_high: float = 5.0
    """and below this."""


class KlCov(Section):
    """A penalty on the tokens of highest covariance (2505.22617)."""

    kind: Literal["kl_cov"]
    top_ratio: Fraction = 0.0002
    """Share of the update's tokens that are penalized; one at least."""
    kl_coefficient: NonNegativeFloat = 1.0
    """Weight of the penalty |log-ratio|."""


class Gpg(Section):
    """The plain policy gradient (2504.02546)."""

    kind: Literal["gpg"]


class Reinforce(Section):
    """Policy gradient weighed by the truncated ratio current/behavior (2505.24034)."""

    kind: Literal["reinforce"]
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or of the whole row."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Ratios outside the bounds are clamped, or set to 0."""
    ratio_low: NonNegativeFloat | None = None
    """Smallest ratio; None for no bound."""
    ratio_cap: PositiveFloat | None = 2.0
    """Largest ratio; None for no bound."""


class Vespo(Section):
    """Policy gradient weighed by a smooth function of the row's ratio (2602.10693)."""

    kind: Literal["vespo"]
    k_positive: PositiveFloat = 2.0
    """Exponent for positive advantages."""
    lambda_positive: PositiveFloat = 3.0
    """Decay for positive advantages."""
    k_negative: PositiveFloat = 3.0
    """Exponent for negative advantages."""
    lambda_negative: PositiveFloat = 2.0
    """Decay for negative advantages."""


class Luspo(Section):
    """GSPO without its bias toward short rows (2602.05261). A loss by row."""

    kind: Literal["luspo"]
    clip_low: PositiveFloat = 2e-3
    """Lower clip range."""
    clip_high: PositiveFloat = 2.5e-3
    """Upper clip range."""


LossSection = Annotated[
    Ppo
    | DecoupledPpo
    | SequenceRatio
    | Gspo
    | Gmpo
    | Cispo
    | Sapo
    | DppoTv
    | DppoKl
    | Dro
    | Gppo
    | Topr
    | ClipCov
    | KlCov
    | Gpg
    | Reinforce
    | Vespo
    | Luspo,
    Field(discriminator="kind"),
]

BEHAVIOR_WEIGHTED = frozenset({"decoupled_ppo", "reinforce", "topr"})
"""Kinds that weigh tokens by learner against behavior probability themselves."""

WITHOUT_PROXIMAL = frozenset({"gpg", "reinforce", "topr"})
"""Kinds whose gradient does not look at the proximal policy."""

SELECTS_TOKENS = frozenset({"clip_cov", "kl_cov"})
"""Kinds that choose among all tokens of an update."""

Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_of_sums",
    "sequence_mean_of_means",
    "sequence_mean_of_sums_scaled",
]
