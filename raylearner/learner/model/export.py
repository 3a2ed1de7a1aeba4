"""What others load: the policy as a `from_pretrained` directory, adapters as peft's.

Waits for the other ranks, which must call the same: weights are gathered for it.
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
"""Size of one safetensors file."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


@dataclass(slots=True)
class _File:
    """A file's tensors, by name their bytes."""

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
    """A `from_pretrained` directory: weights, config, the source's tokenizer files, a model card.

    Ranks take turns with the files of the weights, and hold and write only their own.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    files = _files(
        (name, torch.Size(shape).numel() * dtype.itemsize) for name, shape in model.weight_shapes()
    )
    if rank == 0:
        save.add(partial(_write_rest, folder, source, files, dtype, policy_version))
    weights = model.named_weights(dtype)
    for number, file in enumerate(files):
        tensors = _next(weights, file, should_keep=number % num_ranks == rank)
        if tensors:
            held = save.copy_to_host(tensors)
            save.add(partial(_write, folder / _name(number, len(files)), held))
    assert next(weights, None) is None, "shapes and weights come from the same parameters"


def export_adapter(folder: Path, model: PackedModel, save: Save, *, source: Path) -> None:
    """The adapters as peft saves them, for the model in `source`."""
    weights = save.copy_to_host(dict(lora.adapter_weights(model.causal_lm, torch.float32)))
    if dist.get_rank() == 0:
        save.add(partial(_write, folder / lora.WEIGHTS_FILE, weights))
        config = lora.adapter_config(model.causal_lm, base=str(source))
        text = json.dumps(config, indent=2) + "\n"
        save.add(lambda: (folder / lora.CONFIG_FILE).write_text(text))


def _files(sizes: Iterable[tuple[str, int]]) -> list[_File]:
    """In order, each file of at most `MAX_SHARD_BYTES`, or of one larger tensor."""
    files = [_File()]
    for name, num_bytes in sizes:
        if files[-1].sizes and files[-1].num_bytes + num_bytes > MAX_SHARD_BYTES:
            files.append(_File())
        files[-1].sizes[name] = num_bytes
    return files


def _next(
    weights: Iterator[tuple[str, Tensor]], file: _File, *, should_keep: bool
) -> dict[str, Tensor]:
    """The tensors of the next file, each already off the device; none where they are not ours."""
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
    """All but the weights."""
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
