"""Attention of rows that share prefixes: packed queries, and keys gathered for each row. On CPUs also that
of rows without.

No mask on GPUs: torch's varlen kernel aligns causal attention and windows at the last query and key of a
sequence, like flash-attn since 2.1, so that a row's queries see their whole prefix. Gathered keys exist
for one layer at a time; the backward gathers them again.
Legend: `C` computed tokens, `K` keys, `S` sequences, `H` query heads, `G` key-value heads, `D` head width.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.attention.varlen  # registers its operations
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raylearner.learner.batch.sharing import SharedKeys, sum_copies

SHORTEST_TO_LONGEST = 0.75
"""Minimum ratio of the shortest to the longest query sequence of one padded call."""

LONGEST_MASKED = 1024
"""Maximum number of queries of a call with a mask, which has a number for each query and key."""


def attend_varlen(
    query: Tensor,  # [H, C, D]
    key: Tensor,  # [G, C, D]
    value: Tensor,
    cu_seqlens: Tensor,  # [S + 1]
    max_length: int,
    scaling: float | None,
    window: int | None,
    keys: SharedKeys,
) -> Tensor:  # [C, H, D]
    """Attend by torch's varlen kernel, on GPUs in half precision."""
    return _Varlen.apply(  # pyright: ignore[reportReturnType]
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        (keys.index, keys.copies, keys.starts),
        (cu_seqlens, keys.cu_seqlens),
        (max_length, keys.max_length),
        scaling,
        window,
    )


