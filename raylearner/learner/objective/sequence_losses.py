"""Policy losses with a ratio, or a regression, per row.

Legend: `T` packed tokens, `R` rows. A is the advantage (a row's is the mean over its tokens), pi the
current and old the proximal policy, x = log pi - log old. Log-ratios of rows are clamped to plus or
minus 20 before `exp`. A row is one sequence; row losses are aggregated by their mean over rows, and
metrics of rows leave out those without a trained token.
"""

import math
from typing import Literal

from raylearner.config.section import PositiveFloat
from raylearner.learner.batch.metric import Mean, Metrics
from raylearner.learner.batch.rows import LOG_RATIO_LIMIT, Rows, clamp_log_ratio, select
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.loss import (
    ClippedLoss,
    Loss,
    LossInputs,
    LossOutput,
    kl_metrics,
    ratio_metrics,
    row_weights,
    weigh,
)

MAX_GSPO_LOG_RATIO = 10.0
"""Upper clamp of GSPO's log-ratio."""


class SequenceRatio(ClippedLoss):
    """Clipped product of a row's ratios, as in TRL's RLOO (2402.14740). A loss by row."""

    kind: Literal["sequence_ratio"]

    @property
    def is_row_loss(self) -> bool:
        return True


def sequence_ratio(inputs: LossInputs, config: SequenceRatio) -> LossOutput:
    """-min(R A, clip(R) A) with R = exp(sum x) of the whole row, not normalized by length.

    A row's weight is the mean of its tokens'.
    """
    inputs = inputs.without_masked()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    row_ratio = clamp_log_ratio(inputs.rows.sum(log_ratio)).exp()
    values, metrics = _clipped_rows(inputs, log_ratio, row_ratio, config)
    values = weigh(values, row_weights(inputs, kind="mean"))
    return LossOutput(values=values, level="row", metrics=metrics)


class Gspo(ClippedLoss):
    """Clipped geometric mean of a row's ratios (2507.18071)."""

    kind: Literal["gspo"]
    clip_low: PositiveFloat = 3e-4
    """Lower clip range."""
    clip_high: PositiveFloat = 4e-4
    """Upper clip range."""
    form: Literal["token", "sequence"] = "token"
    """Token losses, for sequence_mean_of_means; or losses by row."""

    @property
    def is_row_loss(self) -> bool:
        return self.form == "sequence"


def gspo(inputs: LossInputs, config: Gspo) -> LossOutput:
    """Clipped with the length-normalized ratio s = exp(mean x) (2507.18071, eq. 5 to 7).

    `token` (the paper's GSPO-token, eq. 13) gives each token sg(s) pi / sg(pi) and its own
    advantage: token losses, meant for `sequence_mean_of_means`, where it equals `sequence` (row
    losses) if advantages are constant in a row. log s is clamped to -20..10.
    """
    inputs = inputs.without_masked()
    rows, mask, advantages = inputs.rows, inputs.mask, inputs.row_advantages()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    log_row_ratio = rows.mean(log_ratio, mask)
    row_ratio = log_row_ratio.clamp(-LOG_RATIO_LIMIT, MAX_GSPO_LOG_RATIO).exp()
    filled = rows.count(mask) > 0
    low, high = 1 - config.clip_low, 1 + config.clip_high
    metrics: Metrics = {
        **ratio_metrics(row_ratio, advantages, filled, low=low, high=high, prefix="row_"),
        **kl_metrics(log_ratio, mask),
    }
    if config.form == "sequence":
        values, is_clipped = _clipped(row_ratio, advantages, low=low, high=high)
        metrics["clip_fraction"] = Mean.of(is_clipped, filled)
        values = weigh(values, row_weights(inputs, kind="mean"))
        return LossOutput(values=values, level="row", metrics=metrics)
    log_token_ratio = (
        inputs.logprobs - inputs.logprobs.detach() + rows.spread(log_row_ratio).detach()
    )
    token_ratio = log_token_ratio.clamp(-LOG_RATIO_LIMIT, MAX_GSPO_LOG_RATIO).exp()
    values, is_clipped = _clipped(token_ratio, inputs.advantages, low=low, high=high)
    metrics["clip_fraction"] = Mean.of(is_clipped, mask)
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class Gmpo(ClippedLoss):
    """Geometric mean of ratios clipped in log space (2507.20673). A loss by row."""

    kind: Literal["gmpo"]
    clip_low: PositiveFloat = 0.4
    """Log-ratios are clipped below -clip_low."""
    clip_high: PositiveFloat = 0.4
    """Log-ratios are clipped above clip_high."""

    @property
    def is_row_loss(self) -> bool:
        return True


