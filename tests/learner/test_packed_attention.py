"""Packed attention equals one sequence at a time, in values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylearner.learner.attention import packed_attention

LENGTHS = (5, 1, 17, 16, 40, 3)


def one_at_a_time(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], window: int | None
) -> Tensor:
    outputs: list[Tensor] = []
    groups = query.shape[1] // key.shape[1]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        part = slice(start, start + length)
        k, v = (x[:, :, part].repeat_interleave(groups, 1) for x in (key, value))
        scores = query[:, :, part] @ k.transpose(2, 3) * 0.3
        distance = torch.arange(length)[:, None] - torch.arange(length)
        allowed = (distance >= 0) & (distance < (window or length))
        weights = F.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
        outputs.append((weights @ v).transpose(1, 2))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_packed_equals_separate(num_kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(LENGTHS), 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    out, _ = packed_attention(
        nn.Identity(),
        *inputs,
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor([0, *LENGTHS]).cumsum(0).int(),
        max_length_q=max(LENGTHS),
    )
    expected = one_at_a_time(*inputs, LENGTHS, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((out * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_model_that_drops_the_packing_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="does not pass packing on"):
        packed_attention(nn.Identity(), x, x, x, None)
