"""Loss of the value head.

Legend: `T` packed tokens.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from raylearner.learner.batch.metric import ExplainedVariance, Mean, Metrics, summary
from raylearner.learner.batch.rows import select


def value_loss(
    values: Tensor,  # [T]
    old_values: Tensor,  # [T]
    returns: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    *,
    clip: float | None = 0.5,
    kind: Literal["mse", "huber"] = "mse",
    huber_delta: float = 10.0,
) -> tuple[Tensor, Metrics]:
    """max(l(V), l(old + clip(V - old, -clip, clip))) against the returns, 0 off the mask: `[T]`.

    l is (V - G)^2 / 2, or Huber's with `huber_delta` (1707.06347, eq. 9 as clipped by the OpenAI
    baselines). The factor 1/2 is inside: aggregate the values as they are. `clip` None turns the
    clipping off. Raises ValueError for an unknown kind.
    """
    values = select(values, mask)
    returns, old_values = select(returns, mask).detach(), select(old_values, mask).detach()

    def loss(predictions: Tensor) -> Tensor:
        if kind == "mse":
            return (predictions - returns).square() / 2
        if kind == "huber":
            return huber_loss(predictions, returns, reduction="none", delta=huber_delta)
        raise ValueError(f"kind: want mse or huber, got {kind!r}")

    plain = clipped = loss(values)
    if clip is not None:
        clipped = loss(torch.clamp(values, old_values - clip, old_values + clip))
    metrics: Metrics = {
        "value_clip_fraction": Mean.of(clipped > plain, mask),
        "explained_variance": ExplainedVariance.of(returns, values.detach(), mask),
        **summary("value", values, mask),
        **summary("return", returns, mask),
    }
    return torch.maximum(plain, clipped), metrics
