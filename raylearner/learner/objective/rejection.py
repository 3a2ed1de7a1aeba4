"""Corrections that reject tokens or rows; all others weigh 1.

Legend: `T` packed tokens, `R` rows; `log_ratio` as in `importance`.
"""

import math
from typing import ClassVar, Literal

from raylearner.config.section import NonNegativeFloat, PositiveFloat
from raylearner.learner.batch.metric import Max, Mean, Metrics, Min, Std
from raylearner.learner.batch.rows import Rows, clamp_log_ratio, select
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.importance import Correction, CorrectionInputs, CorrectionRule


class Rejection(CorrectionRule):
    """Tokens or rows outside the bounds are rejected, all others weigh 1 (richardli.xyz/rl-collapse)."""

    kind: Literal["rejection"]
    level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Statistic of a token, or the sum, mean or maximum over a row."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The log-ratio l, l^2 / 2, or e^l - 1 - l."""
    low: PositiveFloat | None = None
    """k1: minimum ratio, 1/high by default. k2 and k3 have no lower bound."""
    high: PositiveFloat = 2.0
    """k1: maximum ratio. k2 and k3: maximum statistic, in nats."""


def reject(inputs: CorrectionInputs, config: Rejection) -> Correction:
    """Keep tokens, or whole rows, whose divergence from the behavior policy is within bounds.

    k1 is bounded in ratios: `low..high` on proximal / behavior (of the row's product for the sum, of
    its geometric mean for the mean). k2 and k3 have only `high`. sequence_sum k1 is sequence MIS,
    sequence_mean k1 geometric rejection (Geo-RS).
    """
    mask, rows = inputs.mask, inputs.rows
    is_ratio = config.estimator == "k1"
    known = clamp_log_ratio(select(inputs.log_ratio.detach(), mask))
    if is_ratio:
        statistic, upper = known, math.log(config.high)
        lower = -upper if config.low is None else math.log(config.low)
    else:
        statistic = known.square() / 2 if config.estimator == "k2" else known.exp() - 1 - known
        upper, lower = config.high, 0.0

    filled = rows.count(mask) > 0  # [R]
    if config.level == "token":
        per_row = rows.mean(statistic, mask)
        measured, measured_mask = statistic, mask
    else:
        if config.level == "sequence_sum":
            per_row = rows.sum(statistic, mask)
        elif config.level == "sequence_mean":
            per_row = rows.mean(statistic, mask)
        else:
            per_row = rows.max(statistic, mask, empty=0.0)
        statistic = rows.spread(per_row)
        measured, measured_mask = per_row, filled
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
    prefix = f"rejection_{config.level}_{config.estimator}"
    named: Metrics = {f"{prefix}/{name}": metric for name, metric in metrics.items()}
    return _keeping(keep, inputs, prefix=prefix, metrics=named)


class Geometric(CorrectionRule):
    """Rows are rejected by the geometric mean of their ratios (richardli.xyz/rl-collapse)."""

    kind: Literal["geometric"]
    low: PositiveFloat | None = None
    """Minimum ratio; 1/high by default."""
    high: PositiveFloat = 1.001
    """Maximum ratio."""


def geometric(inputs: CorrectionInputs, config: Geometric) -> Correction:
    """`rejection` by the mean of k1 over the row."""
    rule = Rejection(kind="rejection", level="sequence_mean", low=config.low, high=config.high)
    return reject(inputs, rule)


class Opsm(CorrectionRule):
    """Off-policy sequence mask: stale rows of negative advantage are dropped (2512.02556)."""

    kind: Literal["opsm"]
    uses_advantages: ClassVar[bool] = True
    threshold: NonNegativeFloat = 0.5
    """Maximum drift from the behavior policy that such a row may have, in nats per token."""


def opsm(inputs: CorrectionInputs, config: Opsm) -> Correction:
    """Keep a row if its mean advantage is >= 0 or its mean of behavior - policy <= `threshold`.

    TRL suggests 0.5 against the current policy; slime takes 1e-4 against the proximal one. A row
    without a trained token has not drifted.
    """
    mask, rows = inputs.mask, inputs.rows
    drift = rows.mean(-inputs.log_ratio.detach(), mask)
    kept = (rows.mean(inputs.advantages, mask) >= 0) | (drift <= config.threshold)
    return _keeping(mask & rows.spread(kept), inputs, prefix="opsm")


