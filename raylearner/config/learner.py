"""The learner and its objective."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import (
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)


class GrpoAdvantage(Section):
    """Group-relative advantage (arXiv 2402.03300)."""

    kind: Literal["grpo"]
    normalize: Literal["group", "batch", "none"] = "group"
    """Divide by the group's or the batch's standard deviation, or not at all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class RlooAdvantage(Section):
    """Leave-one-out baseline (arXiv 2402.14740)."""

    kind: Literal["rloo"]


AdvantageSection = Annotated[GrpoAdvantage | RlooAdvantage, Field(discriminator="kind")]


class DecoupledPpo(Section):
    """Decoupled PPO (arXiv 2505.24298) with truncated behaviour weights."""

    kind: Literal["decoupled_ppo"]
    clip_low: PositiveFloat = 0.2
    """Lower clip range of the ratio current/proximal."""
    clip_high: PositiveFloat = 0.2
    """Upper clip range."""
    behavior_weight_cap: PositiveFloat = 2.0
    """Importance weights proximal/behavior are truncated here."""


LossSection = Annotated[DecoupledPpo, Field()]


class LearnerSection(Section):
    """The learner group."""

    num_ranks: PositiveInt = 1
    """Learner actors, one rank each."""
    cpus_per_rank: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for one rank."""
    gpus_per_rank: NonNegativeFloat = 0.0
    """0 trains on the CPU over gloo, 1 over NCCL."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate; 0 freezes the policy."""
    warmup_steps: NaturalInt = 0
    """Linear warm-up, in optimizer updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from the peak to zero over the run."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's moments."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped here."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Token budget of one packed micro-batch."""
    num_mini_batches: PositiveInt = 1
    """Optimizer updates per take and epoch."""
    num_epochs: PositiveInt = 1
    """Passes over one take."""
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Precision of forward and backward; masters stay float32 (float64 with float64)."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    advantage: AdvantageSection = GrpoAdvantage(kind="grpo")
    """How rewards become advantages."""
    loss: LossSection = DecoupledPpo(kind="decoupled_ppo")
    """The objective."""
    aggregation: Literal["token_mean", "sequence_mean_of_sums", "sequence_mean_of_means"] = (
        "token_mean"
    )
    """How token losses become one number, always by global counts."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Entropy bonus."""
    max_skipped_steps: PositiveInt = 5
    """So many steps in a row with a non-finite loss end the run."""
