"""Importance weights of tokens sampled by an older or slightly different policy.

Legend: `T` packed tokens, `R` rows. `log_ratio = proximal - behavior` throughout (with the behavior
policy as proximal, current - behavior). Weights carry no gradient. A rejected token has weight 0 and
stays in every denominator unless `learner.count_rejected` is false. Metrics of rows leave out
those without a trained token.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from raylearner.config.section import NonNegativeFloat, PositiveFloat, Section
from raylearner.learner.batch.metric import (
    EffectiveFraction,
    LogQuantile,
    Max,
    Mean,
    Metrics,
    Min,
    Std,
)
from raylearner.learner.batch.rows import Rows, clamp_log_ratio, select
from raylearner.learner.lazy_torch import Tensor, torch

Level = Literal["token", "sequence", "geometric"]


class CorrectionRule(Section):
    """Section of a correction; its formula is a function of `CorrectionInputs` and the section."""

    weighs: ClassVar[bool] = False
    """Whether the correction weighs tokens by the ratio; the others only reject."""
    uses_advantages: ClassVar[bool] = False
    """Whether the advantages of a step must be computed first."""
    uses_batch_value: ClassVar[bool] = False
    """Whether `CorrectionInputs.batch_value` is a bound found over the whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """Inputs of a correction, without gradients."""

    log_ratio: Tensor  # [T] proximal - behavior
    mask: Tensor  # [T] bool, trained tokens
    rows: Rows
    advantages: Tensor  # [T]
    batch_value: float | None = None
    """Number of the whole batch that the section needs: the divisor of weights, or a bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Per-token weights (0 where rejected), which tokens were kept, and metrics."""

    weights: Tensor  # [T], 0 off the mask
    keep: Tensor  # [T] bool, False off the mask
    metrics: Metrics


