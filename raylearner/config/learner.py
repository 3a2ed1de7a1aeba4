"""The learner and its objective."""

import json
from pathlib import Path
from typing import Literal

from raylearner.config.section import (
    AutoFloat,
    Fraction,
    NaturalInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)
from raylearner.errors import ConfigError
from raylearner.learner.objective.advantages import GrpoAdvantage
from raylearner.learner.objective.aggregation import Aggregation
from raylearner.learner.objective.behavior_losses import DecoupledPpo
from raylearner.learner.objective.corrections import CorrectionSection
from raylearner.learner.objective.episodes import ResamplingSection, RewardShaping
from raylearner.learner.objective.estimate import AdvantageSection
from raylearner.learner.objective.kl import KlSection
from raylearner.learner.objective.losses import LossSection
from raylearner.learner.objective.value_loss import CriticSection

TOKEN_BUDGET = 8192
"""Tokens of a micro-batch where memory does not decide."""


class LoraSection(Section):
    """Trains low-rank adapters only (LoRA, 2106.09685). A checkpoint's `model/` has them merged, in
    float32."""

    rank: PositiveInt = 32
    """Rank of each adapter."""
    alpha: PositiveFloat = 64.0
    """Scale of the adapters: alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers with adapters: all but the head, or those whose names end with one of these
    (`q_proj`)."""
    path: str | None = None
    """Adapter to start from, in peft's form; it determines rank, alpha and target_modules."""

    @property
    def own_keys(self) -> list[str]:
        """Return the keys that are set although an existing adapter determines them."""
        if self.path is None:
            return []
        return sorted(self.model_fields_set & {"rank", "alpha", "target_modules"})


def lora_rank(section: LoraSection) -> int:
    """Return the rank of the adapters. Raises `ConfigError` with the file that it is read from."""
    if section.path is None:
        return section.rank
    file = Path(section.path).expanduser() / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"learner.lora.path: {section.path!r} is not an adapter in peft's form: {file}: {error!r}"
        ) from error


