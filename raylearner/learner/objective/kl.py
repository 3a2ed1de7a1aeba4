"""KL to the reference policy: its section, estimators per token, in the reward or as a loss, and
controllers of the coefficient.

Legend: `T` packed tokens, `R` rows. All estimate KL(policy || reference) from tokens that the
policy sampled, in nats.
"""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)
from raylearner.learner.batch.metric import Mean, Metrics
from raylearner.learner.batch.rows import Rows, clamp_log_ratio, select
from raylearner.learner.lazy_torch import Tensor

MAX_CONTROLLER_ERROR = 0.2
"""Bound of the relative error that an adaptive coefficient follows."""


class FrozenReference(Section):
    """The initial policy, or another model, for the whole run."""

    kind: Literal["frozen"]
    path: str | None = None
    """Checkpoint directory or hub id. Default: the initial policy."""


class RefreshedReference(Section):
    """Moved toward the policy at intervals (TRL's sync_ref_model, 2404.09656)."""

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
    """Target KL per token, in nats."""
    horizon: PositiveFloat = 10000.0
    """Episodes over which a deviation is corrected."""


ControllerSection = Annotated[FixedCoefficient | AdaptiveCoefficient, Field(discriminator="kind")]


class KlSection(Section):
    """KL penalty toward a reference policy."""

    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or subtracted from the reward: of each token, or of the episode if the
    advantage is per episode.
    """
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """With d = log current - log reference: d, d^2 / 2, e^-d - 1 + d, |d|."""
    value_limit: PositiveFloat | None = 10.0
    """Bound of a token's k3; null for none, as in TRL."""
    straight_through: bool = False
    """Keep the value, take the gradient of k2, whose expectation is that of the KL. In the loss only."""
    weighted: bool = False
    """Multiply by the ratio current/proximal, which unbiases it off-policy (2512.02556). In the loss only."""
    coefficient: NonNegativeFloat = 1e-3
    """Coefficient; with 0 no reference is loaded."""
    controller: ControllerSection = FixedCoefficient(kind="fixed")
    """Schedule of the coefficient."""
    reference: ReferenceSection | None = None
    """Reference policy; required if the coefficient is above 0."""


def kl_estimate(
    logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    config: KlSection,
) -> Tensor:
    """Return the KL per token `[T]` (joschu.net/blog/kl-approx; k3 also 2402.03300, eq. 4).

    `straight_through` keeps the value and takes the gradient of k2, which is d: the gradient whose
    expectation is that of the KL itself ("k1+" and "k3+" of verl). The gradient of k3 is 0 where its
    log-ratio or its value is clamped.
    """
    difference = logprobs - reference_logprobs.detach()
    match config.estimator:
        case "k1":
            value = difference
        case "k2":
            value = difference.square() / 2
        case "abs":
            value = difference.abs()
        case "k3":
            negated = clamp_log_ratio(-difference)
            value = negated.exp() - 1 - negated
            if config.value_limit is not None:
                value = value.clamp(max=config.value_limit)
    if config.straight_through:
        surrogate = difference.square() / 2
        return value.detach() + surrogate - surrogate.detach()
    return value


def kl_loss(
    logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    config: KlSection,
    *,
    proximal_logprobs: Tensor,  # [T]
) -> tuple[Tensor, Metrics]:
    """Return KL values to aggregate and scale by a coefficient, 0 off the mask: `[T]`.

    With `weighted` each value is multiplied by the ratio current / proximal, gradient through it.
    """
    logprobs = select(logprobs, mask)
    values = kl_estimate(logprobs, select(reference_logprobs, mask), config)
    if config.weighted:
        log_ratio = logprobs - select(proximal_logprobs, mask).detach()
        values = values * clamp_log_ratio(log_ratio).exp()
    values = select(values, mask)
    return values, {"kl": Mean.of(values, mask)}


def kl_in_reward(
    proximal_logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    config: KlSection,
) -> tuple[Tensor, Metrics]:
    """Return the KL of each token, to be subtracted from its reward times a coefficient: `[T]`, 0
    off the mask (1909.08593, eq. 2).

    The metric `reward_kl` is the mean over rows of their mean KL per token, which an adaptive
    controller follows.
    """
    proximal = select(proximal_logprobs.detach(), mask)
    kl = select(kl_estimate(proximal, select(reference_logprobs, mask), config), mask)
    return kl, {"reward_kl": Mean.of(rows.mean(kl, mask), rows.count(mask) > 0)}


class KlController:
    """Owns the KL coefficient, and adapts it if it is adaptive (1909.08593, section 2.2)."""

    def __init__(self, config: KlSection | None) -> None:
        self.coefficient = 0.0 if config is None else config.coefficient
        adaptive = None if config is None else config.controller
        self._adaptive = adaptive if isinstance(adaptive, AdaptiveCoefficient) else None

    @property
    def is_adaptive(self) -> bool:
        return self._adaptive is not None

    def update(self, kl: float, num_samples: int) -> None:
        """Multiply by 1 + clip(kl / target - 1, ±0.2) * num_samples / horizon.

        `kl` is the mean KL per token (nats) of a step of `num_samples` rows.
        """
        if self._adaptive is not None:
            error = kl / self._adaptive.target - 1
            error = min(max(error, -MAX_CONTROLLER_ERROR), MAX_CONTROLLER_ERROR)
            self.coefficient *= 1 + error * num_samples / self._adaptive.horizon
