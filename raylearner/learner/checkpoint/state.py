"""A learner's state on disk: sharded tensors, progress and RNG state.

Tensors are safetensors files written by torch.distributed.checkpoint, everything else is JSON:
nothing here is ever unpickled. Every rank calls every function, in the same order.

Waits for: the other ranks' writes, at most `AGREEMENT_TIMEOUT_S`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from raylearner.errors import CheckpointError
from raylearner.learner.checkpoint.directory import write_hashes
from raylearner.types import PolicyVersion

MOMENTS = ("exp_avg", "exp_avg_sq")

AGREEMENT_TIMEOUT_S = 600
"""Maximum time between the fastest rank's end of writing its shards and the slowest rank's; the
checkpoint fails otherwise. No watchdog covers background writes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counters of a learner. Steps include skipped ones; updates are those of the optimizers."""

    policy_version: PolicyVersion = 0
    num_steps: int = 0
    num_updates: int = 0
    num_critic_updates: int = 0
    num_skipped: int = 0
    num_skipped_in_a_row: int = 0
    kl_coefficient: float | None = None
    """Current value of an adaptive coefficient."""


class AsyncSaver:
    """Owns the host's copies and a process group for writing, apart from that of training.

    Copies are reused from one checkpoint to the next, because pinned memory is slow to allocate.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
        self._stager = DefaultStager(options)
        self._deferred: Save | None = None
        timeout = timedelta(seconds=AGREEMENT_TIMEOUT_S)
        self.group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))

    def begin(self, *, should_defer: bool) -> "Save":
        """Return a new checkpoint's writes; copies of the previous one are overwritten.

        Copies that were not written, since another part of their checkpoint failed, are forgotten.
        """
        save = Save(self, should_defer=should_defer)
        self._deferred = save if should_defer else None
        return save

    def finish(self) -> None:
        """Write what was deferred; may run in any thread."""
        save, self._deferred = self._deferred, None
        if save is not None:
            save.finish()

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies in host memory; `tensors` may change as soon as this returns."""
        return self._stager.stage(tensors)  # pyright: ignore[reportReturnType]


class Save:
    """One rank's writes for one checkpoint, in order: deferred to `finish`, or made at once.

    A block ends when all ranks have made their writes, or failed, unless these are deferred.
    """

    def __init__(self, saver: AsyncSaver, *, should_defer: bool) -> None:
        self.group = saver.group
        self._saver = saver
        self._should_defer = should_defer
        self._pending: list[Callable[[], object]] = []

    def __enter__(self) -> "Save":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._should_defer:
            dist.barrier()

    def add(self, write: Callable[[], object]) -> None:
        """Add a write that reads nothing that training changes: see `keep` and `copy_to_host`.

        Add writes of all ranks together before writes of one rank: a rank whose disk is full would
        otherwise keep the others waiting.
        """
        if self._should_defer:
            self._pending.append(write)
        else:
            write()

    def keep(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors themselves, or copies if they are written later."""
        return self._saver.copy(tensors) if self._should_defer else tensors

    def copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full tensors in host memory, which share no storage with the masters if deferred."""
        return {
            name: tensor.to("cpu", copy=self._should_defer).contiguous()
            for name, tensor in tensors.items()
        }

    def finish(self) -> None:
        """Make the deferred writes."""
        while self._pending:
            self._pending.pop(0)()


def save_progress(folder: Path, progress: Progress, save: Save) -> None:
    """Write progress and each rank's RNG state."""
    rank = dist.get_rank()
    files = {f"rng_{rank:05d}.json": json.dumps(_random_state()) + "\n"}
    if rank == 0:
        content = {**asdict(progress), "num_ranks": dist.get_world_size()}
        files["progress.json"] = json.dumps(content, indent=2) + "\n"

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)

    save.add(write)


def restore_progress(folder: Path) -> Progress:
    """Return the saved progress, and restore the RNG if the number of ranks is the same."""
    try:
        content = json.loads((folder / "progress.json").read_text())
        num_ranks = content.pop("num_ranks")
        progress = Progress(**content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'progress.json'}: not a learner's progress: {error}"
        ) from error
    random_file = folder / f"rng_{dist.get_rank():05d}.json"
    if num_ranks == dist.get_world_size():
        try:
            _set_random_state(json.loads(random_file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{random_file}: not a random state: {error}") from error
    return progress


def save_hashes(folder: Path, save: Save) -> None:
    """Hash what this rank has written, beside the other ranks."""
    save.add(lambda: write_hashes(folder, rank=dist.get_rank()))


def save_tensors(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    save: Save,
) -> None:
    """Write all ranks' shards of masters and moments."""
    tensors = save.keep(state_tensors(parameters, optimizer))

    def write() -> None:
        save_state_dict(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(folder / "tensors"), save_distributed=True),
            process_group=save.group,
        )

    save.add(write)


def restore_tensors(
    folder: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    num_updates: int = 0,
) -> None:
    """Restore exactly what `save_tensors` wrote, for an optimizer that has made `num_updates`."""
    if not (folder / "tensors").is_dir():
        raise CheckpointError(
            f"{folder} does not exist: the checkpoint is from a run without a {folder.name}"
        )
    _refuse_unreadable(folder / "tensors")
    tensors = state_tensors(parameters, optimizer)
    reader = HuggingFaceStorageReader(str(folder / "tensors"))
    saved = read_shapes(reader)
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if saved != wanted:
        name = sorted(set(saved.items()) ^ set(wanted.items()))[0][0]
        raise CheckpointError(
            f"{folder}: a checkpoint of another model: {name} is {saved.get(name)} in it and "
            f"{wanted.get(name)} in this run"
        )
    load(tensors, storage_reader=reader)
    if optimizer is not None:
        for state in optimizer.state.values():
            state["step"].fill_(num_updates)


def read_shapes(reader: HuggingFaceStorageReader) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the reader's files, by name."""
    return {
        name: tuple(entry.size)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


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
    """Return the live tensors by name; loading into them restores them."""
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
