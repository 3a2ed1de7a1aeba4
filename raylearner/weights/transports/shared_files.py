"""The learner's side of weight files: one safetensors file per push on memory-backed storage."""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
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


def write_weights(
    tensors: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    policy_version: PolicyVersion,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write one push and return its payload; readers never see a file that is not whole.

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


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    folder: str | Path,
    policy_version: PolicyVersion,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Write one push of a LoRA adapter: a directory as peft makes them, whole when it is named."""
    payload = write_weights(tensors, folder, policy_version, dtype)
    written = Path(payload["path"])
    adapter = written.with_suffix("")
    partial = written.with_suffix(".partial")
    partial.mkdir()
    written.rename(partial / "adapter_model.safetensors")
    (partial / "adapter_config.json").write_text(json.dumps(dict(config)) + "\n")
    partial.rename(adapter)
    return payload | {"path": str(adapter)}


def discard_weights(payload: Mapping[str, Any]) -> None:
    """Remove the file or directory of a push that every engine has acknowledged or outlived."""
    path = Path(payload["path"])
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _untied(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Checksums]:
    """Copies on the host by name, and the checksums of what was copied."""
    # An address alone does not prove a tie: a gathered tensor may reuse that of one already freed.
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
