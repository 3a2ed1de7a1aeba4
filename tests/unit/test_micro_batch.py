"""The budget of a micro-batch follows from the memory of a GPU, and is at least the longest row."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from minimal import QUICKSTART

from raylearner.config import checks
from raylearner.config.devices import Devices, Gpu
from raylearner.config.loader import load
from raylearner.config.memory import GIB
from raylearner.config.resources import resolve
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError

KEY = "learner.max_tokens_per_micro_batch"
LONG = {"renderer__max_response_tokens": 30_000, "actors__engine__max_model_tokens": 40_000}
WIDTH, INNER, NUM_BLOCKS, VOCABULARY = 1536, 8960, 28, 151_936


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Headers alone of a model of 1.5 billion parameters."""
    shapes = {"model.embed_tokens.weight": [VOCABULARY, WIDTH]}
    for layer in range(NUM_BLOCKS):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.self_attn.{n}_proj.weight": [WIDTH, WIDTH] for n in "qo"}
        shapes |= {f"{block}.self_attn.{n}_proj.weight": [256, WIDTH] for n in "kv"}
        shapes |= {f"{block}.mlp.{n}_proj.weight": [INNER, WIDTH] for n in ("up", "gate")}
        shapes |= {f"{block}.mlp.down_proj.weight": [WIDTH, INNER]}
    header = json.dumps({n: {"dtype": "BF16", "shape": s} for n, s in shapes.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    sizes = {
        "num_hidden_layers": NUM_BLOCKS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


def configured(folder: Path, **changes: Any) -> RunConfig:
    options = {
        "model": "{kind: pretrained, path: some/model}",
        "actors__num_actors": 1,
        "learner__compute_dtype": "bfloat16",
        KEY.replace(".", "__"): "auto",
    }
    pairs = (options | changes).items()
    config = load([QUICKSTART], [f"{key.replace('__', '.')}={value}" for key, value in pairs])
    model = config.model.model_copy(
        update={"path": str(folder)}
    )  # of which headers alone are there
    return config.model_copy(update={"model": model})


def gpu(gib: float | None) -> Devices:
    return Devices(gpus=(Gpu("H200", 9.0, None if gib is None else int(gib * GIB)),))


def budget(config: RunConfig, gpu_gib: float | None, num_gpus: float = 2) -> int:
    resolved = resolve(config, num_gpus=num_gpus, devices=gpu(gpu_gib))
    found = resolved.config.learner.max_tokens_per_micro_batch
    lines = [line for line in resolved.decisions if KEY in line]
    assert len(lines) == (gpu_gib is not None)
    assert all(f"{found:,}" in line for line in lines)
    assert found != "auto"
    assert not list(checks._lengths(resolved.config))
    return found


def test_a_larger_gpu_takes_larger_micro_batches(folder: Path) -> None:
    config = configured(folder)
    assert [budget(config, gib) for gib in (141, 80, 48)] == [16_384, 8192, 2048]
    full = configured(folder, learner__activation_checkpointing="full")
    assert budget(full, 80) == 65_536
    shared = configured(folder, learner__gpus_per_rank=0.5, actors__gpus_per_actor=0.5)
    assert budget(shared, 160, num_gpus=1) == 8192
    assert budget(configured(folder, learner__num_ranks=4), 48, num_gpus=5) == 8192


def test_it_is_a_fixed_number_where_memory_is_unknown_and_never_below_the_longest_row(
    folder: Path,
) -> None:
    config = configured(folder)
    assert budget(config, None) == 8192
    assert budget(config, None, num_gpus=0) == 8192
    assert budget(configured(folder / "nowhere"), 141) == 8192
    long = configured(folder, **LONG)
    longest = long.max_sequence_tokens
    assert longest > 30_000
    assert budget(long, None) == longest
    assert budget(configured(folder, **LONG, learner__activation_checkpointing="full"), 141) > (
        longest
    )


def test_a_row_that_does_not_fit_is_refused_with_the_keys_that_help(folder: Path) -> None:
    with pytest.raises(ConfigError, match=KEY) as caught:
        budget(configured(folder, **LONG), 48)
    for key in ("activation_checkpointing", "offload", "num_ranks", "lora", "max_response_tokens"):
        assert key in str(caught.value)
    set_by_hand = configured(folder, **{KEY.replace(".", "__"): 512})
    assert resolve(set_by_hand, num_gpus=2, devices=gpu(1)).config.learner.token_budget == 512
