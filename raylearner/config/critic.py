"""The value head of GAE and V-trace."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    Section,
)


class CriticSection(Section):
    """A value of each prefix, learned beside the policy."""

    trunk: Literal["own", "shared"] = "own"
    """A transformer of its own, or the policy's with one more head, trained by the sum of losses."""
    path: str | None = None
    """Checkpoint directory or hub id that an own trunk starts from. Default: the initial policy."""
    learning_rate: NonNegativeFloat = 1e-5
    """Constant learning rate of an own trunk; a shared one has the policy's."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay, own trunk."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's moments, own trunk."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped here, own trunk."""
    coefficient: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Weight of the value loss beside the policy's, shared trunk."""
    warmup_steps: NaturalInt = 0
    """First steps that train the critic alone: the policy and its version stay. Own trunk only."""
    clip: PositiveFloat | None = 0.5
    """Values move by at most this from those at the start of the step; None for off."""
    loss: Literal["mse", "huber"] = "mse"
    """Squared error, or Huber's."""
    huber_delta: PositiveFloat = 10.0
    """Where Huber's loss becomes linear."""