class ImportanceWeights(CorrectionRule):
    """Tokens are weighed by their ratio. `tis` truncates it (fengyao.notion.site/off-policy-rl), `icepop` (2510.18855) and `mis` set weights outside the bounds to 0."""

    kind: Literal["tis", "icepop", "mis"]
    weighs: ClassVar[bool] = True
    level: Level = "token"
    """Ratio of the token, of the whole row (default of `mis`), or of the row's geometric mean."""
    low: NonNegativeFloat | None = None
    """Minimum ratio; None for no bound. Default of `icepop`: 0.5."""
    high: PositiveFloat | None = 2.0
    """Maximum ratio; None for no bound. Default of `icepop`: 5."""
    normalize: Literal["none", "token", "row"] = "none"
    """Divide the weights by their mean over the batch's trained tokens, or over its rows."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults_of_kind(cls, value: Any) -> Any:
        return {**_DEFAULTS.get(value.get("kind"), {}), **value} if type(value) is dict else value  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]


_DEFAULTS: dict[Any, dict[str, Any]] = {
    "icepop": {"low": 0.5, "high": 5.0},
    "mis": {"level": "sequence"},
}


def weigh_by_ratio(inputs: CorrectionInputs, config: ImportanceWeights) -> Correction:
    """Weights of the configured level and bounds, divided by `batch_value` where normalized."""
    correction = importance_weights(
        inputs.log_ratio,
        inputs.mask,
        inputs.rows,
        level=config.level,
        mode="truncate" if config.kind == "tis" else "mask",
        low=config.low,
        high=config.high,
    )
    if inputs.batch_value is None:
        return correction
    return normalize_weights(correction, inputs.batch_value)


def importance_weights(
    log_ratio: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    level: Level,
    mode: Literal["truncate", "mask"],
    low: float | None,
    high: float | None,
) -> Correction:
    """exp(log_ratio) per token, or of its sum (`sequence`) or mean (`geometric`) over the row.

    `truncate` clamps to `low..high`, `mask` sets weights outside to 0. `importance_ratio/...` metrics
    are before, `importance_weight/...` after; `fraction_low` counts against 1/high where `low` is
    None.
    """
    log_ratio = select(log_ratio.detach(), mask)
    if level == "sequence":
        log_ratio = rows.spread(rows.sum(log_ratio))
    elif level == "geometric":
        log_ratio = rows.spread(rows.mean(log_ratio, mask))
    raw = select(clamp_log_ratio(log_ratio).exp(), mask)
    lowest = 0.0 if low is None else low
    highest = math.inf if high is None else high
    keep = mask
    if mode == "truncate":
        weights = select(raw.clamp(lowest, highest), mask)
    else:
        keep = mask & (raw >= lowest) & (raw <= highest)
        weights = select(raw, keep)

    reported_low = 1 / highest if low is None else low
    filled = rows.count(mask) > 0  # [R]
    row_raw, row_weight = rows.mean(raw, mask), rows.mean(weights, mask)  # [R]
    ratio, ratio_mask = (raw, mask) if level == "token" else (row_raw, filled)
    metrics: Metrics = {
        "importance_weight/mean": Mean.of(weights, mask),
        "importance_weight/std": Std.of(weights, mask),
        "importance_weight/max": Max.of(weights, mask),
        "importance_weight/min": Min.of(weights, mask),
        "importance_weight/ess": EffectiveFraction.of(weights, mask),
        "importance_weight/rejected_fraction": Mean.of(~keep, mask),
        "importance_weight/row_mean": Mean.of(row_weight, filled),
        "importance_weight/row_std": Std.of(row_weight, filled, ddof=1),
        "importance_weight/row_max": Max.of(row_weight, filled),
        "importance_weight/row_min": Min.of(row_weight, filled),
        "importance_weight/row_deviation_max": Max.of((row_weight - 1).abs(), filled),
        "importance_ratio/max": Max.of(ratio, ratio_mask),
        "importance_ratio/min": Min.of(ratio, ratio_mask),
        "importance_ratio/fraction_high": Mean.of(ratio > highest, ratio_mask),
        "importance_ratio/fraction_low": Mean.of(ratio < reported_low, ratio_mask),
        "importance_ratio/row_fraction_high": Mean.of(row_raw > highest, filled),
        "importance_ratio/row_fraction_low": Mean.of(row_raw < reported_low, filled),
        "importance_ratio/p01": LogQuantile.of(log_ratio, mask, quantile=0.01),
        "importance_ratio/p50": LogQuantile.of(log_ratio, mask, quantile=0.5),
        "importance_ratio/p99": LogQuantile.of(log_ratio, mask, quantile=0.99),
    }
    return Correction(weights=weights, keep=keep, metrics=metrics)


def weight_mean(
    weights: Tensor, mask: Tensor, rows: Rows, *, level: Literal["token", "row"]
) -> Mean:
    """Return the mean that `normalize_weights` divides by, combinable over micro-batches and ranks.

    Over trained tokens, or over the row means of rows that have any.
    """
    if level == "token":
        return Mean.of(weights, mask)
    return Mean.of(rows.mean(weights, mask), rows.count(mask) > 0)


def normalize_weights(correction: Correction, mean: float) -> Correction:
    """Divide weights by their batch mean, unless that is 1e-8 or less."""
    factor = mean if mean > 1e-8 else 1.0
    norm = Mean.of(torch.full_like(correction.weights[:1], factor))
    metrics: Metrics = {**correction.metrics, "importance_weight/batch_mean": norm}
    return replace(correction, weights=correction.weights / factor, metrics=metrics)


def log_ratios(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return proximal - behavior `[T]`, detached; 0 off the mask and where behavior is not finite."""
    known = mask & behavior_logprobs.isfinite()
    return select((proximal_logprobs - behavior_logprobs).detach(), known)


def interpolated_proximal(
    logprobs: Tensor,  # [T]
    behavior_logprobs: Tensor,  # [T]
    token_versions: Tensor,  # [T] int64
    *,
    policy_version: int,
) -> Tensor:
    """Estimate the proximal policy from the current one instead of recomputing it: `[T]`, detached.

    mu + alpha (pi - mu), alpha = clip((v - 1 - v_token) / (v - v_token), 0, 1) with v the version
    being trained: the policy one step ago lies that far along the line from the one that sampled
    (AReaL's "loglinear"). Where v_token >= v, and where nothing was sampled (version -1), the result
    is the behavior policy.
    """
    age = (policy_version - token_versions).to(logprobs.dtype)
    is_older = (age > 0) & (token_versions >= 0)
    alpha = torch.where(is_older, ((age - 1) / age.clamp(min=1)).clamp(0, 1), 0.0)
    line = behavior_logprobs + alpha * (logprobs.detach() - behavior_logprobs)
    return torch.where(alpha > 0, line, behavior_logprobs)
