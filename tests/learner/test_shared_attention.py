"""Attention over shared prefixes equals that of whole rows, in values and gradients, on every back end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint

from raylearner.learner.batch.prefixes import Layout, SharedPrefix
from raylearner.learner.batch.sharing import SharedKeys, Sharing, sum_copies
from raylearner.learner.model import shared_attention
from raylearner.learner.model.attention import Backend, packed_attention
from raylearner.learner.model.policy import keep_products
from raylearner.learner.model.shared_attention import attend_varlen

LENGTHS = (21, 5, 30, 12, 26, 17, 1)
FAMILIES = (0, None, 0, 1, 1, 0, None)
LAYOUT = Layout.of(
    LENGTHS,
    [
        None if family is None else SharedPrefix(family=family, num_tokens=(9, 6)[family])
        for family in FAMILIES
    ],
)
assert LAYOUT is not None
SHARING = Sharing.of(LAYOUT, device="cpu")
SIZES = [end - start for _, start, end in LAYOUT.pieces]


def attend(
    inputs: list[Tensor], sizes: tuple[int, ...], backend: Backend = "sdpa", **options: Any
) -> Tensor:
    query, key, value = inputs
    out, _ = packed_attention(
        nn.Identity(),
        query,
        key,
        value,
        None,
        backend=backend,
        scaling=0.3,
        cu_seq_lens_q=torch.tensor([0, *sizes]).cumsum(0).int(),
        max_length_q=max(sizes),
        **options,
    )
    return out


def each(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, window: list[int]
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Queries, keys and values `[H, n, D]` of each sequence, and the probabilities by definition."""
    repeats = q.shape[1] // k.shape[1]
    for number in range(len(cu_q) - 1):
        mine, read = slice(*cu_q[number : number + 2]), slice(*cu_k[number : number + 2])
        query = q[mine].transpose(0, 1)
        key, value = (x[read].transpose(0, 1).repeat_interleave(repeats, 0) for x in (k, v))
        behind = torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])
        behind += key.shape[1] - query.shape[1]  # the last query is at the last key
        allowed = (behind >= 0) & ((window[0] < 0) | (behind <= window[0]))
        scores = (query @ key.transpose(1, 2) * scale).masked_fill(~allowed, -torch.inf)
        yield mine, read, query, key, value, scores.softmax(-1)


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, scale, window, *_ = options
    out = torch.empty_like(q)
    for mine, _, _, _, value, weights in each(q, k, v, cu_q, cu_k, scale, window):
        out[mine] = (weights @ value).transpose(0, 1)
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, cu_q, cu_k, _, _, _, _, scale, window = options
    grads = [torch.empty_like(x) for x in (q, k, v)]
    heads = k.shape[1], -1
    for mine, read, query, key, value, weights in each(q, k, v, cu_q, cu_k, scale, window):
        above = grad[mine].transpose(0, 1)
        of_weights = above @ value.transpose(1, 2)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        grads[0][mine] = (of_scores @ key).transpose(0, 1)
        for whole, part in (
            (grads[1], of_scores.transpose(1, 2) @ query),
            (grads[2], weights.transpose(1, 2) @ above),
        ):
            whole[read] = part.unflatten(0, heads).sum(1).transpose(0, 1)
    return grads[0], grads[1], grads[2]


@pytest.fixture(scope="module")
def varlen_on_cpu() -> Iterator[None]:
    """Gives torch's varlen operations a slow kernel for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in (
            ("_varlen_attn", kernel_forward),
            ("_varlen_attn_backward", kernel_backward),
        ):
            patch.setitem(getattr(varlen, name)._backend_fns, None, kernel)
        yield


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash_attn"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_shared_keys_equal_whole_rows(
    num_kv_heads: int, window: int | None, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if num_kv_heads == 2:
        shared_attention._buckets.cache_clear()
        monkeypatch.setattr(shared_attention, "LONGEST_MASKED", 5)
    inputs = [
        torch.randn(1, heads, sum(SIZES), 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    whole = attend([x[:, :, SHARING.places] for x in inputs], LENGTHS, sliding_window=window)
    ours = attend(inputs, tuple(SIZES), backend, sliding_window=window, shared_keys=SHARING.keys)
    ours = ours[:, SHARING.places]
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)
    weight = torch.randn_like(whole)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((whole * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gradients_of_copies_are_added_in_float32() -> None:
    values = torch.full((257, 1, 2), 0.01, dtype=torch.bfloat16)
    values[0] = 1.0  # adding 0.01 to it in bfloat16 one by one would lose part of each
    copies = torch.arange(257)
    total = sum_copies(values, copies, torch.tensor([0, 256]))
    assert total.dtype == torch.bfloat16
    exact = values.double()
    torch.testing.assert_close(total[0, 0, 0].double(), exact[:256, 0, 0].sum(), rtol=4e-3, atol=0)
    torch.testing.assert_close(total[1], values[256])


def test_padding_reads_only_itself() -> None:
    keys = SHARING.keys.pad(sum(SIZES), 3)
    assert keys.index[-3:].tolist() == [sum(SIZES) + i for i in range(3)]
    assert keys.cu_seqlens.tolist() == [*SHARING.keys.cu_seqlens.tolist(), len(keys.index)]
    values = torch.randn(sum(SIZES) + 3, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(keys.index), 2, 4, dtype=torch.float64)
    (found,) = torch.autograd.grad((keys.gather(values) * weight).sum(), values)
    torch.testing.assert_close(found, torch.zeros_like(values).index_add(0, keys.index, weight))


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("context_fn", [None, keep_products()])
def test_recomputation_gives_the_same_gradients_and_gathered_keys_are_not_kept(
    context_fn: Any,
) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, 2, sum(SIZES), 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def run(*parts: Tensor) -> Tensor:
        return attend(list(parts), tuple(SIZES), "varlen", shared_keys=SHARING.keys).sin()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        plain = run(*inputs)
    assert max(t.numel() for t in kept if t.is_floating_point()) == inputs[0].numel()
    options = {} if context_fn is None else {"context_fn": context_fn}
    again = checkpoint(run, *inputs, use_reentrant=False, **options)
    wanted = torch.autograd.grad(plain.sum(), inputs)
    for found, right in zip(torch.autograd.grad(again.sum(), inputs), wanted, strict=True):
        assert torch.equal(found, right)


@pytest.mark.usefixtures("varlen_on_cpu")
def test_compiled_blocks_trace_shared_keys_as_one_graph_and_keep_no_gathered_ones() -> None:
    torch.manual_seed(0)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def run(x: Tensor, sizes: Tensor, longest: int, keys: SharedKeys) -> Tensor:
        y = x.sin()
        return attend_varlen(y, y, y, sizes, longest, 0.3, None, keys).sin()

    x = torch.randn(2, sum(SIZES), 8, dtype=torch.float64, requires_grad=True)
    options = torch.tensor([0, *SIZES]).cumsum(0).int(), max(SIZES), SHARING.keys
    compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = compiled(x, *options)
    assert max(t.numel() for t in kept if t.is_floating_point()) == x.numel()
    wanted = run(x, *options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad(out.sum(), x)[0] for out in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
