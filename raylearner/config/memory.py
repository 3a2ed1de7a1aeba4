"""Estimate the memory of a learner rank from the headers of a model's files, without loading it.

Sizes of parameters are exact. Activations are an estimate of the tensors that the backward of a
transformer block keeps (after Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, without attention
scores, which no kernel here keeps).
"""

import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from raylearner.config.learner import LearnerSection, LoraSection
from raylearner.learner.objective.kl import AdapterOffReference, FrozenReference

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MAX_HEADER_BYTES = 100_000_000
LOGIT_COPIES = 4
"""Number of float32 copies of a chunk's logits during the computation of their gradient."""
COMPILED_LOGIT_COPIES = 2
"""The same if the compiler fuses that: the logits, and their gradient."""
CHUNK_TOKENS = 1024
"""Tokens of a chunk of the head on CPUs, and of a model of unknown size."""
CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
"""Tokens of a chunk on GPUs: the first that fits. Larger ones save nothing."""
LOGITS_SHARE = 0.1
"""Share of free memory for logits."""
GATHERED_BLOCKS = 2
"""Number of gathered blocks: the one that computes, and the one that is prefetched."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.(.+)\.(?:weight|bias)$")
_TOWER = re.compile(r"^(?:model\.)?visual\.")

KEPT_SHARE = 0.8
"""Share of free memory up to which a learner keeps what it could free and make again: activations are
estimated to a third."""

KEYS_PER_TOKEN = 6
"""Maximum number of keys of a micro-batch, as a multiple of its token budget. Keys of a shared prefix are
gathered for each row, one layer at a time."""

Linears = tuple[tuple[str, int, int], ...]
"""Linear layers of all blocks: name within the block, inputs, outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """A vision tower and its projector. Numbers count elements."""

    num_parameters: int
    num_blocks: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    patches_per_token: int
    """Number of patches that become one token."""
    linears: Linears


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a model. Numbers count elements."""

    num_parameters: int
    num_block: int
    """Parameters of the largest block."""
    num_rest: int
    """Parameters outside of blocks: embeddings and head."""
    num_blocks: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    """Width of queries, keys and values together."""
    vocab_size: int
    linears: Linears
    """Linear layers outside of a vision tower."""
    tower: TowerSize | None = None
    """Also counted in the parameters."""

    @classmethod
    def of(cls, folder: Path) -> "ModelSize | None":
        """Return the size of a local model, or None without its files or for an unknown architecture."""
        try:
            folder = folder.expanduser()
            config = json.loads((folder / "config.json").read_text())
            return _size(config, shapes(folder))
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None

    def num_trained(self, *, is_tower_frozen: bool) -> int:
        """Return the number of trained parameters without adapters."""
        frozen = 0 if self.tower is None or not is_tower_frozen else self.tower.num_parameters
        return self.num_parameters - frozen

    def num_adapters(self, lora: LoraSection, *, is_tower_frozen: bool = False) -> int:
        """Return the number of parameters of the adapters."""
        targets = lora.target_modules
        of_tower = () if self.tower is None or is_tower_frozen else self.tower.linears
        return sum(
            lora.rank * (inputs + outputs)
            for name, inputs, outputs in (*self.linears, *of_tower)
            if targets == "all-linear" or name.rpartition(".")[2] in targets
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a rank keeps from the first micro-batch of an update to the last, to save time."""

    weights: bool = False
    """Gathered weights: each is gathered once per update."""
    gradients: bool = False
    """Gradients of whole parameters: they are reduced over ranks once per update."""

    def __str__(self) -> str:
        weights = "gathered once per update" if self.weights else "gathered for every micro-batch"
        gradients = "once per update" if self.gradients else "after every micro-batch"
        return f"weights are {weights}, gradients reduced {gradients}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes per rank. The first three are in host memory if `is_offloaded`."""

    masters: int
    moments: int
    gradients: int
    gathered: int
    """Gathered weights in the compute type, and their gradients until they are reduced."""
    activations: int
    logits: int
    is_offloaded: bool

    @property
    def state(self) -> int:
        return self.masters + self.moments + self.gradients

    @property
    def minimum(self) -> int:
        """Return the bytes on the device without activations."""
        return self.gathered + (0 if self.is_offloaded else self.state)

    @property
    def total(self) -> int:
        """Return the bytes on the device with the configured micro-batch."""
        return self.minimum + self.activations + self.logits

    def __str__(self) -> str:
        parts = ", ".join(
            f"{field.name} {getattr(self, field.name) / GIB:.2f}"
            for field in fields(self)
            if field.name != "is_offloaded"
        )
        where = ", the first three in host memory" if self.is_offloaded else ""
        return f"about {self.total / GIB:.2f} GiB per rank ({parts}{where})"

    def refusal(self, free: int, *, free_on_host: int) -> str | None:
        """Return an error with advice if it cannot fit into `free` bytes of a device."""
        if self.is_offloaded and self.state > free_on_host:
            return (
                f"offloaded masters, moments and gradients need {self.state / GIB:.1f} GiB of host memory per"
                f" rank, but {free_on_host / GIB:.1f} GiB are free; raise learner.num_ranks over more"
                " machines, or train adapters (`learner.lora: {}`)"
            )
        if self.minimum <= free:
            return None
        offload = "" if self.is_offloaded else "learner.offload: true, "
        return (
            f"does not fit: without activations a learner rank needs {self.minimum / GIB:.1f} GiB, but"
            f" {free / GIB:.1f} GiB of its device are free; {self}. Set {offload}a larger"
            " learner.num_ranks (or shard_size), or train adapters (`learner.lora: {}`)"
        )

    def advice(self, free: int) -> str | None:
        """Return advice if activations may not fit."""
        if self.total <= free:
            return None
        return (
            f"{self}, but {free / GIB:.1f} GiB are free: if it runs out of memory, lower"
            " learner.max_tokens_per_micro_batch or logprob_chunk_tokens, or set"
            " learner.activation_checkpointing"
        )


