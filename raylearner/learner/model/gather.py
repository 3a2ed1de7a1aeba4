"""Full tensors of a sharded model, several layers at a time: one collective for many parameters.

Waits for: the other ranks, which must iterate over the same parameters to the end.
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
"""Maximum size of parameters gathered together; larger ones are gathered one by one."""


def gather(
    named_parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield each name with its full tensor in `dtype`, in order; cast before it is gathered.

    Full tensors in memory never exceed `MAX_GATHER_BYTES`, or one larger tensor. They may share
    storage with the parameters.
    """
    pending: list[tuple[str, DTensor]] = []
    num_bytes = 0
    for name, parameter in named_parameters:
        tensor = parameter.detach()
        if not isinstance(tensor, DTensor):
            yield from _gather(pending, dtype)
            pending, num_bytes = [], 0
            yield name, tensor.to(dtype)
            continue
        size = tensor.numel() * dtype.itemsize
        if pending and num_bytes + size > MAX_GATHER_BYTES:
            yield from _gather(pending, dtype)
            pending, num_bytes = [], 0
        pending.append((name, tensor))
        num_bytes += size
    yield from _gather(pending, dtype)


def gather_checksums(
    named_parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> dict[str, Checksum]:
    """Return the checksums of what `gather` yields; ranks exchange only their parts' checksums."""
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
    own, result = sums.result(), everywhere.result()
    sharded = [name for name in sizes if name not in result]
    table = torch.tensor([[_signed(n) for n in own.get(name, NOTHING)[:2]] for name in sharded])
    if group is not None and dist.get_world_size(group) > 1:
        table = table.to(device_type)
        dist.all_reduce(table, group=group)
    for name, (words, places) in zip(sharded, table.tolist(), strict=True):
        result[name] = Checksum(words % MODULUS, places % MODULUS, sizes[name])
    return {name: result[name] for name in sizes}


def _signed(number: int) -> int:
    """Return the same 64 bits as a signed integer."""
    return number - MODULUS if number >= MODULUS // 2 else number


def _gather(tensors: list[tuple[str, DTensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    if not tensors:
        return
    mesh = tensors[0][1].device_mesh
    *copies, shards = range(mesh.ndim)
    cut = (*(Replicate() for _ in copies), Shard(0))
    assert all(tensor.placements == cut for _, tensor in tensors), "FSDP shards by rows"
    num_ranks = mesh.size(shards)
    if num_ranks == 1:
        for name, tensor in tensors:
            yield name, tensor.to_local().to(mesh.device_type, dtype)
        return
    # FSDP gives every rank as many rows as the first rank, padding included.
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
            # The caller may iterate on another stream by now.
            arrived.wait()
            everyone.record_stream(torch.cuda.current_stream())
        whole = everyone[:, start : start + size].reshape(num_ranks * count, *tensor.shape[1:])
        yield name, whole[: tensor.shape[0]]
