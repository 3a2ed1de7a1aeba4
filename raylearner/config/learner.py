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


class LoraSection(Section):
    """Adapters are trained and nothing else (LoRA, 2106.09685). A checkpoint's `model/` has them merged, in float32."""

    rank: PositiveInt = 32
    """Inner width of each adapter."""
    alpha: PositiveFloat = 64.0
    """Adapters count alpha / rank times."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get one: all but the head, or those whose names end so (`q_proj`)."""
    path: str | None = None
    """An adapter to go on from, in peft's form; rank, alpha and target_modules are then its own."""

    @property
    def own_keys(self) -> list[str]:
        """Keys set that an adapter to go on from decides itself."""
        if self.path is None:
            return []
        return sorted(self.model_fields_set & {"rank", "alpha", "target_modules"})


def lora_rank(section: LoraSection) -> int:
    """The rank that engines must make room for. Raises `ConfigError` naming the file it is read from."""
    if section.path is None:
        return section.rank
    file = Path(section.path).expanduser() / "adapter_config.json"
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"learner.lora.path: {section.path!r} is no adapter in peft's form: {file}: {error!r}"
        ) from error


class LearnerSection(Section):
    """The learner group."""

    num_ranks: PositiveInt = 1
    """Learner actors, one rank each."""
    shard_size: PositiveInt | None = None
    """Ranks that share one copy of the parameters; with fewer than `num_ranks` each group of so many holds one (HSDP), as within a node whose links are faster. Default: all ranks."""
    offload: bool = False
    """Masters, moments and gradients live in host memory, 16 bytes a parameter, and CPUs make the updates; weights cross to the GPU for every micro-batch's forward and backward."""
    context_parallel_size: PositiveInt = 1
    """Neighbouring ranks that share each micro-batch, a slice of its tokens each, for trajectories too long for one. Divides `num_ranks` and the attention heads; fewer key-value heads are repeated."""
    cpus_per_rank: NonNegativeFloat = 1.0
    """CPUs that Ray reserves for one rank."""
    gpus_per_rank: AutoFloat = "auto"
    """0 trains on the CPU over gloo, 1 over NCCL; auto takes a GPU, or a share of one, where there is one."""
    learning_rate: NonNegativeFloat = 1e-6
    """Peak learning rate; 0 freezes the policy."""
    warmup_steps: NaturalInt = 0
    """Linear warm-up, in optimizer updates; at most those of the run."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from the peak over the updates after the warm-up. It would reach zero one update after the last, so that every update trains."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's moments."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm is clipped here."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Token budget of one packed micro-batch, over all ranks that share it."""
    num_mini_batches: PositiveInt = 1
    """Optimizer updates per take and epoch."""
    num_epochs: PositiveInt = 1
    """Passes over one take."""
    vision_tower: Literal["trained", "frozen"] = "trained"
    """Of a model that sees images: whether what turns them into tokens is trained, tower and projector."""
    vision_learning_rate: NonNegativeFloat | None = None
    """Peak learning rate of the tower and its projector, on the same schedule. Default: `learning_rate`."""
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Precision of forward and backward; masters stay float32 (float64 with float64)."""
    head_dtype: Literal["compute", "float32"] = "float32"
    """Precision of logits; float32 adds up products of `compute_dtype` without rounding the sums."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn"] = "auto"
    """Kernel for packed sequences; auto takes flash-attn where installed, else torch's own varlen kernel, and SDPA where neither runs."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward recomputes: nothing, all but matrix products and attention, or whole blocks."""
    compile: bool = False
    """Compiles each transformer block but a vision tower's: minutes at the start, faster steps after."""
    reshard: bool = True
    """Frees a block's gathered weights after its forward; off gathers once less in each micro-batch and keeps 2 bytes a parameter more."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    max_kl: PositiveFloat | None = None
    """Ends the reuse of a take: an update that finds the policy further than this from the proximal one (k3, nats per token) is not made, nor those after it. The first is always made."""
    lora: LoraSection | None = None
    """Present: low-rank adapters are trained, and nothing else."""
    reward: RewardShaping = RewardShaping()
    """Shaping of rewards before any baseline."""
    advantage: AdvantageSection = GrpoAdvantage(kind="grpo")
    """How rewards become advantages."""
    resampling: ResamplingSection | None = None
    """Present: episodes of a batch are redrawn by their reward after advantages are known."""
    loss: LossSection = DecoupledPpo(kind="decoupled_ppo")
    """The objective."""
    proximal: Literal["recomputed", "behavior", "interpolated"] = "recomputed"
    """The policy that ratios are taken to: the learner's at the start of the step, the one that sampled, or a guess between that and the current one from the age of a token, without a forward pass."""
    corrections: tuple[CorrectionSection, ...] = ()
    """Applied in order to off-policy tokens: weights multiply, a token trains if all keep it."""
    count_rejected: bool = True
    """Whether rejected tokens and rows stay in the denominators of the loss."""
    kl: KlSection | None = None
    """Present: a pull toward a reference policy."""
    critic: CriticSection | None = None
    """Present: a value head, for the advantages that need one."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, always by global counts. Losses by row take their mean."""
    aggregation_scale: PositiveFloat | None = None
    """Token divisor of sequence_mean_of_sums_scaled: the longest completion allowed."""
    mask_truncated: bool = False
    """Episodes that were cut off train nothing; their rewards stay in the baselines."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Entropy bonus."""
    max_skipped_steps: PositiveInt = 5
    """So many steps in a row with a non-finite loss end the run."""

    @property
    def num_data_ranks(self) -> int:
        """Shares that a batch is dealt into."""
        return self.num_ranks // self.context_parallel_size