class LearnerSection(Section):
    """The learner and its objective."""

    num_ranks: PositiveInt = 1
    """Number of learner actors, one rank each."""
    shard_size: PositiveInt | None = None
    """Number of ranks that share one copy of the parameters; with fewer than `num_ranks`, each such group
    has its own copy (HSDP), for example within a node with faster links. Default: all ranks."""
    offload: bool = False
    """Keeps master weights, moments and gradients in host memory (16 bytes per parameter) and updates them
    on CPUs; weights move to the GPU for every micro-batch's forward and backward."""
    context_parallel_size: PositiveInt = 1
    """Number of consecutive ranks that share each micro-batch, with a slice of its tokens each, for
    trajectories too long for one. Must divide `num_ranks` and the attention heads; fewer key-value
    heads are repeated.
    """
    cpus_per_rank: NonNegativeFloat = 1.0
    """Number of CPUs that Ray reserves per rank."""
    gpus_per_rank: AutoFloat = "auto"
    """0 trains on the CPU over gloo, 1 over NCCL; `auto` takes a GPU, or a share of one, if the cluster has
    any."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate; 0 freezes the policy."""
    warmup_steps: NaturalInt = 0
    """Length of the linear warm-up, in optimizer updates; at most those of the run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from the peak over the updates after the warm-up. It would reach zero one update after the last,
    so that every update trains."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Betas of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are clipped."""
    max_tokens_per_micro_batch: PositiveInt | Literal["auto"] = "auto"
    """Maximum number of tokens of one packed micro-batch, over all ranks that share it. `auto` takes what
    a GPU's memory holds, by an estimate; 8,192 on CPUs; and at least the longest row."""
    num_mini_batches: PositiveInt = 1
    """Number of optimizer updates per step and epoch."""
    num_epochs: PositiveInt = 1
    """Number of passes over the trajectories of a step."""
    vision_tower: Literal["trained", "frozen"] = "trained"
    """Whether the vision tower and projector of a vision-language model are trained."""
    vision_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the vision tower and projector, on the same schedule. Default:
    `learning_rate`."""
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Precision of forward and backward; master weights stay float32 (float64 with float64)."""
    head_dtype: Literal["compute", "float32"] = "float32"
    """Precision of logits; float32 adds up products of `compute_dtype` without rounding the sums."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn"] = "auto"
    """Attention kernel for packed sequences; `auto` takes torch's varlen kernel with FlashAttention-3
    if that is installed and the GPU is a Hopper one, else flash-attn if installed, else torch's varlen kernel
    as it is, and SDPA where none of them runs."""
    share_prefixes: bool = True
    """Computes the prompt that rows of a group have in common once in a micro-batch, with its images, where
    that saves time and the model's scores stay the same."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations recomputed by the backward: none, all but matrix products and attention, or all.
    """
    compile: bool | Literal["auto"] = "auto"
    """Compiles each transformer block except those of a vision tower: about a minute at the start, faster
    steps after. `auto` compiles on GPUs if the run is long enough to gain from it."""
    reshard: bool | Literal["auto"] = "auto"
    """Frees a block's gathered weights after its forward; false gathers once per update rather than twice per
    micro-batch and keeps 2 more bytes per parameter. `auto` keeps them where they fit into memory."""
    logprob_chunk_tokens: PositiveInt | Literal["auto"] = "auto"
    """Number of tokens whose logits are in memory at once. `auto` takes 1,024 on CPUs, and on GPUs the
    largest power of two, at most 8,192, whose logits fit into a tenth of free memory."""
    max_kl: PositiveFloat | None = None
    """Maximum KL divergence of the policy from the proximal one (k3, nats per token) for further updates on
    the same trajectories; beyond it, the rest of the updates is skipped. The first is always made."""
    lora: LoraSection | None = None
    """If present, only low-rank adapters are trained."""
    reward: RewardShaping = RewardShaping()
    """Shaping of rewards before any baseline."""
    advantage: AdvantageSection = GrpoAdvantage(kind="grpo")
    """Estimator of advantages."""
    resampling: ResamplingSection | None = None
    """If present, episodes of a batch are resampled by their reward after advantages are known."""
    loss: LossSection = DecoupledPpo(kind="decoupled_ppo")
    """Policy loss."""
    proximal: Literal["recomputed", "behavior", "interpolated"] = "recomputed"
    """Policy in the denominator of ratios: that of the learner at the start of the step, the one that
    sampled, or an interpolation between that and the current one by the age of a token, without a forward
    pass."""
    corrections: tuple[CorrectionSection, ...] = ()
    """Corrections of off-policy tokens, applied in order: weights multiply, and a token trains if all keep
    it."""
    count_rejected: bool = True
    """Counts rejected tokens and rows in the denominators of the loss."""
    kl: KlSection | None = None
    """If present, a KL penalty toward a reference policy."""
    critic: CriticSection | None = None
    """If present, a value function, for the advantages that need one."""
    aggregation: Aggregation = "token_mean"
    """Aggregation of token losses into one number, by global counts. Losses per row are averaged.
    """
    aggregation_scale: PositiveFloat | None = None
    """Token divisor of `sequence_mean_of_sums_scaled`: the maximum completion length."""
    mask_truncated: bool = False
    """Excludes truncated episodes from training; their rewards stay in the baselines."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    max_skipped_steps: PositiveInt = 5
    """Number of steps in a row with a non-finite loss after which the run ends."""

    @property
    def token_budget(self) -> int:
        """Return the maximum number of tokens of a micro-batch, as far as it is decided."""
        tokens = self.max_tokens_per_micro_batch
        return TOKEN_BUDGET if tokens == "auto" else tokens

    @property
    def num_data_ranks(self) -> int:
        """Return the number of shares into which a batch is divided."""
        return self.num_ranks // self.context_parallel_size
