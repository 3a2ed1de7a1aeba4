"""Full tensors of a sharded model, some layers at a time: one collective for many parameters.

Waits for the other ranks, which must iterate the same parameters to the end.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raylearner.weights.checksums import MODULUS, NOTHING, Checksum, Checksums, whole

MAX_GATHER_BYTES = 256 * 1024**2
"""Parameters are gathered together up to this size, or one by one where larger."""


def gathered(
    named_parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Each name with its full tensor in `dtype`, in order; cast before it is gathered.

    Never holds more full tensors than `MAX_GATHER_BYTES`, or one larger one. What is yielded may
    share storage with the parameters.
    """
    held: list[tuple[str, DTensor]] = []
    num_bytes = 0
    for name, parameter in named_parameters:
        tensor = parameter.detach()
        if not isinstance(tensor, DTensor):
            yield from _gather(held, dtype)
            held, num_bytes = [], 0
            yield name, tensor.to(dtype)
            continue
        size = tensor.numel() * dtype.itemsize
        if held and num_bytes + size > MAX_GATHER_BYTES:
            yield from _gather(held, dtype)
            held, num_bytes = [], 0
        held.append((name, tensor))
        num_bytes += size
    yield from _gather(held, dtype)


def gathered_checksums(
    named_parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, Checksum]:
    """Those of what `gathered` yields; each rank reads its own part and nothing else travels."""
    sums, everywhere = Checksums(), Checksums()
    sizes: dict[str, int] = {}
    group, device_type = None, "cpu"
    for name, parameter in named_parameters:
        tensor = parameter.detach()
        sizes[name] = tensor.numel()
        if not isinstance(tensor, DTensor):
            everywhere.add(name, tensor.to(dtype))
            continue
        mesh = tensor.device_mesh
        group, device_type = mesh.get_group(mesh.ndim - 1), mesh.device_type
        _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        local = tensor.to_local().to(mesh.device_type, dtype)
        row = math.prod(tensor.shape[1:])
        sums.add(name, local, whole(local.shape, offset[0] * row if offset else 0))
    own, found = sums.result(), everywhere.result()
    sharded = [name for name in sizes if name not in found]
    table = torch.tensor([[_signed(n) for n in own.get(name, NOTHING)[:2]] for name in sharded])
    if group is not None and dist.get_world_size(group) > 1:
        table = table.to(device_type)
        dist.all_reduce(table, group=group)
    for name, (words, places) in zip(sharded, table.tolist(), strict=True):
        found[name] = Checksum(words % MODULUS, places % MODULUS, sizes[name])
    return {name: found[name] for name in sizes}


def _signed(number: int) -> int:
    """The same 64 bits as torch counts them."""
    return number - MODULUS if number >= MODULUS // 2 else number


def _gather(tensors: list[tuple[str, DTensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    if not tensors:
        return
    mesh = tensors[0][1].device_mesh
    *copies, shards = range(mesh.ndim)
    cut = (*(Replicate() for _ in copies), Shard(0))
    assert all(tensor.placements == cut for _, tensor in tensors), "as FSDP cuts them"
    num_ranks = mesh.size(shards)
    if num_ranks == 1:
        for name, tensor in tensors:
            yield name, tensor.to_local().to(mesh.device_type, dtype)
        return
    # Every rank's part of each tensor has as many rows as the first rank's, as FSDP cuts them.
    rows = [math.ceil(tensor.shape[0] / num_ranks) for _, tensor in tensors]
    sizes = [
        count * math.prod(tensor.shape[1:])
        for count, (_, tensor) in zip(rows, tensors, strict=True)
    ]
    mine = torch.empty(sum(sizes), dtype=dtype, device=mesh.device_type)
    starts = [0, *accumulate(sizes)]
    for start, (_, tensor) in zip(starts, tensors, strict=False):
        local = tensor.to_local()
        mine[start : start + local.numel()].copy_(local.reshape(-1))
    everyone = torch.empty(num_ranks * len(mine), dtype=dtype, device=mine.device)
    dist.all_gather_single(everyone, mine, group=mesh.get_group(shards))
    everyone = everyone.view(num_ranks, -1)
    arrived = torch.cuda.current_stream().record_event() if everyone.is_cuda else None
    for start, size, count, (name, tensor) in zip(starts, sizes, rows, tensors, strict=False):
        if arrived is not None:
            # Whoever iterates may have gone on to another stream since.
            arrived.wait()
            everyone.record_stream(torch.cuda.current_stream())
        whole = everyone[:, start : start + size].reshape(num_ranks * count, *tensor.shape[1:])
        yield name, whole[: tensor.shape[0]]