class _Varlen(torch.autograd.Function):
    """Saves keys and values as they were computed, not as gathered."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        query: Tensor,  # [C, H, D]
        key: Tensor,  # [C, G, D]
        value: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        cu_seqlens: tuple[Tensor, Tensor],
        max_lengths: tuple[int, int],
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        index, copies, starts = places
        sides = [-1 if window is None else window - 1, 0]
        out, lse, rng_state = torch.ops.raylearner.attend_gathered(
            query, key, value, index, *cu_seqlens, *max_lengths, scaling, sides
        )
        ctx.save_for_backward(
            query, key, value, out, lse, rng_state, index, copies, starts, *cu_seqlens
        )
        ctx.max_lengths, ctx.scaling, ctx.sides = max_lengths, scaling, sides
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = torch.ops.raylearner.attend_gathered_backward(
            grads[0].contiguous(), *ctx.saved_tensors, *ctx.max_lengths, ctx.scaling, ctx.sides
        )
        return *found, *(None,) * 5


# Operations of their own, since the compiler would see that forward and backward gather the same, and
# keep what was gathered in every layer.
@torch.library.custom_op("raylearner::attend_gathered", mutates_args=())
def _attend_gathered(
    query: Tensor,  # [C, H, D]
    key: Tensor,  # [C, G, D]
    value: Tensor,
    index: Tensor,  # [K]
    cu_seqlens: Tensor,  # [S + 1]
    key_cu_seqlens: Tensor,  # [S + 1]
    max_length: int,
    max_keys: int,
    scaling: float | None,
    sides: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.torch_attn._varlen_attn(
        query,
        key.index_select(0, index),
        value.index_select(0, index),
        cu_seqlens,
        key_cu_seqlens,
        max_length,
        max_keys,
        sides[0] < 0,
        scaling,
        sides,
        query.shape[1] != key.shape[1],
    )


@torch.library.register_fake("raylearner::attend_gathered")
def _attended(query: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    log_sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), log_sums, query.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op("raylearner::attend_gathered_backward", mutates_args=())
def _attend_gathered_backward(
    grad: Tensor,  # [C, H, D]
    query: Tensor,
    key: Tensor,  # [C, G, D]
    value: Tensor,
    out: Tensor,  # [C, H, D]
    lse: Tensor,  # [H, C]
    rng_state: Tensor,
    index: Tensor,  # [K]
    copies: Tensor,  # [K]
    starts: Tensor,  # [C]
    cu_seqlens: Tensor,  # [S + 1]
    key_cu_seqlens: Tensor,  # [S + 1]
    max_length: int,
    max_keys: int,
    scaling: float | None,
    sides: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, *gathered = torch.ops.torch_attn._varlen_attn_backward(
        grad,
        query,
        key.index_select(0, index),
        value.index_select(0, index),
        out,
        lse,
        cu_seqlens,
        key_cu_seqlens,
        max_length,
        max_keys,
        sides[0] < 0,
        rng_state,
        scaling,
        sides,
    )
    grad_key, grad_value = (sum_copies(part, copies, starts) for part in gathered)
    return grad_query, grad_key, grad_value


@torch.library.register_fake("raylearner::attend_gathered_backward")
def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape)


def attend_sdpa(
    query: Tensor,  # [H, C, D]
    key: Tensor,  # [G, C, D]
    value: Tensor,
    cu_seqlens: Tensor,  # [S + 1]
    max_length: int,
    scaling: float | None,
    window: int | None,
    keys: SharedKeys | None,
    *,
    is_causal: bool = True,
) -> Tensor:  # [C, H, D]
    """Attend in one call per bucket of sequences with equally long prefixes and similar length; any device,
    any precision.

    Padding is at the end, where causality hides it: without causality only equal lengths share a call.
    Long sequences after a prefix are cut into parts, whose prefix is all before them.
    """
    lengths = key_lengths = _lengths(cu_seqlens)
    of_keys, of_values = key.transpose(0, 1), value.transpose(0, 1)  # [K, G, D]
    if keys is not None:
        key_lengths = _lengths(keys.cu_seqlens)
        of_keys, of_values = keys.gather(of_keys), keys.gather(of_values)
    out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
    ratio = SHORTEST_TO_LONGEST if is_causal else 1.0
    for num_before, queries, reads, positions, padded in _buckets(
        lengths, key_lengths, query.device, ratio
    ):
        size = queries.shape[1]
        is_plain = num_before == 0 and (window is None or size <= window)
        attended = F.scaled_dot_product_attention(
            query[:, queries].transpose(0, 1),  # [r, H, size, D]
            of_keys[reads].transpose(1, 2),  # [r, G, num_before + size, D]
            of_values[reads].transpose(1, 2),
            attn_mask=None if is_plain else _mask(size, num_before, window).to(query.device),
            is_causal=is_plain and is_causal,
            scale=scaling,
            enable_gqa=key.shape[0] != query.shape[0],
        )
        flat = attended.transpose(1, 2).flatten(0, 1)  # [r * size, H, D]
        out = out.index_put((positions,), flat[padded])
    return out


def _lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    return tuple((cu_seqlens[1:] - cu_seqlens[:-1]).tolist())


@lru_cache(maxsize=8)
def _buckets(
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    device: torch.device,
    shortest_to_longest: float,
) -> list[tuple[int, Tensor, Tensor, Tensor, Tensor]]:
    """Return, per bucket: the tokens before each first query; the token of each padded query `[r, size]`;
    the key of each padded key; and the reverse of the padding of queries."""
    starts, key_starts = (np.cumsum((0, *some))[:-1].tolist() for some in (lengths, key_lengths))
    # First query and key, number of queries, tokens before the first query.
    pieces: list[tuple[int, int, int, int]] = []
    for start, key_start, length, num_keys in zip(
        starts, key_starts, lengths, key_lengths, strict=True
    ):
        before = num_keys - length
        step = LONGEST_MASKED if before else max(length, 1)
        pieces += [
            (start + first, key_start, min(step, length - first), before + first)
            for first in range(0, length, step)
        ]
    waiting = sorted(pieces, key=lambda piece: (piece[3], -piece[2]))
    buckets: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []
    while waiting:
        _, _, size, num_before = waiting[0]
        chosen = [
            piece
            for piece in waiting
            if piece[3] == num_before and piece[2] >= shortest_to_longest * size
        ]
        waiting = waiting[len(chosen) :]
        first_queries, first_keys, ends, _ = torch.tensor(chosen).T[:, :, None]
        offsets = torch.arange(size)
        queries = first_queries + torch.minimum(offsets, ends - 1)
        key_offsets = torch.minimum(torch.arange(num_before + size), num_before + ends - 1)
        padded = (offsets < ends).flatten().nonzero().squeeze(1)
        positions = queries.flatten()[padded]
        buckets.append(
            (
                num_before,
                queries.to(device),
                (first_keys + key_offsets).to(device),
                positions.to(device),
                padded.to(device),
            )
        )
    return buckets


@lru_cache(maxsize=8)
def _mask(size: int, num_before: int, window: int | None) -> Tensor:  # [size, num_before + size]
    distance = num_before + torch.arange(size)[:, None] - torch.arange(num_before + size)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)
