"""Aggregation of token or row losses to the scalar that is differentiated, by global counts.

Legend: `T` packed tokens of this micro-batch, `R` its rows.
"""

from typing import Literal

from raylearner.learner.batch.rows import Rows, select
from raylearner.learner.lazy_torch import Tensor

Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_of_sums",
    "sequence_mean_of_means",
    "sequence_mean_of_sums_scaled",
]
"""token_mean: DAPO (2503.14476). sequence_mean_of_means: GRPO (2402.03300, eq. 3).
sequence_mean_of_sums: plain policy gradient. sequence_mean_of_sums_scaled: Dr.GRPO (2503.20783)."""


def aggregate(
    values: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    mode: Aggregation,
    num_tokens: float,
    num_rows: float,
    scale: float | None = None,
    row_num_tokens: Tensor | None = None,  # [R]
) -> Tensor:
    """Return this micro-batch's share of the loss of the whole batch.

    `num_tokens` and `num_rows` count trained tokens and rows (or episodes) of the whole batch over
    all micro-batches and ranks, so shares add up to the same loss whatever the split. `scale` is
    the token divisor of `sequence_mean_of_sums_scaled`, usually the longest allowed completion; a
    constant, never the width of a batch. `row_num_tokens` is the divisor of each row's mean where
    that is not the row's own count: the tokens of the whole episode when it has several rows.
    A count of 0 gives 0 (with gradient 0), not NaN. Raises ValueError for a missing scale.
    """
    if mode == "sequence_mean_of_means":
        divisor = rows.count(mask) if row_num_tokens is None else row_num_tokens
        return (rows.sum(values, mask) / divisor.clamp(min=1)).sum() * (1 / max(num_rows, 1))
    total = select(values, mask).sum()
    match mode:
        case "token_mean":
            return total * (1 / max(num_tokens, 1))
        case "token_sum":
            return total
        case "sequence_mean_of_sums":
            return total * (1 / max(num_rows, 1))
        case "sequence_mean_of_sums_scaled":
            if scale is None or scale <= 0:
                raise ValueError(f"scale: must be > 0 with {mode!r}, got {scale!r}")
            return total * (1 / (scale * max(num_rows, 1)))


def aggregate_rows(
    values: Tensor,  # [R]
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    num_rows: float,
    row_weights: Tensor | None = None,  # [R]
) -> Tensor:
    """Return this micro-batch's share of a mean over rows; rows without a trained token add nothing.

    `num_rows` is the global count. With `row_weights` the rows of one episode share its vote
    (1 / its number of rows); `num_rows` is then the number of episodes.
    """
    if row_weights is not None:
        values = values * row_weights
    return select(values, rows.count(mask) > 0).sum() * (1 / max(num_rows, 1))
