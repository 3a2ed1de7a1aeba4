"""KL to the reference policy: estimators per token, in the reward or as a loss, and controllers.

Legend: `T` packed tokens, `R` rows. All estimate KL(policy || reference) from tokens that the
policy sampled, in nats.
"""

from typing import Literal

from torch import Tensor

from raylearner.learner.batch.metric import Mean, Metrics
from raylearner.learner.batch.rows import LOG_RATIO_LIMIT, Rows, select

KLKind = Literal["k1", "k2", "k3", "abs"]
"""Schulman's estimators of d = logprobs - reference: d, d^2/2, e^-d - 1 + d, and |d|."""


def kl_estimate(
    logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    *,
    kind: KLKind = "k3",
    straight_through: bool = False,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
    value_limit: float | None = 10.0,
) -> Tensor:
    """KL per token `[T]` (joschu.net/blog/kl-approx; k3 also 2402.03300, eq. 4).

    `straight_through` keeps the value and takes the gradient of k2, which is d: the gradient whose
    expectation is that of the KL itself ("k1+" and "k3+" of verl). k3 clamps its log-ratio to
    `log_ratio_limit` and its value to `value_limit` (None: not at all, as in TRL); the gradient is 0
    where a clamp acts.
    """
    difference = logprobs - reference_logprobs.detach()
    if kind == "k1":
        value = difference
    elif kind == "k2":
        value = difference.square() / 2
    elif kind == "abs":
        value = difference.abs()
    elif kind == "k3":
        negated = (-difference).clamp(-log_ratio_limit, log_ratio_limit)
        value = negated.exp() - 1 - negated
        if value_limit is not None:
            value = value.clamp(-value_limit, value_limit)
    else:
        raise ValueError(f"kind: want k1, k2, k3 or abs, got {kind!r}")
    if straight_through:
        surrogate = difference.square() / 2
        return value.detach() + surrogate - surrogate.detach()
    return value


def kl_loss(
    logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    *,
    kind: KLKind = "k3",
    straight_through: bool = False,
    value_limit: float | None = 10.0,
    proximal_logprobs: Tensor | None = None,  # [T]
) -> tuple[Tensor, Metrics]:
    """KL values still to be aggregated and scaled by a coefficient, 0 off the mask: `[T]`.

    With `proximal_logprobs` each value is multiplied by the ratio current / proximal, gradient
    through it, which makes the estimate unbiased off-policy (DeepSeek-V3.2, 2512.02556).
    """
    logprobs = select(logprobs, mask)
    reference = select(reference_logprobs, mask)
    values = kl_estimate(
        logprobs,
        reference,
        kind=kind,
        straight_through=straight_through,
        value_limit=value_limit,
    )
    if proximal_logprobs is not None:
        log_ratio = logprobs - select(proximal_logprobs, mask).detach()
        values = values * log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    values = select(values, mask)
    return values, {"kl": Mean.of(values, mask)}


def kl_in_reward(
    rewards: Tensor,  # [T]
    proximal_logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    coefficient: float,
    kind: KLKind = "k1",
    value_limit: float | None = 10.0,
    count_empty_rows: bool = False,
) -> tuple[Tensor, Metrics]:
    """Token rewards minus coefficient * KL on the mask (1909.08593, eq. 2): `[T]`.

    The metric `reward_kl` is the mean over rows of their mean KL per token, what an adaptive
    controller follows. `count_empty_rows` lets rows without a trained token count as 0, as verl does.
    """
    proximal = select(proximal_logprobs.detach(), mask)
    reference = select(reference_logprobs, mask)
    kl = select(kl_estimate(proximal, reference, kind=kind, value_limit=value_limit), mask)
    counted = None if count_empty_rows else rows.count(mask) > 0
    metrics: Metrics = {"reward_kl": Mean.of(rows.mean(kl, mask), counted)}
    return rewards - coefficient * kl, metrics


def sequence_kl_penalty(
    proximal_logprobs: Tensor,  # [T]
    reference_logprobs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    coefficient: float,
) -> Tensor:
    """coefficient times the k1 KL summed over each row, to subtract from its reward: `[R]`.

    The form of TRL's RLOO trainer (2402.14740); give it to `advantages.rloo(kl_penalty=...)`.
    """
    return coefficient * rows.sum((proximal_logprobs - reference_logprobs).detach(), mask)


class FixedController:
    """A KL coefficient that never changes."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """Take no notice."""

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]


class AdaptiveController(FixedController):
    """A KL coefficient that follows a target (1909.08593, section 2.2).

    Each update multiplies it by 1 + clip(kl / target - 1, -limit, limit) * num_samples / horizon.
    """

    def __init__(
        self, coefficient: float, *, target: float = 0.1, horizon: float = 10000, limit: float = 0.2
    ) -> None:
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target and horizon: want > 0, got {target!r} and {horizon!r}")
        super().__init__(coefficient)
        self.target, self.horizon, self.limit = target, horizon, limit

    def update(self, kl: float, num_samples: int) -> None:
        """Move by the mean KL per token (nats) of a step of `num_samples` rows."""
        error = min(max(kl / self.target - 1, -self.limit), self.limit)
        self.coefficient *= 1 + error * num_samples / self.horizon
