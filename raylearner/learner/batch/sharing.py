"""Shared prefixes as tensors: where each token of a row is computed, and which keys its row reads.

Legend: `T` tokens of whole rows, `C` computed tokens, `S` computed sequences, `K` keys.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raylearner.learner.batch.prefixes import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys:
    """Keys of computed sequences; those of a row are its prefix's and its own, one after another.

    A sequence's queries are the last of its keys' tokens: causal attention is aligned at the end.
    """

    index: Tensor  # [K] int64 position in C of each key
    cu_seqlens: Tensor  # [S + 1] int32
    max_length: int
    copies: Tensor  # [K] int64 keys, ordered by position
    starts: Tensor  # [C] int64 first of each position's copies

    def gather(self, values: Tensor) -> Tensor:
        """Return the keys' rows: `[C, G, D] -> [K, G, D]`; sums of gradients are in float32 or finer."""
        return _Gather.apply(values, self.index, self.copies, self.starts)  # pyright: ignore[reportReturnType, reportUnknownMemberType, reportUnknownVariableType]

    def pad(self, num_tokens: int, missing: int) -> Self:
        """Add a sequence of `missing` tokens after `num_tokens`."""
        more = torch.arange(missing, device=self.index.device)
        num_keys = len(self.index)
        return replace(
            self,
            index=torch.cat([self.index, num_tokens + more]),
            cu_seqlens=F.pad(self.cu_seqlens, (0, 1), value=num_keys + missing),
            max_length=max(self.max_length, missing),
            copies=torch.cat([self.copies, num_keys + more]),
            starts=torch.cat([self.starts, num_keys + more]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the tokens of whole rows are computed with shared prefixes."""

    places: Tensor  # [T] int64 position in C
    keys: SharedKeys

    @classmethod
    def of(cls, layout: Layout, *, device: torch.device | str) -> Self:
        copies = np.argsort(layout.keys, kind="stable")
        num_copies = np.bincount(layout.keys)
        return cls(
            places=torch.as_tensor(layout.places, device=device),
            keys=SharedKeys(
                index=torch.as_tensor(layout.keys, device=device),
                cu_seqlens=torch.as_tensor(
                    np.cumsum([0, *layout.num_keys]).astype(np.int32), device=device
                ),
                max_length=int(layout.num_keys.max()),
                copies=torch.as_tensor(copies, device=device),
                starts=torch.as_tensor(np.cumsum(num_copies) - num_copies, device=device),
            ),
        )


def sum_copies(values: Tensor, copies: Tensor, starts: Tensor) -> Tensor:
    """Sum the rows of all copies of each position, in float32 or finer: `[K, G, D] -> [C, G, D]`.

    Unlike an addition at indices it is deterministic on GPUs, and rounds once in half precision.
    """
    flat = F.embedding_bag(copies, values.flatten(1), starts, mode="sum")
    return flat.view(len(starts), *values.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: Tensor, index: Tensor, copies: Tensor, starts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(copies, starts)
        return values.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        copies, starts = ctx.saved_tensors
        return sum_copies(grads[0].contiguous(), copies, starts), None, None, None
