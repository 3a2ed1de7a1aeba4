"""How much memory a learner rank takes, from the headers of a model's files: before anything is loaded.

Sizes of parameters are exact, those of activations an estimate: what the backward of a transformer
block keeps (after Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, without attention scores,
which no kernel here keeps). Nothing of a file but its header is read, and no library of tensors.
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
"""Of a chunk's logits in float32, while their gradient is made."""
GATHERED_BLOCKS = 2
"""The block that computes, and the one that is fetched meanwhile."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.(.+)\.(?:weight|bias)$")
_TOWER = re.compile(r"^(?:model\.)?visual\.")

Linears = tuple[tuple[str, int, int], ...]
"""Of all blocks: name within its block, inputs, outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSize:
    """The vision tower within a model, its projector included. Numbers count elements."""

    num_parameters: int
    num_blocks: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    patches_per_token: int
    """Positions of the tower that become one of the model's."""
    linears: Linears


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model by its shapes. Numbers count elements."""

    num_parameters: int
    num_block: int
    """Of the largest block."""
    num_rest: int
    """Of all that lies in no block: embeddings and head."""
    num_blocks: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    """Widths of queries, keys and values together."""
    vocab_size: int
    linears: Linears
    """Without those of a vision tower."""
    tower: TowerSize | None = None
    """Counted in the parameters too."""

    @classmethod
    def of(cls, folder: Path) -> "ModelSize | None":
        """None where the files are not here, or no transformer that this can tell the size of."""
        try:
            config = json.loads((folder / "config.json").read_text())
            return _size(config, shapes(folder))
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return None

    def num_trained(self, *, is_tower_frozen: bool) -> int:
        """Parameters that are trained where there are no adapters."""
        frozen = 0 if self.tower is None or not is_tower_frozen else self.tower.num_parameters
        return self.num_parameters - frozen

    def num_adapters(self, lora: LoraSection, *, is_tower_frozen: bool = False) -> int:
        """Parameters of the adapters that would be trained."""
        targets = lora.target_modules
        of_tower = () if self.tower is None or is_tower_frozen else self.tower.linears
        return sum(
            lora.rank * (inputs + outputs)
            for name, inputs, outputs in (*self.linears, *of_tower)
            if targets == "all-linear" or name.rpartition(".")[2] in targets
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank. The first three are in host memory where `is_offloaded`."""

    masters: int
    moments: int
    gradients: int
    gathered: int
    """Weights in the compute type while they are whole, and their gradients until they are reduced."""
    activations: int
    logits: int
    is_offloaded: bool

    @property
    def state(self) -> int:
        return self.masters + self.moments + self.gradients

    @property
    def least(self) -> int:
        """On the device, however short the micro-batch is."""
        return self.gathered + (0 if self.is_offloaded else self.state)

    @property
    def total(self) -> int:
        """On the device, with the micro-batch that is configured."""
        return self.least + self.activations + self.logits

    def __str__(self) -> str:
        parts = ", ".join(
            f"{field.name} {getattr(self, field.name) / GIB:.2f}"
            for field in fields(self)
            if field.name != "is_offloaded"
        )
        where = ", the first three in host memory" if self.is_offloaded else ""
        return f"about {self.total / GIB:.2f} GiB a rank ({parts}{where})"

    def refusal(self, free: int, *, free_on_host: int) -> str | None:
        """Why it cannot fit into `free` bytes of a device, and what would help."""
        if self.is_offloaded and self.state > free_on_host:
            return (
                f"offloaded masters, moments and gradients take {self.state / GIB:.1f} GiB of each"
                f" rank's host, and {free_on_host / GIB:.1f} GiB are free; raise learner.num_ranks over"
                " more machines, or train adapters (`learner.lora: {}`)"
            )
        if self.least <= free:
            return None
        offload = "" if self.is_offloaded else "learner.offload: true, "
        return (
            f"it does not fit: without any activations a learner rank takes {self.least / GIB:.1f} GiB,"
            f" and {free / GIB:.1f} GiB of its device are free; {self}. Set {offload}a larger"
            " learner.num_ranks (or shard_size), or train adapters (`learner.lora: {}`)"
        )

    def advice(self, free: int) -> str | None:
        """What to lower where activations may not fit, which only a run can tell."""
        if self.total <= free:
            return None
        return (
            f"{self}, and {free / GIB:.1f} GiB are free: where it runs out of memory, lower"
            " learner.max_tokens_per_micro_batch or logprob_chunk_tokens, or set"
            " learner.activation_checkpointing"
        )


def estimate_of(config: LearnerSection, folder: Path) -> MemoryEstimate | None:
    """Of the model in `folder` with the critic and the reference that the section asks for.

    None where the model's files tell no size; a critic or reference without one is left out.
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
    return estimate(config, size, critic=critic, reference=reference)


def estimate(
    config: LearnerSection,
    size: ModelSize,
    *,
    critic: ModelSize | None = None,
    reference: ModelSize | None = None,
) -> MemoryEstimate:
    """Of a learner whose policy is of that size, with a critic and a reference of their own."""
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
    whole = GATHERED_BLOCKS * size.num_block + size.num_rest
    if not config.reshard:
        whole = size.num_parameters
    unreduced = size.num_block * compute + size.num_rest * master if config.lora is None else 0
    kept = _kept_per_token(size, config.activation_checkpointing)
    if size.tower is not None and not is_tower_frozen:
        # As though images that are shown once filled the micro-batch: no more can come together.
        of_patch = _kept_per_token(size.tower, config.activation_checkpointing)
        kept += size.tower.patches_per_token * of_patch
    tokens = math.ceil(config.max_tokens_per_micro_batch / config.context_parallel_size)
    chunk = min(config.logprob_chunk_tokens, tokens)
    return MemoryEstimate(
        masters=((held + of_reference) * master + frozen * compute) // shards,
        moments=2 * trained * master // shards,
        gradients=trained * master // shards,
        gathered=whole * compute + unreduced,
        activations=tokens * compute * kept,
        logits=LOGIT_COPIES * chunk * size.vocab_size * master,
        is_offloaded=config.offload,
    )


def _kept_per_token(size: ModelSize | TowerSize, checkpointing: str) -> int:
    """Elements that the blocks keep for the backward of one token."""
    hidden, inner, attention = size.hidden_size, size.intermediate_size, size.attention_size
    products = (
        attention + 3 * hidden + 2 * inner
    )  # q, k, v, what attention gives, two outputs, gates
    # Norms keep their input, in float32 twice as wide, and what they give; the gated unit two more.
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
    """Of all tensors in a directory's files, by name; ValueError or OSError for what is none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= file_shapes(path)
    return found


def file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """From the header: eight bytes of length, then JSON (safetensors' own format)."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
