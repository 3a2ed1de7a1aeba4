"""Corrections for tokens that an older or slightly different policy sampled.

Legend: `T` packed tokens, `R` rows. `log_ratio = proximal - behavior` throughout (with the
behavior policy as proximal, current - behavior). Weights carry no gradient. A rejected token has
weight 0 and stays in every denominator; whoever wants it out of them narrows the train mask by
`keep` before counting. `count_empty_rows` makes statistics over rows count those without a trained
token (ratio 1, weight 0), as verl and TRL do; they are left out otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Per-token weights (0 where rejected), which tokens were kept, and what was measured."""

    weights: Tensor  # [T], 0 off the mask
    keep: Tensor  # [T] bool, False off the mask
    metrics: Metrics


def log_ratios(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """proximal - behavior `[T]`, detached; 0 off the mask and where behavior is not finite."""
    known = mask & behavior_logprobs.isfinite()
    return select((proximal_logprobs - behavior_logprobs).detach(), known)


def interpolated_proximal(
    logprobs: Tensor,  # [T]
    behavior_logprobs: Tensor,  # [T]
    token_versions: Tensor,  # [T] int64
    *,
    policy_version: int,
    space: Literal["log", "probability"] = "log",
) -> Tensor:
    """The proximal policy guessed from the current one instead of recomputed: `[T]`, detached.

    mu + alpha (pi - mu), alpha = clip((v - 1 - v_token) / (v - v_token), 0, 1) with v the version
    being trained: the policy one step ago lies that far along the line from the one that sampled
    (AReaL's "loglinear"; `probability` interpolates the probabilities). Where v_token >= v, and where
    nothing was sampled (version -1), the result is the behavior policy.
    """
    age = (policy_version - token_versions).to(logprobs.dtype)
    is_older = (age > 0) & (token_versions >= 0)
    alpha = torch.where(is_older, ((age - 1) / age.clamp(min=1)).clamp(0, 1), 0.0)
    current = logprobs.detach()
    if space == "log":
        line = behavior_logprobs + alpha * (current - behavior_logprobs)
    elif space == "probability":
        line = ((1 - alpha) * behavior_logprobs.exp() + alpha * current.exp()).log()
    else:
        raise ValueError(f"space: want log or probability, got {space!r}")
    return torch.where(alpha > 0, line, behavior_logprobs)


def importance_weights(
    log_ratio: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    count_empty_rows: bool = False,
) -> Correction:
    """exp(log_ratio) per token, or of its sum (`sequence`) or mean (`geometric`) over the row.

    `truncate` clamps to `low..high`: truncated importance sampling (TIS, fengyao.notion.site/
    off-policy-rl), cap 2. `mask` sets weights outside to 0: IcePop (2510.18855; 0.5..5) and masked
    importance sampling (MIS). `importance_ratio/...` metrics are before, `importance_weight/...`
    after; `fraction_low` counts against 1/high where `low` is None. Raises ValueError for an unknown
    level or mode, and for bounds that hold nothing.
    """
    if high is not None and (high <= 0 or (low is not None and low > high)):
        raise ValueError(f"high: want > 0 and >= low, got {high!r} with low {low!r}")
    log_ratio = select(log_ratio.detach(), mask)
    if level == "sequence":
        log_ratio = rows.spread(rows.sum(log_ratio))
    elif level == "geometric":
        log_ratio = rows.spread(rows.mean(log_ratio, mask))
    elif level != "token":
        raise ValueError(f"level: want token, sequence or geometric, got {level!r}")
    raw = select(clamp_log_ratio(log_ratio).exp(), mask)
    lowest = 0.0 if low is None else low
    highest = math.inf if high is None else high
    keep = mask
    if mode == "truncate":
        weights = select(raw.clamp(lowest, highest), mask)
    elif mode == "mask":
        keep = mask & (raw >= lowest) & (raw <= highest)
        weights = select(raw, keep)
    else:
        raise ValueError(f"mode: want truncate or mask, got {mode!r}")

    reported_low = 1 / highest if low is None else low
    row_raw = rows.mean(raw, mask)  # [R]
    counted = torch.ones_like(row_raw, dtype=torch.bool)
    if not count_empty_rows:
        counted = rows.count(mask) > 0
    ratio, ratio_mask = raw, mask
    if level != "token":
        ratio = torch.where(rows.count(mask) > 0, row_raw, 1.0)
        ratio_mask = counted
    row_weight = rows.mean(weights, mask)
    metrics: Metrics = {
        "importance_weight/mean": Mean.of(weights, mask),
        "importance_weight/std": Std.of(weights, mask),
        "importance_weight/max": Max.of(weights, mask),
        "importance_weight/min": Min.of(weights, mask),
        "importance_weight/ess": EffectiveFraction.of(weights, mask),
        "importance_weight/rejected_fraction": Mean.of(~keep, mask),
        "importance_weight/row_mean": Mean.of(row_weight, counted),
        "importance_weight/row_std": Std.of(row_weight, counted, ddof=1),
        "importance_weight/row_max": Max.of(row_weight, counted),
        "importance_weight/row_min": Min.of(row_weight, counted),
        "importance_weight/row_deviation_max": Max.of((row_weight - 1).abs(), counted),
        "importance_ratio/max": Max.of(ratio, ratio_mask),
        "importance_ratio/min": Min.of(ratio, ratio_mask),
        "importance_ratio/fraction_high": Mean.of(ratio > highest, ratio_mask),
        "importance_ratio/fraction_low": Mean.of(ratio < reported_low, ratio_mask),
        "importance_ratio/row_fraction_high": Mean.of(row_raw > highest, counted),
        "importance_ratio/row_fraction_low": Mean.of(row_raw < reported_low, counted),
        "importance_ratio/p01": LogQuantile.of(log_ratio, mask, quantile=0.01),
        "importance_ratio/p50": LogQuantile.of(log_ratio, mask, quantile=0.5),
        "importance_ratio/p99": LogQuantile.of(log_ratio, mask, quantile=0.99),
    }
    return Correction(weights=weights, keep=keep, metrics=metrics)


def weight_mean(
    weights: Tensor, mask: Tensor, rows: Rows, *, level: Literal["token", "row"] = "token"
) -> Mean:
    """The mean that `normalize_weights` divides by, combinable over micro-batches and ranks.

    Over trained tokens, or over the row means of rows that have any.
    """
    if level == "token":
        return Mean.of(weights, mask)
    return Mean.of(rows.mean(weights, mask), rows.count(mask) > 0)


def normalize_weights(correction: Correction, mean: float) -> Correction:
    """Weights divided by their batch mean, untouched where that is not above 1e-8."""
    factor = mean if mean > 1e-8 else 1.0
    norm = Mean.of(correction.weights.new_tensor([factor]))
    metrics: Metrics = {**correction.metrics, "importance_weight/batch_mean": norm}
    return replace(correction, weights=correction.weights / factor, metrics=metrics)


def rejection_mask(
    log_ratio: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token",
    estimator: Literal["k1", "k2", "k3"] = "k1",
    low: float | None = None,
    high: float,
    k1_bounds: Literal["ratio", "inverse"] = "ratio",
    count_empty_rows: bool = False,
) -> Correction:
    """Keep tokens, or whole rows, whose divergence from the behavior policy is within bounds.

    The statistic per token is k1 = l (log-ratio), k2 = l^2 / 2 or k3 = e^l - 1 - l; rows take its
    sum, mean or maximum. k1 is bounded in ratios: `low..high` on proximal / behavior (of the row's
    product for the sum, of its geometric mean for the mean), `low` being 1/high when None. k2 and k3
    have only `high`. `k1_bounds="inverse"` applies the bounds to behavior / proximal, as verl does.
    sequence_sum k1 is sequence MIS, sequence_mean k1 geometric rejection (Geo-RS), after
    richardli.xyz/rl-collapse. Raises ValueError for k1 with sequence_max and bounds that are not.
    """
    is_ratio = estimator == "k1"
    if is_ratio and level == "sequence_max":
        raise ValueError("estimator: k1 has no maximum over a row; want k2 or k3")
    if high <= 0 or (low is not None and low <= 0):
        raise ValueError(f"low and high: want > 0, got {low!r} and {high!r}")
    known = clamp_log_ratio(select(log_ratio.detach(), mask))
    if is_ratio:
        statistic = known if k1_bounds == "ratio" else -known
        upper, lower = math.log(high), -math.log(high) if low is None else math.log(low)
    else:
        statistic = known.square() / 2 if estimator == "k2" else known.exp() - 1 - known
        upper, lower = high, 0.0

    filled = rows.count(mask) > 0  # [R]
    if level == "token":
        per_row = rows.mean(statistic, mask)
        measured, measured_mask = statistic, mask
    elif level in ("sequence_sum", "sequence_mean", "sequence_max"):
        if level == "sequence_sum":
            per_row = rows.sum(statistic, mask)
        elif level == "sequence_mean":
            per_row = rows.mean(statistic, mask)
        else:
            per_row = rows.max(statistic, mask, empty=0.0)
        statistic = rows.spread(per_row)
        measured, measured_mask = per_row, filled
    else:
        raise ValueError(f"level: unknown {level!r}")
    keep = mask & (statistic <= upper)
    if is_ratio:
        keep = keep & (statistic >= lower)

    metrics: Metrics = {
        "mean": Mean.of(statistic, mask),
        "std": Std.of(statistic.clamp(lower, upper), mask),
        "max": Max.of(measured, measured_mask),
        "min": Min.of(measured, measured_mask),
        "fraction_high": Mean.of(measured > upper, measured_mask),
        "fraction_low": Mean.of((measured < lower) & is_ratio, measured_mask),
        "row_mean": Mean.of(per_row, filled),
        "row_std": Std.of(per_row, filled, ddof=1),
        "row_max": Max.of(per_row, filled),
        "row_min": Min.of(per_row, filled),
        "row_deviation_max": Max.of(per_row.abs(), filled),
        "row_fraction_high": Mean.of(per_row > upper, filled),
        "row_fraction_low": Mean.of((per_row < lower) & is_ratio, filled),
    }
    prefix = f"rejection_{level}_{estimator}"
    named: Metrics = {f"{prefix}/{name}": metric for name, metric in metrics.items()}
    named.update(_rejected(keep, mask, rows, prefix=prefix, count_empty_rows=count_empty_rows))
    return Correction(weights=keep.to(log_ratio.dtype), keep=keep, metrics=named)


def _rejected(
    keep: Tensor, mask: Tensor, rows: Rows, *, prefix: str, count_empty_rows: bool = False
) -> Metrics:
    """Fraction of trained tokens rejected, and of rows that lost one or more."""
    lost = rows.count(mask & ~keep) > 0
    counted = None if count_empty_rows else rows.count(mask) > 0
    return {
        f"{prefix}/rejected_fraction": Mean.of(~keep, mask),
        f"{prefix}/row_rejected_fraction": Mean.of(lost, counted),
    }


def combine_corrections(
    corrections: Sequence[Correction],
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    count_empty_rows: bool = False,
) -> Correction:
    """Apply all: weights multiply, a token is kept only if every one keeps it.

    `rejected_fraction` and `row_rejected_fraction` then count over all of them.
    """
    weights, keep = mask.to(torch.float32), mask
    metrics: Metrics = {}
    for correction in corrections:
        weights = weights * correction.weights
        keep = keep & correction.keep
        metrics.update(correction.metrics)
    metrics.update(
        _rejected(keep, mask, rows, prefix="corrections", count_empty_rows=count_empty_rows)
    )
    return Correction(weights=select(weights, keep), keep=keep, metrics=metrics)


def opsm_rows(
    log_ratio: Tensor,  # [T] current (or proximal) - behavior
    advantages: Tensor,  # [R]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    threshold: float = 0.5,
) -> Tensor:
    """Keep a row if its advantage is >= 0 or its mean of behavior - policy <= `threshold`: `[R]`.

    Nats per token. TRL suggests 0.5 against the current policy; slime takes 1e-4 against the
    proximal one. A row without a trained token has not drifted.
    """
    drift = rows.mean(-log_ratio.detach(), mask)
    return (advantages >= 0) | (drift <= threshold)


def opsm_mask(
    log_ratio: Tensor,  # [T] current (or proximal) - behavior
    advantages: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    threshold: float = 0.5,
) -> Correction:
    """Off-policy sequence mask of DeepSeek-V3.2 (2512.02556): drop stale negative rows.

    The tokens of every row that `opsm_rows` keeps, by the mean advantage of the row.
    """
    kept = opsm_rows(log_ratio, rows.mean(advantages, mask), mask, rows, threshold=threshold)
    keep = mask & rows.spread(kept)
    metrics = _rejected(keep, mask, rows, prefix="opsm")
    return Correction(weights=keep.to(log_ratio.dtype), keep=keep, metrics=metrics)


def veto_mask(
    log_ratio: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    threshold: float = 1e-4,
) -> Correction:
    """Drop every row in which one trained token's ratio is below `threshold` (slime's MIS veto)."""
    if threshold <= 0:
        raise ValueError(f"threshold: want > 0, got {threshold!r}")
    catastrophic = mask & (log_ratio.detach() < math.log(threshold))
    keep = mask & rows.spread(rows.count(catastrophic) == 0)
    metrics = _rejected(keep, mask, rows, prefix="veto")
    metrics["veto/token_fraction"] = Mean.of(catastrophic, mask)
    return Correction(weights=keep.to(log_ratio.dtype), keep=keep, metrics=metrics)


def m2po_bound(
    log_ratio: Tensor,  # [T]
    advantages: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    *,
    threshold: float,
) -> float:
    """Largest c with mean(min(l^2, c)) <= `threshold` over the tokens that a clip could act on.

    The second-moment trust region of M2PO (2510.01161) as its released code solves it: those are the
    tokens whose update moves them further from the behavior policy. (Algorithm 1 of the paper bounds
    the mean over those that remain, so it drops fewer.) Infinite where the mean is within the
    threshold.
    """
    outward = _moves_outward(log_ratio, advantages, mask)
    squares = log_ratio.detach()[outward].double().square().sort().values
    if not len(squares) or squares.mean() <= threshold:
        return math.inf
    below = squares.cumsum(0) - squares  # sum of those before each
    num_capped = torch.arange(len(squares), 0, -1, device=squares.device)
    # With all from the i-th on at c, the mean is the threshold at c_i; the c_i that is at most the
    # i-th square, first from the left, is the one.
    caps = (len(squares) * threshold - below) / num_capped
    return float(caps[torch.nonzero(caps <= squares)[0, 0]])


def m2po_mask(
    log_ratio: Tensor,  # [T]
    advantages: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    bound: float,
) -> Correction:
    """Drop what moves outward with a squared log-ratio above `bound`, as a clip at it would."""
    is_far = log_ratio.detach().double().square() > bound
    keep = mask & ~(is_far & _moves_outward(log_ratio, advantages, mask))
    metrics = _rejected(keep, mask, rows, prefix="m2po")
    return Correction(weights=keep.to(log_ratio.dtype), keep=keep, metrics=metrics)


def _moves_outward(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:  # [T] bool
    """A > 0 and a ratio above 1, or A < 0 and one below: where PPO's clip may stop the gradient."""
    return mask & (log_ratio.detach() * advantages.detach() > 0)


def high_entropy_mask(
    entropy: Tensor, mask: Tensor, rows: Rows, *, top_fraction: float
) -> Correction:
    """Train only the `top_fraction` most uncertain tokens passed in (2506.01939)."""
    known = entropy.detach()[mask]
    keep = mask
    if known.numel():
        keep = mask & (entropy.detach() >= torch.quantile(known, 1 - top_fraction))
    metrics = _rejected(keep, mask, rows, prefix="high_entropy")
    return Correction(weights=keep.to(entropy.dtype), keep=keep, metrics=metrics)