def gmpo(inputs: LossInputs, config: Gmpo) -> LossOutput:
    """-A exp(mean x'), x' = x clipped to [-clip_low, clip_high] on A's side.

    The clip is in log space: 0.4 lets ratios reach e^0.4. A row's weight is the geometric mean of
    its tokens'. `clip_fraction_positive` and `_negative` count tokens outside the range at either
    end, by the sign of A.
    """
    inputs = inputs.without_masked()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    sign = advantages.sign()
    one_sided = sign * torch.minimum(sign * log_ratio, sign * bounded)
    row_ratio = clamp_log_ratio(inputs.rows.mean(one_sided, mask)).exp()
    values = weigh(-inputs.row_advantages() * row_ratio, row_weights(inputs, kind="geometric"))
    is_outside = log_ratio.detach() != bounded.detach()
    metrics: Metrics = {
        "clip_fraction_positive": Mean.of(is_outside & (advantages > 0), mask),
        "clip_fraction_negative": Mean.of(is_outside & (advantages < 0), mask),
        **ratio_metrics(
            clamp_log_ratio(log_ratio).exp(),
            advantages,
            mask,
            low=math.exp(-config.clip_low),
            high=math.exp(config.clip_high),
            rows=inputs.rows,
        ),
        **kl_metrics(log_ratio, mask),
    }
    return LossOutput(values=values, level="row", metrics=metrics)


class Luspo(ClippedLoss):
    """GSPO without its bias toward short rows (2602.05261). A loss by row."""

    kind: Literal["luspo"]
    clip_low: PositiveFloat = 2e-3
    """Lower clip range."""
    clip_high: PositiveFloat = 2.5e-3
    """Upper clip range."""

    @property
    def is_row_loss(self) -> bool:
        return True


def luspo(inputs: LossInputs, config: Luspo) -> LossOutput:
    """n max(-A s, -A clip(s)), s = exp(mean x), n the row's trained tokens.

    Weights enter as their sum in the place of n.
    """
    inputs = inputs.without_masked()
    rows, mask = inputs.rows, inputs.mask
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    row_ratio = clamp_log_ratio(rows.mean(log_ratio, mask)).exp()
    values, metrics = _clipped_rows(inputs, log_ratio, row_ratio, config)
    lengths = rows.sum(mask.to(values.dtype) if inputs.weights is None else inputs.weights)
    return LossOutput(values=weigh(values, lengths), level="row", metrics=metrics)


class Vespo(Loss):
    """Policy gradient weighted by a smooth function of the row's ratio (2602.10693)."""

    kind: Literal["vespo"]
    k_positive: PositiveFloat = 2.0
    """Exponent for positive advantages."""
    lambda_positive: PositiveFloat = 3.0
    """Decay for positive advantages."""
    k_negative: PositiveFloat = 3.0
    """Exponent for negative advantages."""
    lambda_negative: PositiveFloat = 2.0
    """Decay for negative advantages."""


