"""Policy losses with a ratio, or a regression, per row.

Legend: `T` packed tokens, `R` rows. A is the advantage (a row's is the mean over its tokens), pi the
current and old the proximal policy, x = log pi - log old. Log-ratios of rows are clamped to plus or
minus 20 before `exp`. A row is one sequence; row losses are aggregated by their mean over rows.
`count_empty_rows` makes row metrics count rows without a trained token, as TRL does.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from raylearner.learner.batch.metric import Mean, Metrics
from raylearner.learner.batch.rows import LOG_RATIO_LIMIT, Rows, clamp_log_ratio, select
from raylearner.learner.objective.policy_loss import (
    LossInputs,
    LossOutput,
    counted_rows,
    kl_metrics,
    ratio_metrics,
    row_weights,
    weigh,
)


def _clipped(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(-A R, -A clip(R)), and where the clip acted."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def sequence_ratio(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    log_ratio_limit: float = LOG_RATIO_LIMIT,
    count_empty_rows: bool = False,
) -> LossOutput:
    """-min(R A, clip(R) A) with R = exp(sum x) of the whole row (2402.14740, as in TRL's RLOO).

    Not normalized by length. TRL does not clamp the sum: an infinite `log_ratio_limit` is that, and
    overflows on long stale rows. Row losses; a row's weight is the mean of its tokens'.
    """
    inputs = inputs.selected()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    row_ratio = inputs.rows.sum(log_ratio).clamp(-log_ratio_limit, log_ratio_limit).exp()
    advantages = inputs.row_advantages()
    values, is_clipped = _clipped(row_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    counted = counted_rows(inputs, count_empty_rows=count_empty_rows)
    metrics: Metrics = {
        "clip_fraction": Mean.of(is_clipped, counted),
        **ratio_metrics(row_ratio, advantages, counted, low=1 - clip_low, high=1 + clip_high),
        **kl_metrics(log_ratio, inputs.mask),
    }
    values = weigh(values, row_weights(inputs, kind="mean"))
    return LossOutput(values=values, level="row", metrics=metrics)


def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    form: Literal["token", "sequence"] = "token",
    max_log_ratio: float = 10.0,
    count_empty_rows: bool = False,
) -> LossOutput:
    """Clipped with the length-normalized ratio s = exp(mean x) (2507.18071, eq. 5 to 7).

    `token` (the paper's GSPO-token, eq. 13) gives each token sg(s) pi / sg(pi) and its own
    advantage: token losses, meant for `sequence_mean_of_means`, where it equals `sequence` (row
    losses) if advantages are constant in a row. log s is clamped to -20..max_log_ratio.
    """
    inputs = inputs.selected()
    rows, mask = inputs.rows, inputs.mask
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    log_row_ratio = rows.mean(log_ratio, mask)
    row_ratio = log_row_ratio.clamp(-LOG_RATIO_LIMIT, max_log_ratio).exp()
    counted = counted_rows(inputs, count_empty_rows=count_empty_rows)
    low, high = 1 - clip_low, 1 + clip_high
    metrics: Metrics = {
        **ratio_metrics(
            row_ratio, inputs.row_advantages(), counted, low=low, high=high, prefix="row_"
        ),
        **kl_metrics(log_ratio, mask),
    }
    if form == "sequence":
        values, is_clipped = _clipped(
            row_ratio, inputs.row_advantages(), clip_low=clip_low, clip_high=clip_high
        )
        metrics["clip_fraction"] = Mean.of(is_clipped, counted)
        values = weigh(values, row_weights(inputs, kind="mean"))
        return LossOutput(values=values, level="row", metrics=metrics)
    if form != "token":
        raise ValueError(f"form: want token or sequence, got {form!r}")
    log_token_ratio = (
        inputs.logprobs - inputs.logprobs.detach() + rows.spread(log_row_ratio).detach()
    )
    token_ratio = log_token_ratio.clamp(-LOG_RATIO_LIMIT, max_log_ratio).exp()
    values, is_clipped = _clipped(
        token_ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high
    )
    metrics["clip_fraction"] = Mean.of(is_clipped, mask)
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> LossOutput:
    """-A exp(mean x'), x' = x clipped to [-clip_low, clip_high] on A's side (2507.20673).

    The clip is in log space: 0.4 lets ratios reach e^0.4. Row losses; a row's weight is the
    geometric mean of its tokens'. `clip_fraction_positive` and `_negative` count tokens outside the
    range at either end, by the sign of A.
    """
    inputs = inputs.selected()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    bounded = log_ratio.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    chosen = sign * torch.minimum(sign * log_ratio, sign * bounded)
    row_ratio = clamp_log_ratio(inputs.rows.mean(chosen, mask)).exp()
    values = weigh(-inputs.row_advantages() * row_ratio, row_weights(inputs, kind="geometric"))
    is_outside = log_ratio.detach() != bounded.detach()
    metrics: Metrics = {
        "clip_fraction_positive": Mean.of(is_outside & (advantages > 0), mask),
        "clip_fraction_negative": Mean.of(is_outside & (advantages < 0), mask),
        **ratio_metrics(
            clamp_log_ratio(log_ratio).exp(),
            advantages,
            mask,
            low=math.exp(-clip_low),
            high=math.exp(clip_high),
            rows=inputs.rows,
        ),
        **kl_metrics(log_ratio, mask),
    }
    return LossOutput(values=values, level="row", metrics=metrics)


def luspo(
    inputs: LossInputs,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    count_empty_rows: bool = False,
) -> LossOutput:
    """n max(-A s, -A clip(s)), s = exp(mean x), n the row's trained tokens (2602.05261).

    GSPO without its bias toward short rows. Row losses; weights enter as their sum in the place of n.
    """
    inputs = inputs.selected()
    rows, mask = inputs.rows, inputs.mask
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    row_ratio = clamp_log_ratio(rows.mean(log_ratio, mask)).exp()
    advantages = inputs.row_advantages()
    values, is_clipped = _clipped(row_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    counted = counted_rows(inputs, count_empty_rows=count_empty_rows)
    lengths = rows.sum(mask.to(values.dtype) if inputs.weights is None else inputs.weights)
    metrics: Metrics = {
        "clip_fraction": Mean.of(is_clipped, counted),
        **ratio_metrics(row_ratio, advantages, counted, low=1 - clip_low, high=1 + clip_high),
        **kl_metrics(log_ratio, mask),
    }
    return LossOutput(values=weigh(values, lengths), level="row", metrics=metrics)


def vespo_weights(
    log_ratio: Tensor,  # [T] current - proximal
    advantages: Tensor,  # [R]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    weights: Tensor | None = None,  # [T]
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """phi(W) = exp(lambda + k log W - lambda W), detached, W the row's ratio: `[R]` (2602.10693).

    phi(1) = 1; k and lambda go by the sign of the row's advantage. Correction weights extend W to
    the behavior policy (each at least 1e-8); rows without trained tokens have W = 1.
    """
    floor = math.log(1e-8)
    total = rows.sum(clamp_log_ratio(log_ratio.detach()), mask)
    if weights is not None:
        total = total + rows.sum(weights.detach().log().clamp(floor, LOG_RATIO_LIMIT), mask)
    log_ratio_of_row = total.clamp(floor, LOG_RATIO_LIMIT)
    is_positive = advantages >= 0
    k = torch.full_like(total, k_negative).masked_fill(is_positive, k_positive)
    lam = torch.full_like(total, lambda_negative).masked_fill(is_positive, lambda_positive)
    return (lam + k * log_ratio_of_row - lam * log_ratio_of_row.exp()).exp()


def vespo(
    inputs: LossInputs,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    count_empty_rows: bool = False,
) -> LossOutput:
    """-phi(W) A log pi with `vespo_weights` (2602.10693). Token losses.

    Correction weights enter W and do not multiply the loss, except that rejected tokens (weight 0)
    lose theirs.
    """
    inputs = inputs.selected()
    log_ratio = inputs.logprobs.detach() - inputs.proximal_logprobs
    phi = vespo_weights(
        log_ratio,
        inputs.row_advantages(),
        inputs.mask,
        inputs.rows,
        weights=inputs.weights,
        k_positive=k_positive,
        lambda_positive=lambda_positive,
        k_negative=k_negative,
        lambda_negative=lambda_negative,
    )
    values = (
        -inputs.rows.spread(phi).to(inputs.logprobs.dtype) * inputs.advantages * inputs.logprobs
    )
    if inputs.weights is not None:
        values = select(values, inputs.weights != 0)
    counted = counted_rows(inputs, count_empty_rows=count_empty_rows)
    metrics: Metrics = {"row_phi": Mean.of(phi, counted), **kl_metrics(log_ratio, inputs.mask)}
    return LossOutput(values=values, level="token", metrics=metrics)


def dro(
    inputs: LossInputs,
    *,
    beta: float = 0.05,
    form: Literal["token", "sequence"] = "token",
) -> LossOutput:
    """-(A log pi - beta / 2 x^2): squared regression instead of a ratio (Kimi k1.5 2501.12599).

    `token` takes x per token (direct reward optimization, token losses); `sequence` sums log pi and
    x over the row as Kimi writes it (row losses). beta > 0, else ValueError. No `exp`, so no clamp.
    """
    if beta <= 0:
        raise ValueError(f"beta: want > 0, got {beta!r}")
    inputs = inputs.selected()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    metrics = kl_metrics(log_ratio, inputs.mask)
    if form == "token":
        values = -(inputs.advantages * inputs.logprobs - beta / 2 * log_ratio.square())
        return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)
    if form != "sequence":
        raise ValueError(f"form: want token or sequence, got {form!r}")
    total = inputs.rows.sum(inputs.logprobs)
    moved = inputs.rows.sum(log_ratio)
    values = -(inputs.row_advantages() * total - beta / 2 * moved.square())
    values = weigh(values, row_weights(inputs, kind="mean"))
    return LossOutput(values=values, level="row", metrics=metrics)
