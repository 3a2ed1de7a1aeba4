"""Memory of a learner rank, from nothing but headers of files."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from raylearner.config import report
from raylearner.config.learner import LearnerSection, LoraSection
from raylearner.config.memory import (
    GIB,
    KEYS_PER_TOKEN,
    Kept,
    ModelSize,
    choose_chunk,
    choose_kept,
    estimate,
    estimate_of,
)
from raylearner.config.schema import RunConfig

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
BLOCK = {
    "self_attn.q_proj.weight": [8, 8],
    "self_attn.q_proj.bias": [8],
    "mlp.up_proj.weight": [16, 8],
    "norm.weight": [8],
}
NUM_BLOCK, NUM_REST = 64 + 8 + 128 + 8, 100 * 8 + 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Headers alone: nobody may look at what would come after them."""
    shapes = {"model.embed_tokens.weight": [100, 8], "model.norm.weight": [8]}
    write(tmp_path / "model-1.safetensors", shapes | {"lm_head.weight": [100, 8]})
    for layer in range(2):
        names = {f"model.layers.{layer}.{name}": shape for name, shape in BLOCK.items()}
        write(tmp_path / f"model-{layer + 2}.safetensors", names)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def write(path: Path, shapes: dict[str, list[int]]) -> None:
    header = json.dumps({n: {"dtype": "F32", "shape": s} for n, s in shapes.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def size_of(folder: Path) -> ModelSize:
    size = ModelSize.of(folder)
    assert size is not None
    return size


def test_parameters_are_counted_by_block_and_a_tied_head_once(folder: Path) -> None:
    size = size_of(folder)
    assert size.num_parameters == 2 * NUM_BLOCK + NUM_REST
    assert (size.num_block, size.num_rest, size.num_blocks) == (NUM_BLOCK, NUM_REST, 2)
    assert size.attention_size == (2 + 2 * 1) * 4
    assert size.num_adapters(LoraSection(rank=3)) == 2 * 3 * ((8 + 8) + (8 + 16))
    assert size.num_adapters(LoraSection(rank=3, target_modules=("q_proj",))) == 2 * 3 * (8 + 8)


def test_a_tower_counts_as_it_is_trained_or_frozen(folder: Path) -> None:
    tower = {
        "visual.patch_embed.weight": [6, 5],
        "visual.blocks.0.attn.qkv.weight": [18, 6],
        "visual.blocks.1.attn.qkv.weight": [18, 6],
    }
    blind = size_of(folder)
    write(folder / "model-4.safetensors", tower)
    vision = {"depth": 2, "hidden_size": 6, "intermediate_size": 9, "spatial_merge_size": 2}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vision_config": vision}))
    size, num_tower = size_of(folder), 30 + 2 * 108
    assert size.num_parameters == blind.num_parameters + num_tower
    assert (size.num_blocks, size.linears) == (blind.num_blocks, blind.linears)
    trained, frozen = (
        estimate(LearnerSection(vision_tower=kind), size) for kind in ("trained", "frozen")
    )
    assert trained.moments == 8 * size.num_parameters
    assert (frozen.moments, frozen.gradients) == (
        8 * blind.num_parameters,
        4 * blind.num_parameters,
    )
    assert frozen.masters == trained.masters == 4 * size.num_parameters
    assert frozen.activations == estimate(LearnerSection(), blind).activations
    of_patch = 2 * (18 + 3 * 6 + 2 * 9 + 8 * 6 + 2 * 9)
    assert trained.activations - frozen.activations == 8192 * 2 * 4 * of_patch
    lora = LoraSection(rank=3)
    num_adapters = size.num_adapters(lora) - size.num_adapters(lora, is_tower_frozen=True)
    assert num_adapters == 2 * 3 * (6 + 18)
    assert size.num_adapters(lora, is_tower_frozen=True) == blind.num_adapters(lora)


@pytest.mark.parametrize("content", [b"", b"\0" * 4, b"\xff" * 16, b"\5\0\0\0\0\0\0\0{}x[]"])
def test_the_size_of_unreadable_files_is_not_guessed(folder: Path, content: bytes) -> None:
    (folder / "model-1.safetensors").write_bytes(content)
    assert ModelSize.of(folder) is None
    assert ModelSize.of(folder / "nowhere") is None


@pytest.mark.parametrize(
    ("changes", "bytes_by_part"),
    [
        ({}, {"masters": 4, "moments": 8, "gradients": 4}),
        ({"num_ranks": 4}, {"masters": 1, "moments": 2, "gradients": 1}),
        ({"num_ranks": 4, "shard_size": 2}, {"masters": 2, "moments": 4, "gradients": 2}),
        ({"compute_dtype": "float64"}, {"masters": 8, "moments": 16, "gradients": 8}),
    ],
)
def test_state_is_sixteen_bytes_a_parameter_over_the_ranks_of_a_copy(
    folder: Path, changes: dict[str, Any], bytes_by_part: dict[str, int]
) -> None:
    size = size_of(folder)
    found = estimate(LearnerSection(**changes), size)
    for part, each in bytes_by_part.items():
        assert getattr(found, part) == size.num_parameters * each, part


def test_what_is_whole_or_depends_on_tokens_is_counted_apart(folder: Path) -> None:
    size = size_of(folder)
    section = LearnerSection(
        max_tokens_per_micro_batch=4096, logprob_chunk_tokens=512, compute_dtype="bfloat16"
    )
    found = estimate(section, size)
    whole, unreduced = 2 * (2 * NUM_BLOCK + NUM_REST), 2 * NUM_BLOCK + 4 * NUM_REST
    assert found.gathered == whole + unreduced
    assert found.logits == 4 * 512 * 100 * 4
    assert found.total == found.masters * 4 + found.gathered + found.activations + found.logits
    full = estimate(section.model_copy(update={"activation_checkpointing": "full"}), size)
    selective = estimate(section.model_copy(update={"activation_checkpointing": "selective"}), size)
    assert full.activations < selective.activations < found.activations
    halves = estimate(section.model_copy(update={"context_parallel_size": 2}), size)
    assert halves.activations * 2 == found.activations
    apart = estimate(section.model_copy(update={"share_prefixes": False}), size)
    of_key = 2 * 2 * size.attention_size
    assert found.activations - apart.activations == 4096 * (KEYS_PER_TOKEN - 1) * of_key
    adapters = estimate(section.model_copy(update={"lora": LoraSection(rank=3)}), size)
    assert adapters.masters == 240 * 4 + size.num_parameters * 2
    assert adapters.moments == 240 * 8


def test_check_shows_memory_if_the_model_is_local(folder: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"kind": "pretrained", "path": str(folder)},
            "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
            "data": {"train": {"kind": "calculator"}},
            "environment": {"kind": "single_turn"},
            "rewards": {"functions": [{"kind": "response_length", "target_tokens": 12}]},
        }
    )
    rows = dict(report.derived(config))
    assert rows["model"] == f"{2 * NUM_BLOCK + NUM_REST:,} parameters in 2 blocks"
    assert rows["learner memory"].startswith("about ")
    assert rows["engine memory"].startswith("0.85 of its share of a GPU: 0.00 GiB of weights")
    elsewhere = config.model.model_copy(update={"path": "owner/name"})
    assert "model" not in dict(report.derived(config.model_copy(update={"model": elsewhere})))


