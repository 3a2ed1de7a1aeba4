"""What a learner is, on disk: sharded tensors, progress and random state.

Tensors are safetensors files written by torch.distributed.checkpoint, everything else is JSON:
nothing here is ever unpickled. Every rank calls every function.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raylearner.errors import CheckpointError
from raylearner.learner.checkpoint.writes import Writes
from raylearner.types import PolicyVersion

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


def save_state(folder: Path, progress: Progress, writes: Writes) -> None:
    """Progress and each rank's RNG."""
    rank = dist.get_rank()
    files = {f"rng_{rank:05d}.json": json.dumps(_random_state()) + "\n"}
    if rank == 0:
        content = {**asdict(progress), "num_ranks": dist.get_world_size()}
        files["progress.json"] = json.dumps(content, indent=2) + "\n"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)

    writes.add(write)


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
        try:
            _set_random_state(json.loads(random_file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{random_file}: no random state: {error}") from error
    return progress


def save_tensors(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    writes: Writes,
) -> None:
    """Shards of masters and moments of all ranks."""
    tensors = writes.kept(state_tensors(parameters, optimizer))

    def write() -> None:
        save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(folder / "tensors"), save_distributed=True),
            process_group=writes.group,
        )

    writes.add(write)


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
    _refuse_unreadable(folder / "tensors")
    tensors = state_tensors(parameters, optimizer)
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


def _refuse_unreadable(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: corrupt: {error}") from error


def state_tensors(
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