class Veto(CorrectionRule):
    """A row is dropped for one token with a ratio below the threshold (slime)."""

    kind: Literal["veto"]
    threshold: PositiveFloat = 1e-4
    """Minimum ratio."""


def veto(inputs: CorrectionInputs, config: Veto) -> Correction:
    """Drop every row in which one trained token's ratio is below `threshold`."""
    mask, rows = inputs.mask, inputs.rows
    is_below = mask & (inputs.log_ratio.detach() < math.log(config.threshold))
    keep = mask & rows.spread(rows.count(is_below) == 0)
    return _keeping(
        keep, inputs, prefix="veto", metrics={"veto/token_fraction": Mean.of(is_below, mask)}
    )


class M2po(CorrectionRule):
    """Second-moment trust region (2510.01161): tokens that would move further from the behavior
    policy are rejected above a bound on the squared log-ratio, which follows from the batch's
    second moment.
    """

    kind: Literal["m2po"]
    uses_advantages: ClassVar[bool] = True
    uses_batch_value: ClassVar[bool] = True
    threshold: PositiveFloat = 0.04
    """Maximum mean of the squared log-ratios, each capped at the bound, over the tokens that would move further away: those with a ratio above 1 and a positive advantage, or below 1 and a negative one."""


def m2po(inputs: CorrectionInputs, config: M2po) -> Correction:
    """Drop tokens that move outward with a squared log-ratio above `m2po_bound` of the batch."""
    assert inputs.batch_value is not None
    is_far = inputs.log_ratio.detach().double().square() > inputs.batch_value
    keep = inputs.mask & ~(is_far & _moves_outward(inputs))
    return _keeping(keep, inputs, prefix="m2po")


def m2po_bound(inputs: CorrectionInputs, config: M2po) -> float:
    """Return the largest c with mean(min(l^2, c)) <= `threshold` over the tokens of the whole batch
    that a clip could affect.

    Those are the tokens whose update moves them further from the behavior policy, as in the released
    code. (Algorithm 1 of the paper bounds the mean over those that remain, so it drops fewer.)
    Infinite where the mean is within the threshold.
    """
    squares = inputs.log_ratio.detach()[_moves_outward(inputs)].double().square().sort().values
    if not len(squares) or squares.mean() <= config.threshold:
        return math.inf
    below = squares.cumsum(0) - squares  # sum of those before each
    num_capped = torch.arange(len(squares), 0, -1, device=squares.device)
    # With all from the i-th on at c, the mean is the threshold at c_i; the c_i that is at most the
    # i-th square, first from the left, is the one.
    caps = (len(squares) * config.threshold - below) / num_capped
    return float(caps[torch.nonzero(caps <= squares)[0, 0]])


def _moves_outward(inputs: CorrectionInputs) -> Tensor:  # [T] bool
    """A > 0 and a ratio above 1, or A < 0 and one below: where PPO's clip may stop the gradient."""
    return inputs.mask & (inputs.log_ratio.detach() * inputs.advantages.detach() > 0)


def _keeping(
    keep: Tensor, inputs: CorrectionInputs, *, prefix: str, metrics: Metrics | None = None
) -> Correction:
    return Correction(
        weights=keep.to(inputs.log_ratio.dtype),
        keep=keep,
        metrics={
            **(metrics or {}),
            **rejected_fractions(keep, inputs.mask, inputs.rows, prefix=prefix),
        },
    )


def rejected_fractions(keep: Tensor, mask: Tensor, rows: Rows, *, prefix: str) -> Metrics:
    """Return the fraction of trained tokens rejected, and of rows that lost one or more."""
    lost = rows.count(mask & ~keep) > 0
    return {
        f"{prefix}/rejected_fraction": Mean.of(~keep, mask),
        f"{prefix}/row_rejected_fraction": Mean.of(lost, rows.count(mask) > 0),
    }
