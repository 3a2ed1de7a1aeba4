"""How ranks are grouped: the process group, the mesh of shards, and ranks that share micro-batches.

Context parallelism follows DeepSpeed-Ulysses: ranks of a context group hold slices of one packed
micro-batch. Per-token computations work on a rank's slice alone. Attention needs whole sequences, but
not all heads: an all-to-all exchanges slices of tokens for slices of heads before it, and another one
exchanges them back after it (Jacobs et al. 2023, arXiv 2309.14509, section 3).

Waits for: the other ranks, in `connect` and in every collective after it, at most
`COLLECTIVE_TIMEOUT_S`.
Legend: `T` packed tokens, a multiple of `C`; `C` ranks of a group; `t = T / C` tokens of a slice;
`H` heads; `D` width of one.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raylearner.learner.batch import metric
from raylearner.learner.batch.metric import Metrics

COLLECTIVE_TIMEOUT_S = 1800
"""Maximum time of a collective: beyond it another rank is gone, or far behind."""


def free_port() -> int:
    """Return a port that was free on this node a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def connect(
    *,
    rank: int = 0,
    world_size: int = 1,
    address: tuple[str, int] | None = None,
    device: str = "cpu",
) -> DeviceMesh:
    """Join the group (gloo on the CPU, NCCL on GPUs) and return its one-dimensional mesh.

    Ranks connect at `address`, host and port; without one a single rank opens no socket. An
    existing group is kept.
    """
    if not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(0)
        if address is None and world_size != 1:
            raise ValueError(f"address: required to connect {world_size} ranks")
        store = (
            dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            if address is None
            else dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                *address,
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


def make_shard_mesh(everyone: DeviceMesh, size: int | None) -> DeviceMesh:
    """Return the mesh of parameters: sharded over all ranks, or over `size` ranks and replicated."""
    num_ranks = everyone.size()
    if size is None or size == num_ranks:
        return everyone
    if num_ranks % size:
        raise ValueError(f"shard_size: must divide the {num_ranks} ranks, got {size}")
    return init_device_mesh(
        everyone.device_type, (num_ranks // size, size), mesh_dim_names=("copies", "shards")
    )


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Ranks that share this rank's micro-batches; guarantees that slices are in the order of ranks."""

    group: dist.ProcessGroup
    rank: int
    """Rank of this process within the group."""
    size: int

    def slice(self, values: Tensor) -> Tensor:
        """Return this rank's part: `[.., T] -> [.., t]`."""
        length = values.shape[-1] // self.size
        return values.narrow(-1, self.rank * length, length)

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate all ranks' parts: `[t] -> [T]`.

        Every rank must compute the same from the result: the gradient of a part is then that of its
        own rank alone, and is not summed.
        """
        return _Gather.apply(values, self)  # pyright: ignore[reportReturnType]

    def to_heads(
        self,
        query: Tensor,  # [H, t, D]
        key: Tensor,  # [G, t, D]
        value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return whole sequences of this rank's heads: `[H / C, T, D]`, and `G / C` of keys and values.

        Fewer key-value heads than ranks are repeated, one for each rank. In memory tokens come first, as
        kernels expect them: FlashAttention-3's output has other strides than compiled code expects otherwise.
        """
        repeats = max(1, self.size // key.shape[0])
        parts = (query, *(x.repeat_interleave(repeats, 0) for x in (key, value)))
        # [C, h, t, D] each.
        by_rank = [part.reshape(self.size, -1, *part.shape[1:]) for part in parts]
        outgoing = torch.cat([part.flatten(1) for part in by_rank], 1)
        received = _exchange_uncompiled(outgoing, self).split([p[0].numel() for p in by_rank], 1)
        query, key, value = (
            got.reshape(part.shape).permute(0, 2, 1, 3).flatten(0, 1).contiguous().transpose(0, 1)
            for got, part in zip(received, by_rank, strict=True)
        )
        return query, key, value

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Undo `to_heads`: `[T, H / C, D] -> [t, H, D]`."""
        by_rank = attended.reshape(self.size, -1, *attended.shape[1:])  # [C, t, h, D]
        received = _exchange_uncompiled(by_rank.flatten(1), self).reshape(by_rank.shape)
        return received.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Which ranks hold the same micro-batches, and which hold different ones.

    Independent of how parameters are sharded: gradients are summed over all ranks either way.
    """

    data: dist.ProcessGroup
    """Ranks, this one included, that together hold each micro-batch of the batch once."""
    context: ContextGroup | None
    """Ranks that share this rank's micro-batches, if there are others."""

    @classmethod
    def of(cls, device: str, *, context_size: int = 1) -> "BatchLayout":
        """Let each `context_size` consecutive ranks share micro-batches. Every rank must call this."""
        num_ranks = dist.get_world_size()
        if num_ranks % context_size:
            raise ValueError(f"context_size: must divide the {num_ranks} ranks, got {context_size}")
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
        """Sum in place over all micro-batches, each counted once; every rank gets the same bits."""
        dist.all_reduce(values)
        return values if self.context is None else values.div_(self.context.size)

    def total(self, shares: Sequence[Tensor], *, device: torch.device | str) -> float:
        """Return the sum of scalar shares over all micro-batches."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for share in shares:
            total += share
        return self.sum(total).item()

    def combine(self, metrics: Metrics, *, device: torch.device | str) -> Metrics:
        """Combine over all micro-batches; ranks must hold the same keys."""
        sums, maxima = metric.flatten(metrics)
        sums, maxima = sums.to(device), maxima.to(device)
        self.sum(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return metric.unflatten(metrics, sums.cpu(), maxima.cpu())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, context: ContextGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.context = context
        whole = values.new_empty(context.size * len(values))
        dist.all_gather_single(whole, values.contiguous(), group=context.group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.context.slice(grads[0]), None


class _Exchange(torch.autograd.Function):
    """Row i of rank j becomes row j of rank i; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: ContextGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.context = context
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=context.group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent = grads[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.context.group)
        return received, None


def _exchange(rows: Tensor, context: ContextGroup) -> Tensor:  # [C, n]
    return _Exchange.apply(rows.contiguous(), context)  # pyright: ignore[reportReturnType]


_exchange_uncompiled: Callable[[Tensor, ContextGroup], Tensor] = torch.compiler.disable(_exchange)  # pyright: ignore[reportAssignmentType]
"""The compiler breaks its graph here."""
