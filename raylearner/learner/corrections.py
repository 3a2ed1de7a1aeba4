"""Corrections for tokens that an older or slightly different policy sampled.

Legend: `T` packed tokens, `R` rows. `log_ratio = proximal - behavior` throughout (with the
behavior policy as proximal, current - behavior). Weights carry no gradient. A rejected token has
weight 0 and stays in every denominator; whoever wants it out of them narrows the train mask by
`keep` before counting.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raylearner.learner.metric import EffectiveFraction, Max, Mean, Metrics, Min, Std
from raylearner.learner.rows import Rows, clamp_log_ratio, select


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


def importance_weights(
    log_ratio: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
) -> Correction:
    """exp(log_ratio) per token, or of its sum (`sequence`) or mean (`geometric`) over the row.

    `truncate` clamps to `low..high`: truncated importance sampling (TIS), cap 2.
    `mask` sets weights outside to 0: IcePop (2510.18855; 0.5..5), masked importance sampling.
    Truncation by sequence needs the sum clamped, which it is, at plus or minus 20.
    """
    if high is not None and high <= 0:
        raise ValueError(f"high: want > 0, got {high!r}")
    log_ratio = select(log_ratio.detach(), mask)
    if level == "sequence":
        log_ratio = rows.spread(rows.sum(log_ratio))
    elif level == "geometric":
        log_ratio = rows.spread(rows.mean(log_ratio, mask))
    elif level != "token":
        raise ValueError(f"level: want token, sequence or geometric, got {level!r}")
    raw = select(clamp_log_ratio(log_ratio).exp(), mask)
    lowest = 0.0 if low is None else low
    highest = torch.inf if high is None else high
    is_low, is_high = raw < lowest, raw > highest
    keep = mask
    if mode == "truncate":
        weights = select(raw.clamp(lowest, highest), mask)
    elif mode == "mask":
        keep = mask & ~is_low & ~is_high
        weights = select(raw, keep)
    else:
        raise ValueError(f"mode: want truncate or mask, got {mode!r}")
    metrics: Metrics = {
        "importance_weight/mean": Mean.of(raw, mask),
        "importance_weight/std": Std.of(weights, mask),
        "importance_weight/max": Max.of(raw, mask),
        "importance_weight/min": Min.of(raw, mask),
        "importance_weight/ess": EffectiveFraction.of(weights, mask),
        "importance_weight/fraction_low": Mean.of(is_low, mask),
        "importance_weight/fraction_high": Mean.of(is_high, mask),
        "importance_weight/rejected_fraction": Mean.of(~keep, mask),
    }
    return Correction(weights=weights, keep=keep, metrics=metrics)
