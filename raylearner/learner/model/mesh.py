"""Ranks that find each other: the process group and the device mesh of the learner.

Waits for: the other ranks, in `connect` and in every collective after it. Unblocked by: their
arrival, or `COLLECTIVE_TIMEOUT_S`.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raylearner.learner.batch import metric
from raylearner.learner.batch.context import ContextGroup
from raylearner.learner.batch.metric import Metrics

COLLECTIVE_TIMEOUT_S = 1800
"""A collective that takes longer fails: the other rank is gone, or far behind."""


def free_port() -> int:
    """A port that was free on this node a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def connect(
    *,
    rank: int = 0,
    world_size: int = 1,
    address: str = "127.0.0.1",
    port: int | None = None,
    device: str = "cpu",
) -> DeviceMesh:
    """Join the group (gloo on the CPU, NCCL on GPUs) and return its one-dimensional mesh.

    Without a port a single rank stands alone and opens no socket. An existing group is kept.
    """
    if not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(0)
        if port is None and world_size != 1:
            raise ValueError(f"port: {world_size} ranks need one to meet at")
        store = (
            dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            if port is None
            else dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                address,
                port,
                world_size,
                is_master=rank == 0,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
        )
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
    return init_device_mesh(device, (dist.get_world_size(),))


def of_shards(everyone: DeviceMesh, size: int | None) -> DeviceMesh:
    """How parameters lie: sharded over all ranks, or over neighbours, `size` of them, and copied."""
    num_ranks = everyone.size()
    if size is None or size == num_ranks:
        return everyone
    if num_ranks % size:
        raise ValueError(f"shard_size: {num_ranks} ranks are not groups of {size} ranks each")
    return init_device_mesh(
        everyone.device_type, (num_ranks // size, size), mesh_dim_names=("copies", "shards")
    )


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Which ranks hold the same micro-batches, and which hold different ones.

    Independent of how parameters are sharded: gradients are summed over all ranks either way.
    """

    data: dist.ProcessGroup
    """Ranks whose micro-batches together are the batch, each once; this rank is one of them."""
    context: ContextGroup | None
    """Ranks that share this rank's micro-batches, where there are others."""

    @classmethod
    def of(cls, device: str, *, context_size: int = 1) -> "BatchLayout":
        """Neighbours share a micro-batch, `context_size` of them. Every rank must call this."""
        num_ranks = dist.get_world_size()
        if num_ranks % context_size:
            raise ValueError(
                f"context_size: {num_ranks} ranks are not groups of {context_size} ranks each"
            )
        if context_size == 1:
            assert dist.group.WORLD is not None
            return cls(data=dist.group.WORLD, context=None)
        mesh = init_device_mesh(
            device, (num_ranks // context_size, context_size), mesh_dim_names=("data", "context")
        )
        return cls(
            data=mesh.get_group("data"),
            context=ContextGroup(
                group=mesh.get_group("context"),
                rank=mesh.get_local_rank("context"),
                size=context_size,
            ),
        )

    def sum(self, values: Tensor) -> Tensor:
        """In place over all micro-batches, each counted once; every rank finds the same bits."""
        dist.all_reduce(values)
        return values if self.context is None else values.div_(self.context.size)

    def combined(self, metrics: Metrics, *, device: torch.device | str) -> Metrics:
        """Over all micro-batches; ranks must hold the same keys."""
        sums, maxima = metric.flatten(metrics)
        sums, maxima = sums.to(device), maxima.to(device)
        self.sum(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return metric.unflatten(metrics, sums.cpu(), maxima.cpu())