def vespo(inputs: LossInputs, config: Vespo) -> LossOutput:
    """-phi(W) A log pi, phi(W) = exp(lambda + k log W - lambda W), W the row's ratio. Token losses.

    phi(1) = 1; k and lambda go by the sign of the row's advantage. Correction weights enter W (each
    at least 1e-8), which extends it to the behavior policy, and do not multiply the loss, except
    that rejected tokens (weight 0) lose theirs.
    """
    inputs = inputs.without_masked()
    rows, mask, weights = inputs.rows, inputs.mask, inputs.weights
    log_ratio = inputs.logprobs.detach() - inputs.proximal_logprobs
    phi = vespo_weights(log_ratio, inputs.row_advantages(), mask, rows, config, weights=weights)
    values = -rows.spread(phi).to(inputs.logprobs.dtype) * inputs.advantages * inputs.logprobs
    if weights is not None:
        values = select(values, weights != 0)
    filled = rows.count(mask) > 0
    metrics: Metrics = {"row_phi": Mean.of(phi, filled), **kl_metrics(log_ratio, mask)}
    return LossOutput(values=values, metrics=metrics)


def vespo_weights(
    log_ratio: Tensor,  # [T] current - proximal
    advantages: Tensor,  # [R]
    mask: Tensor,  # [T] bool
    rows: Rows,
    config: Vespo,
    *,
    weights: Tensor | None,  # [T]
) -> Tensor:
    """Return phi(W), detached: `[R]`. Rows without trained tokens have W = 1."""
    floor = math.log(1e-8)
    total = rows.sum(clamp_log_ratio(log_ratio.detach()), mask)
    if weights is not None:
        total = total + rows.sum(weights.detach().log().clamp(floor, LOG_RATIO_LIMIT), mask)
    log_row_ratio = total.clamp(floor, LOG_RATIO_LIMIT)
    is_positive = advantages >= 0
    k = torch.full_like(total, config.k_negative).masked_fill(is_positive, config.k_positive)
    decay = torch.full_like(total, config.lambda_negative)
    decay = decay.masked_fill(is_positive, config.lambda_positive)
    return (decay + k * log_row_ratio - decay * log_row_ratio.exp()).exp()


class Dro(Loss):
    """Squared regression instead of a ratio (Kimi k1.5, 2501.12599)."""

    kind: Literal["dro"]
    beta: PositiveFloat = 0.05
    """Weight of the squared log-ratio."""
    form: Literal["token", "sequence"] = "token"
    """Log-ratios per token, or summed over the row as Kimi writes it (a loss by row)."""

    @property
    def is_row_loss(self) -> bool:
        return self.form == "sequence"


def dro(inputs: LossInputs, config: Dro) -> LossOutput:
    """-(A log pi - beta / 2 x^2); `sequence` sums log pi and x over the row. No `exp`, so no clamp."""
    inputs = inputs.without_masked()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    metrics = kl_metrics(log_ratio, inputs.mask)
    if config.form == "token":
        values = -(inputs.advantages * inputs.logprobs - config.beta / 2 * log_ratio.square())
        return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)
    total, moved = inputs.rows.sum(inputs.logprobs), inputs.rows.sum(log_ratio)
    values = -(inputs.row_advantages() * total - config.beta / 2 * moved.square())
    values = weigh(values, row_weights(inputs, kind="mean"))
    return LossOutput(values=values, level="row", metrics=metrics)


def _clipped(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return max(-A R, -A clip(R)), and where the clip acted."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(low, high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _clipped_rows(
    inputs: LossInputs, log_ratio: Tensor, row_ratio: Tensor, config: ClippedLoss
) -> tuple[Tensor, Metrics]:
    """Return the clipped loss of each row by its ratio `[R]`, and metrics."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    advantages, filled = inputs.row_advantages(), inputs.rows.count(inputs.mask) > 0
    values, is_clipped = _clipped(row_ratio, advantages, low=low, high=high)
    metrics: Metrics = {
        "clip_fraction": Mean.of(is_clipped, filled),
        **ratio_metrics(row_ratio, advantages, filled, low=low, high=high),
        **kl_metrics(log_ratio, inputs.mask),
    }
    return values, metrics
