"""Policy losses over tokens: one signature for all kinds.

Legend: `T` packed tokens of a micro-batch, `R` its rows. Every loss takes `LossInputs` and
keyword options that are plain numbers, and returns values still to be aggregated plus metrics.
Masked tokens are replaced before any arithmetic, so nothing they hold (NaN included) reaches a
value or a gradient; log-ratios are clamped to plus or minus 20 before every `exp`.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from raylearner.learner.aggregation import AggregationMode, aggregate, aggregate_rows
from raylearner.learner.metric import Max, Mean, Metrics, Min
from raylearner.learner.rows import Rows, clamp_log_ratio, select


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a policy loss may look at. Only `logprobs` and `entropy` carry gradients."""

    logprobs: Tensor  # [T] current policy
    proximal_logprobs: Tensor  # [T] learner, start of step
    behavior_logprobs: Tensor  # [T] recorded by the engine
    advantages: Tensor  # [T]
    mask: Tensor  # [T] bool, trained tokens
    rows: Rows
    weights: Tensor | None = None  # [T] from corrections, 0 where rejected
    entropy: Tensor | None = None  # [T]
    rewards: Tensor | None = None  # [R]

    def selected(self) -> Self:
        """The same inputs with zeros at every token that does not train."""
        return replace(
            self,
            logprobs=select(self.logprobs, self.mask),
            proximal_logprobs=select(self.proximal_logprobs, self.mask).detach(),
            behavior_logprobs=select(self.behavior_logprobs, self.mask).detach(),
            advantages=select(self.advantages, self.mask).detach(),
            weights=None if self.weights is None else select(self.weights, self.mask).detach(),
            entropy=None if self.entropy is None else select(self.entropy, self.mask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Loss values of one micro-batch before aggregation, and what was measured on the way."""

    values: Tensor  # [T] or [R], as `level` says; 0 at masked tokens
    level: Literal["token", "row"]
    metrics: Metrics

    def aggregate(
        self,
        inputs: LossInputs,
        *,
        mode: AggregationMode,
        num_tokens: float,
        num_rows: float,
        scale: float | None = None,
        row_num_tokens: Tensor | None = None,  # [R]
        row_weights: Tensor | None = None,  # [R]
    ) -> Tensor:
        """This micro-batch's share of the batch loss; row losses always take the mean over rows."""
        if self.level == "row":
            return aggregate_rows(
                self.values, inputs.mask, inputs.rows, num_rows=num_rows, row_weights=row_weights
            )
        return aggregate(
            self.values,
            inputs.mask,
            inputs.rows,
            mode=mode,
            num_tokens=num_tokens,
            num_rows=num_rows,
            scale=scale,
            row_num_tokens=row_num_tokens,
        )


def weigh(values: Tensor, weights: Tensor | None) -> Tensor:
    """Loss times correction weight; a weight of 0 gives exactly 0."""
    if weights is None:
        return values
    return torch.where(weights != 0, values * weights, torch.zeros_like(values))


def kl_metrics(log_ratio: Tensor, mask: Tensor) -> Metrics:
    """KL(proximal || current) from `log_ratio = current - proximal [T]`: k1 and k3 means."""
    return {
        "approx_kl": Mean.of(-log_ratio, mask),
        "approx_kl_k3": Mean.of(log_ratio.exp() - 1 - log_ratio, mask),
    }


def ratio_metrics(
    ratio: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float, prefix: str = ""
) -> Metrics:
    """How often a ratio left `[low, high]` on the side where clipping stops the gradient."""
    is_low = (ratio < low) & (advantages < 0)
    is_high = (ratio > high) & (advantages > 0)
    return {
        f"{prefix}clip_fraction_low": Mean.of(is_low, mask),
        f"{prefix}clip_fraction_high": Mean.of(is_high, mask),
        f"{prefix}clip_fraction_region": Mean.of(is_low | is_high, mask),
        f"{prefix}ratio_max": Max.of(ratio, mask),
        f"{prefix}ratio_min": Min.of(ratio, mask),
    }


def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    delta: float | None = None,
) -> LossOutput:
    """max(-A R, -A clip(R, 1-clip_low, 1+clip_high)), R = current / proximal (1707.06347, eq. 7).

    clip_high > clip_low is DAPO's clip-higher (2503.14476). Where A < 0 the loss is at most
    -A * dual_clip (1912.09729, eq. 5; > 1). `delta` caps the unclipped ratio (two-sided clip of
    INTELLECT-2, 2505.07291; > 1 + clip_high). Weights from corrections multiply the loss.
    Token losses.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: want > 1 or None, got {dual_clip!r}")
    inputs = inputs.selected()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    unclipped = -advantages * (ratio if delta is None else ratio.clamp(max=delta))
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    values = torch.maximum(unclipped, clipped)
    metrics: Metrics = {
        "clip_fraction": Mean.of(clipped > unclipped, mask),
        **ratio_metrics(ratio, advantages, mask, low=1 - clip_low, high=1 + clip_high),
        **kl_metrics(log_ratio.detach(), mask),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        metrics["clip_fraction_dual"] = Mean.of((values > bound) & (advantages < 0), mask)
        values = torch.where(advantages < 0, torch.minimum(values, bound), values)
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    behavior_cap: float | None = 5.0,
    behavior_low: float | None = None,
    behavior_mode: Literal["filter", "cap"] = "filter",
    behavior_level: Literal["token", "geometric"] = "token",
) -> LossOutput:
    """PPO around the proximal policy, times proximal / behavior (AReaL 2505.24298, eq. 5).

    A weight outside `behavior_low..behavior_cap` is set to 0 (`filter`, as AReaL does) or clamped
    (`cap`); filtered tokens stay in the denominators. `geometric` takes one weight per row, the
    exponential of its mean log-ratio. Weights from corrections multiply as well: give only keep
    masks there, or the same ratio counts twice. Token losses.
    """
    chosen = inputs.selected()
    log_weight = chosen.proximal_logprobs - chosen.behavior_logprobs
    if behavior_level == "geometric":
        log_weight = inputs.rows.spread(inputs.rows.mean(log_weight, inputs.mask))
    weight = clamp_log_ratio(log_weight).exp()
    low = 0.0 if behavior_low is None else behavior_low
    high = torch.inf if behavior_cap is None else behavior_cap
    outside = (weight < low) | (weight > high)
    metrics: Metrics = {
        "behavior_weight": Mean.of(weight, inputs.mask),
        "behavior_weight_max": Max.of(weight, inputs.mask),
        "behavior_outside_fraction": Mean.of(outside, inputs.mask),
    }
    if behavior_mode == "filter":
        weight = torch.where(outside, 0.0, weight)
    else:
        weight = weight.clamp(low, high)
    weight = weigh(weight, chosen.weights)
    output = ppo(
        replace(inputs, weights=weight),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    return replace(output, metrics={**output.metrics, **metrics})