def choose_chunk(config: LearnerSection, folder: Path, *, free: int, is_gpu: bool) -> int:
    """Return the number of tokens whose logits a device with `free` bytes holds at once."""
    if config.logprob_chunk_tokens != "auto":
        return config.logprob_chunk_tokens
    size = ModelSize.of(folder)
    if size is None or not is_gpu:
        return CHUNK_TOKENS
    of_token = _bytes_of_logits(config, size)
    return next((n for n in CHUNKS if n * of_token <= LOGITS_SHARE * free), CHUNKS[-1])


def choose_kept(config: LearnerSection, folder: Path, *, free: int) -> Kept:
    """Return what a rank with `free` bytes for the model in `folder` keeps: the most that fits.

    Gradients of a model of unknown size are not kept. `learner.reshard` decides about weights, if it is set.
    """
    reshards = config.reshard
    options = [
        Kept(weights=weights, gradients=gradients)
        for gradients in (True, False)
        for weights in ((True, False) if reshards == "auto" else (not reshards,))
    ]
    for kept in options:
        found = estimate_of(config, folder, kept=kept)
        if found is not None and found.total <= KEPT_SHARE * free:
            return kept
    return options[-1]


def estimate_of(
    config: LearnerSection, folder: Path, *, kept: Kept | None = None
) -> MemoryEstimate | None:
    """Return the estimate for the model in `folder` with its critic and reference.

    None if the size of the model is unknown; a critic or reference of unknown size is left out.
    """
    size = ModelSize.of(folder)
    if size is None:
        return None
    critic = reference = None
    if config.critic is not None and config.critic.trunk == "own":
        critic = size if config.critic.path is None else ModelSize.of(Path(config.critic.path))
    kl = config.kl
    if kl is not None and kl.coefficient > 0 and not isinstance(kl.reference, AdapterOffReference):
        path = kl.reference.path if isinstance(kl.reference, FrozenReference) else None
        reference = size if path is None else ModelSize.of(Path(path))
    return estimate(config, size, critic=critic, reference=reference, kept=kept)


