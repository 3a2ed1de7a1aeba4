"""Inputs and outputs of policy losses, and the metrics that losses share.

Legend: `T` packed tokens of a micro-batch, `R` its rows. Masked tokens are replaced before any
arithmetic, so none of their values (NaN included) reaches a loss or a gradient.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from raylearner.config.section import PositiveFloat, Section
from raylearner.learner.batch.metric import Max, Mean, Metric, Metrics, Min
from raylearner.learner.batch.rows import Rows, clamp_log_ratio, select
from raylearner.learner.lazy_torch import Tensor, torch

AboveOne = Annotated[float, Field(gt=1, allow_inf_nan=False)]


class Loss(Section):
    """Section of a policy loss; its formula is a function of `LossInputs` and the section."""

    weighs_by_behavior: ClassVar[bool] = False
    """Whether the loss weighs tokens by learner against behavior probability itself."""
    uses_proximal: ClassVar[bool] = True
    """Whether the gradient depends on the proximal policy."""
    selects_tokens: ClassVar[bool] = False
    """Whether tokens are selected among all tokens of an update (`LossInputs.selected_tokens`)."""

    @property
    def is_row_loss(self) -> bool:
        """Whether values are per row; row losses are always aggregated by their mean over rows."""
        return False


class ClippedLoss(Loss):
    """Section of a loss whose ratio is clipped."""

    clip_low: PositiveFloat = 0.2
    """The ratio current/proximal is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a policy loss. Only `logprobs` and `entropy` carry gradients."""

    logprobs: Tensor  # [T] current policy
    proximal_logprobs: Tensor  # [T] learner, start of step
    behavior_logprobs: Tensor  # [T] recorded by the engine
    advantages: Tensor  # [T]
    mask: Tensor  # [T] bool, trained tokens
    rows: Rows
    rewards: Tensor  # [R]
    ratio_mask: Tensor | None = None
    """Tokens `[T]` bool that a row's ratio to the behavior policy is made of, where rejected ones have
    left the mask; None for those of the mask."""
    weights: Tensor | None = None  # [T] from corrections, 0 where rejected
    entropy: Tensor | None = None  # [T]
    selected_tokens: Tensor | None = None  # [T] bool, of losses that select tokens

    def without_masked(self) -> Self:
        """Return the same inputs with zeros at every token that does not train."""
        return replace(
            self,
            logprobs=select(self.logprobs, self.mask),
            proximal_logprobs=select(self.proximal_logprobs, self.mask).detach(),
            behavior_logprobs=select(self.behavior_logprobs, self.mask).detach(),
            advantages=select(self.advantages, self.mask).detach(),
            weights=None if self.weights is None else select(self.weights, self.mask).detach(),
            entropy=None if self.entropy is None else select(self.entropy, self.mask),
        )

    def behavior_ratio(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-ratio of `logprobs [T]` to the behavior policy, detached, and its tokens."""
        mask = self.mask if self.ratio_mask is None else self.ratio_mask
        return select((logprobs - self.behavior_logprobs).detach(), mask), mask

    def row_advantages(self) -> Tensor:
        """Return each row's mean advantage: `[R]`."""
        return self.rows.mean(self.advantages, self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Loss values of one micro-batch before aggregation, and metrics."""

    values: Tensor  # [T] or [R], by `level`; 0 at masked tokens
    level: Literal["token", "row"] = "token"
    metrics: Metrics = field(default_factory=dict[str, Metric])


def weigh(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return loss times correction weight; a weight of 0 gives exactly 0."""
    if weights is None:
        return values
    return torch.where(weights != 0, values * weights, torch.zeros_like(values))


def row_weights(inputs: LossInputs, *, kind: Literal["mean", "geometric"]) -> Tensor | None:
    """Return one correction weight per row from those of its tokens: `[R]`.

    `geometric` adds 1e-10 inside the logarithm, so a rejected token weighs its row down heavily.
    """
    if inputs.weights is None:
        return None
    if kind == "mean":
        return inputs.rows.mean(inputs.weights, inputs.mask)
    return inputs.rows.mean((inputs.weights + 1e-10).log(), inputs.mask).exp()


def kl_metrics(log_ratio: Tensor, mask: Tensor) -> Metrics:
    """Return KL(proximal || current) from `log_ratio = current - proximal [T]`: k1, k3 and |k1| means.

    Only k3, which has an `exp`, clamps its input.
    """
    log_ratio = log_ratio.detach()
    bounded = clamp_log_ratio(log_ratio)
    return {
        "approx_kl": Mean.of(-log_ratio, mask),
        "approx_kl_k3": Mean.of(bounded.exp() - 1 - bounded, mask),
        "approx_kl_abs": Mean.of(log_ratio.abs(), mask),
    }


def ratio_metrics(
    ratio: Tensor,  # [N] tokens or rows
    advantages: Tensor,  # [N]
    mask: Tensor,  # [N] bool
    *,
    low: float,
    high: float,
    rows: Rows | None = None,
    prefix: str = "",
) -> Metrics:
    """Return the fractions of ratios outside `[low, high]` where clipping stops the gradient.

    `..._low_min` and `..._high_max` are of the rows that were clipped least and most.
    """
    ratio = ratio.detach()
    is_low = mask & (ratio < low) & (advantages < 0)
    is_high = mask & (ratio > high) & (advantages > 0)
    row_low, row_high, row_mask = is_low.double(), is_high.double(), mask
    if rows is not None:
        row_low, row_high = rows.mean(row_low, mask), rows.mean(row_high, mask)
        row_mask = rows.count(mask) > 0
    return {
        f"{prefix}clip_fraction_low": Mean.of(is_low, mask),
        f"{prefix}clip_fraction_low_min": Min.of(row_low, row_mask),
        f"{prefix}clip_fraction_high": Mean.of(is_high, mask),
        f"{prefix}clip_fraction_high_max": Max.of(row_high, row_mask),
        f"{prefix}clip_fraction_region": Mean.of(is_low | is_high, mask),
        f"{prefix}ratio_max": Max.of(ratio, mask),
        f"{prefix}ratio_min": Min.of(ratio, mask),
    }
