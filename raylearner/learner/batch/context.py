"""Context parallelism: ranks that hold slices of one packed micro-batch, after DeepSpeed-Ulysses.

Whatever looks at one token at a time sees a rank's slice alone. Attention needs whole sequences, but
not all heads: an all-to-all exchanges slices of tokens for slices of heads before it, another one
back after it (Jacobs et al. 2023, arXiv 2309.14509, section 3).

Waits for: the other ranks of the group, in every forward and backward.
Legend: `T` packed tokens, a multiple of `C`; `C` ranks of a group; `t = T / C` tokens of a slice;
`H` heads; `D` width of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """The ranks that share this rank's micro-batches; promises that slices follow each other by rank."""

    group: dist.ProcessGroup
    rank: int
    """Of this process, within the group."""
    size: int

    def slice(self, values: Tensor) -> Tensor:
        """This rank's part: `[.., T] -> [.., t]`."""
        length = values.shape[-1] // self.size
        return values.narrow(-1, self.rank * length, length)

    def gather(self, values: Tensor) -> Tensor:
        """All ranks' parts, one after the other: `[t] -> [T]`.

        Every rank must make the same of the whole: the gradient of a part is then that of its own
        rank alone, and is not summed.
        """
        return _Gather.apply(values, self)  # pyright: ignore[reportReturnType]

    def to_heads(
        self,
        query: Tensor,  # [H, t, D]
        key: Tensor,  # [G, t, D]
        value: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whole sequences of this rank's heads: `[H / C, T, D]`, and `G / C` of keys and values.

        Fewer key-value heads than ranks are repeated, one for each rank.
        """
        repeats = max(1, self.size // key.shape[0])
        parts = (query, *(x.repeat_interleave(repeats, 0) for x in (key, value)))
        # [C, h, t, D] each.
        by_rank = [part.reshape(self.size, -1, *part.shape[1:]) for part in parts]
        sent = torch.cat([part.flatten(1) for part in by_rank], 1)
        received = _exchanged(sent, self).split([p[0].numel() for p in by_rank], 1)
        query, key, value = (
            got.reshape(part.shape).transpose(0, 1).flatten(1, 2)
            for got, part in zip(received, by_rank, strict=True)
        )
        return query, key, value

    def to_tokens(self, attended: Tensor) -> Tensor:
        """The way back: `[T, H / C, D] -> [t, H, D]`."""
        by_rank = attended.reshape(self.size, -1, *attended.shape[1:])  # [C, t, h, D]
        received = _exchanged(by_rank.flatten(1), self).reshape(by_rank.shape)
        return received.transpose(0, 1).flatten(1, 2)


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


_exchanged: Callable[[Tensor, ContextGroup], Tensor] = torch.compiler.disable(_exchange)  # pyright: ignore[reportAssignmentType]
"""Compiled blocks break here."""