def estimate(
    config: LearnerSection,
    size: ModelSize,
    *,
    critic: ModelSize | None = None,
    reference: ModelSize | None = None,
    kept: Kept | None = None,
) -> MemoryEstimate:
    """Return the estimate for a policy of that size, with a separate critic and reference.

    Without `kept` it is the least that the configuration permits.
    """
    kept = kept or Kept(weights=config.reshard is False)
    shards = config.shard_size or config.num_ranks
    compute = BYTES[config.compute_dtype]
    master = 8 if config.compute_dtype == "float64" else 4
    is_tower_frozen = config.vision_tower == "frozen"
    if config.lora is None:
        held, trained = size.num_parameters, size.num_trained(is_tower_frozen=is_tower_frozen)
        frozen = 0
    else:
        held = trained = size.num_adapters(config.lora, is_tower_frozen=is_tower_frozen)
        frozen = size.num_parameters
    if critic is not None:
        held += critic.num_parameters
        trained += critic.num_trained(is_tower_frozen=is_tower_frozen)
    of_reference = 0 if reference is None else reference.num_parameters
    # Scores of one micro-batch after another keep what is gathered of every model.
    models = [size, *(other for other in (critic, reference) if other is not None)]
    whole = GATHERED_BLOCKS * max(model.num_block for model in models)
    whole += sum(model.num_rest for model in models)
    if kept.weights:
        whole = sum(model.num_parameters for model in models)
    unreduced = size.num_block * compute + size.num_rest * master if config.lora is None else 0
    if kept.gradients:
        # The critic's are reduced before the policy's begin.
        of_critic = 0 if critic is None else critic.num_trained(is_tower_frozen=is_tower_frozen)
        unreduced += max(trained - of_critic, of_critic) * master
    per_token = _kept_per_token(size, config.activation_checkpointing)
    if config.share_prefixes:
        # Keys, values and their gradients, which kernels make for each query head first.
        per_token += (KEYS_PER_TOKEN - 1) * 2 * size.attention_size
    if size.tower is not None and not is_tower_frozen:
        # Upper bound: a micro-batch of image tokens only.
        of_patch = _kept_per_token(size.tower, config.activation_checkpointing)
        per_token += size.tower.patches_per_token * of_patch
    tokens = math.ceil(config.token_budget / config.context_parallel_size)
    chunk = config.logprob_chunk_tokens
    chunk = min(CHUNK_TOKENS if chunk == "auto" else chunk, tokens)
    return MemoryEstimate(
        masters=((held + of_reference) * master + frozen * compute) // shards,
        moments=2 * trained * master // shards,
        gradients=trained * master // shards,
        gathered=whole * compute + unreduced,
        activations=tokens * compute * per_token,
        logits=chunk * _bytes_of_logits(config, size),
        is_offloaded=config.offload,
    )


def _bytes_of_logits(config: LearnerSection, size: ModelSize) -> int:
    """Return the bytes that the head needs for each token of a chunk."""
    copies = COMPILED_LOGIT_COPIES if config.compile is True else LOGIT_COPIES
    return copies * size.vocab_size * (8 if config.compute_dtype == "float64" else 4)


def _kept_per_token(size: ModelSize | TowerSize, checkpointing: str) -> int:
    """Return the number of elements that the blocks keep for the backward of one token."""
    hidden, inner, attention = size.hidden_size, size.intermediate_size, size.attention_size
    products = attention + 3 * hidden + 2 * inner  # q, k, v, attention output, two outputs, gates
    # Norms keep their input, in float32 twice as wide, and their output; the gated unit two more.
    everything = products + 8 * hidden + 2 * inner
    if checkpointing == "none":
        return size.num_blocks * everything
    kept = hidden if checkpointing == "full" else hidden + products
    return size.num_blocks * kept + everything


def _size(whole: dict[str, Any], found: dict[str, tuple[int, ...]]) -> ModelSize:
    config = whole.get("text_config", whole)
    is_tied = whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    counts: Counter[str] = Counter()
    linears: list[tuple[str, int, int]] = []
    for name, shape in found.items():
        if is_tied and name == "lm_head.weight":
            continue
        match = _BLOCK.match(name)
        counts[match[1] if match else ""] += math.prod(shape)
        if match and len(shape) == 2 and not _TOWER.match(name):
            linears.append((match[2], shape[1], shape[0]))
    rest = counts.pop("", 0)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return ModelSize(
        num_parameters=sum(counts.values()) + rest,
        num_block=max(counts.values()),
        num_rest=rest,
        num_blocks=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        attention_size=(heads + 2 * kv_heads) * width,
        vocab_size=config["vocab_size"],
        linears=tuple(linears),
        tower=_tower(whole["vision_config"], found) if "vision_config" in whole else None,
    )


def _tower(config: dict[str, Any], found: dict[str, tuple[int, ...]]) -> TowerSize:
    inside = {name: shape for name, shape in found.items() if _TOWER.match(name)}
    blocks = ((_BLOCK.match(name), shape) for name, shape in inside.items() if len(shape) == 2)
    return TowerSize(
        num_parameters=sum(map(math.prod, inside.values())),
        num_blocks=config["depth"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        attention_size=3 * config["hidden_size"],
        patches_per_token=config["spatial_merge_size"] ** 2,
        linears=tuple((match[2], shape[1], shape[0]) for match, shape in blocks if match),
    )


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a directory's files, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= file_shapes(path)
    return found


def file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a safetensors file. Raises `ValueError` or `OSError`."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
