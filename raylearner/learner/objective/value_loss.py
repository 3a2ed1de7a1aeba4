"""The critic's section and the loss of its value head.

Legend: `T` packed tokens.
"""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    Section,
)
from raylearner.learner.batch.metric import ExplainedVariance, Mean, Metrics, summary
from raylearner.learner.batch.rows import select
from raylearner.learner.lazy_torch import Tensor, torch

HUBER_DELTA = 10.0
"""Error at which Huber's loss becomes linear."""


class CriticSection(Section):
    """Value function of each prefix, learned beside the policy."""

    trunk: Literal["own", "shared"] = "own"
    """A separate transformer, or the policy's with one more head, trained by the sum of losses."""
    path: str | None = None
    """Checkpoint directory or hub id of a separate trunk. Default: the initial policy.
    """
    learning_rate: NonNegativeFloat = 1e-5
    """Constant learning rate of a separate trunk; a shared one has the policy's."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay; separate trunk only."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's betas; separate trunk only."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; separate trunk only."""
    coefficient: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Coefficient of the value loss; shared trunk only."""
    warmup_steps: NaturalInt = 0
    """Number of first steps that train the critic only, not the policy; separate trunk only.
    """
    clip: PositiveFloat | None = 0.5
    """Maximum change of a value from the start of the step; None for off."""
    loss: Literal["mse", "huber"] = "mse"
    """Squared error, or Huber's, which is linear beyond 10."""


def value_loss(
    values: Tensor,  # [T]
    old_values: Tensor,  # [T]
    returns: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    config: CriticSection,
) -> tuple[Tensor, Metrics]:
    """max(l(V), l(old + clip(V - old, -clip, clip))) against the returns, 0 off the mask: `[T]`.

    l is (V - G)^2 / 2, or Huber's (1707.06347, eq. 9 as clipped by the OpenAI baselines). The factor
    1/2 is inside: aggregate the values as they are.
    """
    values = select(values, mask)
    returns, old_values = select(returns, mask).detach(), select(old_values, mask).detach()

    def loss(predictions: Tensor) -> Tensor:
        if config.loss == "mse":
            return (predictions - returns).square() / 2
        return torch.nn.functional.huber_loss(
            predictions, returns, reduction="none", delta=HUBER_DELTA
        )

    plain = clipped = loss(values)
    if config.clip is not None:
        clipped = loss(torch.clamp(values, old_values - config.clip, old_values + config.clip))
    metrics: Metrics = {
        "value_clip_fraction": Mean.of(clipped > plain, mask),
        "explained_variance": ExplainedVariance.of(returns, values.detach(), mask),
        **summary("value", values, mask),
        **summary("return", returns, mask),
    }
    return torch.maximum(plain, clipped), metrics
