"""What a learner is, on disk: sharded tensors, progress, random state, and a model to hand on.

Tensors are safetensors files written by torch.distributed.checkpoint, everything else is JSON:
nothing here is ever unpickled. Every rank calls every function.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raylearner.errors import CheckpointError
from raylearner.learner import lora
from raylearner.learner.model import PackedModel
from raylearner.types import PolicyVersion

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 4_000_000_000
"""Size of one safetensors file of an exported model."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a learner counts. Steps include skipped ones; updates are the optimizers'."""

    policy_version: PolicyVersion = 0
    num_steps: int = 0
    num_updates: int = 0
    num_critic_updates: int = 0
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    kl_coefficient: float | None = None
    """What an adaptive controller made of the configured one."""


def save_state(folder: Path, progress: Progress) -> None:
    """Progress and each rank's RNG."""
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        content = {**asdict(progress), "num_ranks": dist.get_world_size()}
        (folder / "progress.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / f"rng_{rank:05d}.json").write_text(json.dumps(_random_state()) + "\n")
    dist.barrier()


def restore_state(folder: Path) -> Progress:
    """Put back what `save_state` wrote. A rank that did not exist keeps its own RNG."""
    try:
        content = json.loads((folder / "progress.json").read_text())
        num_ranks = content.pop("num_ranks")
        progress = Progress(**content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / 'progress.json'}: not a learner's: {error}") from error
    random_file = folder / f"rng_{dist.get_rank():05d}.json"
    if num_ranks == dist.get_world_size():
        _set_random_state(json.loads(random_file.read_text()))
    return progress


def save_tensors(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> None:
    """Shards of masters and moments of all ranks."""
    writer = HuggingFaceStorageWriter(str(folder / "tensors"), save_distributed=True)
    save(_tensors(parameters, optimizer), storage_writer=writer)
    dist.barrier()


def restore_tensors(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    num_updates: int = 0,
) -> None:
    """Put back what `save_tensors` wrote, bit by bit, for an optimizer that made `num_updates`."""
    if not (folder / "tensors").is_dir():
        raise CheckpointError(
            f"{folder}: no such part: the checkpoint is of a run without a {folder.name}"
        )
    tensors = _tensors(parameters, optimizer)
    reader = HuggingFaceStorageReader(str(folder / "tensors"))
    saved = {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if saved != wanted:
        name = sorted(set(saved.items()) ^ set(wanted.items()))[0][0]
        raise CheckpointError(
            f"{folder}: a checkpoint of another model: {name} is {saved.get(name)} there and "
            f"{wanted.get(name)} here"
        )
    load(tensors, storage_reader=reader)
    if optimizer is not None:
        for state in optimizer.state.values():
            state["step"].fill_(num_updates)


def export_model(
    folder: Path,
    model: PackedModel,
    *,
    source: Path,
    dtype: torch.dtype,
    policy_version: PolicyVersion,
) -> None:
    """A `from_pretrained` directory: weights, config, the source's tokenizer files, a model card."""
    is_writer = dist.get_rank() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in WEIGHT_FILES):
                shutil.copy(path, folder / path.name)
        config = json.loads((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "README.md").write_text(
            f"---\nlibrary_name: transformers\ntags: [raylearner, reinforcement-learning]\n---\n"
            f"# {source.name}, policy version {policy_version}\n\n"
            f"Trained with raylearner from `{source.name}`. Load it with "
            f"`AutoModelForCausalLM.from_pretrained`.\n"
        )
    _write_shards(folder, model.named_weights(dtype), is_writer=is_writer)
    dist.barrier()


def export_adapter(folder: Path, model: PackedModel, *, source: Path) -> None:
    """The adapters as peft saves them, for the model in `source`."""
    weights = {
        name: tensor.cpu().contiguous()
        for name, tensor in lora.adapter_weights(model.causal_lm, torch.float32)
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / lora.WEIGHTS_FILE, {"format": "pt"})
        config = lora.adapter_config(model.causal_lm, base=str(source))
        (folder / lora.CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()


def _write_shards(folder: Path, weights: Iterator[tuple[str, Tensor]], *, is_writer: bool) -> None:
    """Files of at most `MAX_SHARD_BYTES`, so that no more than one is ever held in memory."""
    files: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            save_file(held, folder / f"shard-{len(files):05d}.safetensors", {"format": "pt"})
            files.append({name: tensor.nbytes for name, tensor in held.items()})
            held.clear()

    for name, tensor in weights:
        if is_writer:
            if sum(t.nbytes for t in held.values()) + tensor.nbytes > MAX_SHARD_BYTES:
                flush()
            held[name] = tensor.cpu().contiguous()
    if not is_writer:
        return
    flush()
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        index = {
            "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)},
            "weight_map": {
                key: name for name, sizes in zip(names, files, strict=True) for key in sizes
            },
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for i, name in enumerate(names):
        (folder / f"shard-{i:05d}.safetensors").rename(folder / name)


def _tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """The live tensors by name; loading into them restores them."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"master.{name}"] = parameter.detach()
        if optimizer is not None:
            for moment in MOMENTS:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    return tensors


def _random_state() -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def _set_random_state(states: dict[str, str]) -> None:
    for device, text in states.items():
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
