"""Export for other programs: the policy as a `from_pretrained` directory, adapters in peft's format.

Waits for: the other ranks, which must make the same calls, because weights are gathered.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from raylearner.learner.checkpoint.state import Save
from raylearner.learner.model import lora
from raylearner.learner.model.policy import PackedModel
from raylearner.types import PolicyVersion

MAX_SHARD_BYTES = 4_000_000_000
"""Maximum size of one safetensors file."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@dataclass(slots=True)
class _File:
    """Size of each tensor in a file, by name."""

    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


def export_model(
    folder: Path,
    model: PackedModel,
    save: Save,
    *,
    source: Path,
    dtype: torch.dtype,
    policy_version: PolicyVersion,
) -> None:
    """Write a `from_pretrained` directory: weights, config, the source's tokenizer files, a model card.

    Ranks take turns with the weight files; each keeps and writes only its own.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    files = _split_into_files(
        (name, torch.Size(shape).numel() * dtype.itemsize) for name, shape in model.weight_shapes()
    )
    if rank == 0:
        save.add(partial(_write_rest, folder, source, files, dtype, policy_version))
    weights = model.named_weights(dtype)
    for number, file in enumerate(files):
        tensors = _take_next(weights, file, should_keep=number % num_ranks == rank)
        if tensors:
            copies = save.copy_to_host(tensors)
            save.add(partial(_write, folder / _name(number, len(files)), copies))
    assert next(weights, None) is None, "more weights than shapes"


def export_adapter(folder: Path, model: PackedModel, save: Save, *, source: Path) -> None:
    """Write the adapters in peft's format, for the model in `source`."""
    weights = save.copy_to_host(dict(lora.adapter_weights(model.causal_lm, torch.float32)))
    if dist.get_rank() == 0:
        save.add(partial(_write, folder / lora.WEIGHTS_FILE, weights))
        config = lora.adapter_config(model.causal_lm, base=str(source))
        text = json.dumps(config, indent=2) + "\n"
        save.add(lambda: (folder / lora.CONFIG_FILE).write_text(text))


def _split_into_files(sizes: Iterable[tuple[str, int]]) -> list[_File]:
    """Split tensors in order into files of at most `MAX_SHARD_BYTES`, or of one larger tensor."""
    files = [_File()]
    for name, num_bytes in sizes:
        if files[-1].sizes and files[-1].num_bytes + num_bytes > MAX_SHARD_BYTES:
            files.append(_File())
        files[-1].sizes[name] = num_bytes
    return files


def _take_next(
    weights: Iterator[tuple[str, Tensor]], file: _File, *, should_keep: bool
) -> dict[str, Tensor]:
    """Return the next file's tensors in host memory, or none if another rank writes the file."""
    kept: dict[str, Tensor] = {}
    for expected in file.sizes:
        name, tensor = next(weights)
        assert name == expected, (name, expected)
        if should_keep:
            kept[name] = tensor.cpu()
    return kept


def _name(number: int, num_files: int) -> str:
    if num_files == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": "pt"})


def _write_rest(
    folder: Path,
    source: Path,
    files: list[_File],
    dtype: torch.dtype,
    policy_version: PolicyVersion,
) -> None:
    """Write everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in WEIGHT_FILES):
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    loader = "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    (folder / "README.md").write_text(
        f"---\nlibrary_name: transformers\ntags: [raylearner, reinforcement-learning]\n---\n"
        f"# {source.name}, policy version {policy_version}\n\n"
        f"Trained with raylearner from `{source.name}`. Load it with "
        f"`{loader}.from_pretrained`.\n"
    )
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.num_bytes for file in files)},
            "weight_map": {
                name: _name(number, len(files))
                for number, file in enumerate(files)
                for name in file.sizes
            },
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