@pytest.mark.parametrize(
    ("reference", "num_states"),
    [({"kind": "frozen"}, 1), ({"kind": "frozen", "path": "elsewhere"}, 0)],
)
def test_a_reference_and_a_critic_of_their_own_count(
    folder: Path, reference: dict[str, str], num_states: int
) -> None:
    """Of a path that is not here nothing is known."""
    alone = estimate_of(LearnerSection(), folder)
    kl = {"coefficient": 0.1, "reference": reference}
    critic = {"trunk": "own"}
    section = LearnerSection.model_validate({"kl": kl})
    of_reference = estimate_of(section, folder)
    of_both = estimate_of(LearnerSection.model_validate({"kl": kl, "critic": critic}), folder)
    assert alone is not None
    assert of_reference is not None
    assert of_both is not None
    assert of_reference.masters == (1 + num_states) * alone.masters
    assert of_reference.moments == alone.moments
    assert of_both.masters == of_reference.masters + alone.masters
    assert of_both.moments == 2 * alone.moments
    assert of_both.gathered - of_reference.gathered == 2 * NUM_REST
    kept = [estimate_of(s, folder, kept=Kept(weights=True)) for s in (LearnerSection(), section)]
    more = [0 if found is None else found.gathered for found in kept]
    assert more[1] - more[0] == num_states * 2 * size_of(folder).num_parameters
    assert estimate_of(LearnerSection(), folder / "nowhere") is None


