"""A dense model of a given size with random weights on disk, made where it is needed: no download."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES

POOL_SIZE = 16_777_259
"""Number of distinct random values, a prime: rows of a matrix start at different ones."""
SHARD_BYTES = 4 * 2**30
DEVIATION = 0.02


def random_model(folder: Path, size: str, *, tokenizer: str) -> Path:
    """Make and return a directory with a Qwen2-like model in bfloat16, unless it is there.

    The vocabulary is the tokenizer's: ids without a token would have to be banned in every request.
    8B has three more blocks in return.
    """
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoTokenizer, Qwen2Config

    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    shape: dict[str, Any] = {**SHAPES[size], "vocab_size": len(loaded)}
    if size == "8B":
        shape["num_hidden_layers"] = 35
    config = Qwen2Config(
        **shape,
        max_position_embeddings=32_768,
        use_sliding_window=False,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        bos_token_id=loaded.bos_token_id,
        eos_token_id=loaded.eos_token_id,
    )
    partial.mkdir(parents=True)
    _write_weights(partial, config)
    loaded.save_pretrained(partial)
    config.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was sooner
        shutil.rmtree(partial)
    return folder


def _write_weights(folder: Path, config: Any) -> None:
    """Write shards with an index, each tensor cut out of one pool of normal values."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
    shapes = {name: t.shape for name, t in model.state_dict().items() if name not in tied}
    pool = torch.randn(POOL_SIZE, generator=torch.Generator().manual_seed(0)) * DEVIATION
    pool = pool.to(torch.bfloat16)
    shards: list[dict[str, torch.Size]] = [{}]
    num_bytes = 0
    for name, shape in shapes.items():
        if num_bytes > SHARD_BYTES:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = shape
        num_bytes += 2 * math.prod(shape)
    places: dict[str, str] = {}
    start = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, shape in shard.items():
            count = math.prod(shape)
            if name.endswith("norm.weight"):
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            elif name.endswith("bias"):
                tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
            else:
                repeated = pool.repeat(math.ceil((start + count) / POOL_SIZE))
                tensors[name] = repeated[start : start + count].reshape(shape).contiguous()
                start = (start + count) % POOL_SIZE
            places[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
