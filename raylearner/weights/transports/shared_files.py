"""Weights as files: one safetensors file per push on memory-backed storage of one machine."""

import errno
import os
import shutil
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion
from raylearner.weights.checksums import Checksums
from raylearner.weights.transports import WeightGroup, transport


class Sender(transport.Sender):
    """Rank 0 writes; the other ranks take part in gathering."""

    def write(
        self, policy_version: PolicyVersion, members: Sequence[str], group: WeightGroup | None
    ) -> dict[str, Any] | None:
        tensors = self._weights.tensors()
        if self._rank != 0:
            deque(tensors, maxlen=0)
            return None
        return write_weights(tensors, self._folder, policy_version, self._weights.dtype)


class Receiver(transport.Receiver):
    """Reads the file in every worker."""

    name = "shared_files"
    takes_memory = True

    @staticmethod
    def vllm_engine() -> type[Any]:
        return _make_file_reader()

    def _staging_bytes(self, payload: Mapping[str, Any]) -> int:
        return payload["num_bytes"]


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    policy_version: PolicyVersion,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write one push and return its payload; an incomplete file never has the name that is read.

    Names are those of the model's checkpoint. Tied tensors are written once, under the first name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept, sums = _untied(tensors, dtype)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    # A version pushed twice must not lose its file when the first push is discarded.
    path = folder / f"policy_{policy_version:08d}_{uuid4().hex[:8]}.safetensors"
    partial = path.with_suffix(".partial")
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise _full(folder, num_bytes, free)
    try:
        save_file(kept, partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise _full(folder, num_bytes, free) from error
        raise WeightTransferError(f"weights could not be written to {path}: {error}") from error
    return {
        "path": str(path),
        "num_tensors": len(kept),
        "num_bytes": num_bytes,
        "checksums": sums.result(),
    }


def _untied(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Checksums]:
    """Copies on the host by name, and the checksums of what was copied."""
    # The same address alone is not a tie: a gathered tensor may reuse that of one already freed.
    owners: dict[tuple[int, tuple[int, ...], tuple[int, ...]], StorageWeakRef] = {}
    kept: dict[str, torch.Tensor] = {}
    sums = Checksums()
    for name, tensor in tensors:
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        owner = owners.get(key)
        if owner is not None and not owner.expired() and tensor.numel() > 0:
            continue
        owners[key] = StorageWeakRef(tensor.untyped_storage())
        cast = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        sums.add(name, cast)
        kept[name] = cast.cpu()
    return kept, sums


def _full(folder: Path, num_bytes: int, free: int) -> WeightTransferError:
    return WeightTransferError(
        f"{folder} is full: a push needs {num_bytes / 1e6:.1f} MB and {free / 1e6:.1f} MB are "
        "free; two pushes must fit, name a larger place with weights.folder"
    )


def _make_file_reader() -> type[Any]:
    """Return the transfer engine that loads a file, made here because its base class imports vLLM."""
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    @dataclass
    class FileUpdate(WeightTransferUpdateInfo):
        path: str
        num_tensors: int
        num_bytes: int
        is_partial: bool = False
        """Whether tensors may be missing; they then keep their old values."""

    class FileReader(WeightTransferEngine[WeightTransferInitInfo, FileUpdate]):
        init_info_cls = WeightTransferInitInfo
        update_info_cls = FileUpdate

        def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            pass

        def receive_weights(self, update_info: FileUpdate) -> None:
            tensors = load_file(update_info.path)
            if len(tensors) != update_info.num_tensors:
                raise ValueError(
                    f"{update_info.path} has {len(tensors)} tensors instead of "
                    f"{update_info.num_tensors}"
                )
            load: Any = self.model.load_weights  # on the device of the caller's choice
            load(iter(tensors.items()))

        def finish_weight_update(self) -> None:
            with torch.device(self.device):
                finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    return FileReader