def test_a_model_without_room_is_refused_with_what_would_help(folder: Path) -> None:
    found = estimate(LearnerSection(), size_of(folder))
    assert found.refusal(found.minimum, free_on_host=0) is None
    said = found.refusal(found.minimum - 1, free_on_host=0)
    assert said is not None
    for word in ("does not fit", "offload", "num_ranks", "learner.lora"):
        assert word in said
    assert found.advice(found.total) is None
    assert "activation_checkpointing" in str(found.advice(found.total - 1))
    section = LearnerSection(offload=True)
    offloaded = estimate(section, size_of(folder))
    assert offloaded.minimum == found.gathered
    assert offloaded.refusal(found.gathered, free_on_host=found.state) is None
    assert "host memory" in str(offloaded.refusal(GIB, free_on_host=found.state - 1))
    assert "offload" not in str(offloaded.refusal(0, free_on_host=GIB))


def test_logits_take_a_tenth_of_a_gpus_memory(folder: Path) -> None:
    section = LearnerSection()
    of_token = 4 * 100 * 4

    def chosen(free: float, section: LearnerSection = section, *, is_gpu: bool = True) -> int:
        return choose_chunk(section, folder, free=math.ceil(free), is_gpu=is_gpu)

    assert chosen(GIB) == 8192
    assert chosen(8192 * of_token * 10 - 1) == 4096
    assert chosen(8192 * of_token * 5, section.model_copy(update={"compile": True})) == 8192
    assert chosen(0) == 256
    assert chosen(GIB, is_gpu=False) == 1024
    assert chosen(0, section.model_copy(update={"logprob_chunk_tokens": 7})) == 7
    assert estimate(section, size_of(folder)).logits == 1024 * of_token


def test_the_most_is_kept_that_fits_into_four_fifths_of_free_memory(folder: Path) -> None:
    for layer in (2, 3):
        names = {f"model.layers.{layer}.{name}": shape for name, shape in BLOCK.items()}
        write(folder / f"model-{layer + 2}.safetensors", names)
    section, size = LearnerSection(num_ranks=2), size_of(folder)

    def least(kept: Kept) -> int:
        return math.ceil(estimate(section, size, kept=kept).total / 0.8)

    everything, gradients = Kept(weights=True, gradients=True), Kept(gradients=True)
    assert choose_kept(section, folder, free=least(everything)) == everything
    assert choose_kept(section, folder, free=least(everything) - 2) == gradients
    assert choose_kept(section, folder, free=least(Kept()) - 2) == Kept()
    frees = section.model_copy(update={"reshard": True})
    assert choose_kept(frees, folder, free=GIB) == gradients
    holds = section.model_copy(update={"reshard": False})
    assert choose_kept(holds, folder, free=0) == Kept(weights=True)
    assert choose_kept(section, folder / "nowhere", free=GIB) == Kept()
    unreduced = 4 * size.num_parameters + 2 * NUM_BLOCK + 4 * NUM_REST
    found = estimate(section, size, kept=everything)
    assert found.gathered == 2 * size.num_parameters + unreduced
