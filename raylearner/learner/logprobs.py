"""Log-probabilities and entropy of chosen tokens, without logits of all of them at once.

Legend: `N` scored tokens, `H` hidden width, `V` vocab. Logits exist for one chunk of tokens at a
time, in the forward and again in the backward; memory is linear in `N` apart from one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    targets: Tensor,  # [N] int64
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of the distribution at `temperature`: `[N]` each.

    Computed in float32, or in float64 where the hidden states are.
    """
    if temperature <= 0:
        raise ValueError(f"temperature: want > 0, got {temperature!r}")
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, chunk_tokens)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def chunked_squared_probs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Sum of squared probabilities of each token's distribution: `[N]`, without gradient."""
    squares = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        squares[chunk] = (2 * _log_softmax(hidden[chunk], weight, bias, temperature)).exp().sum(1)
    return squares


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:  # [n, V]
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_accurate(hidden.dtype))
    return torch.log_softmax(logits / temperature, dim=-1)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            scores = _log_softmax(hidden[chunk], weight, bias, temperature)
            logprobs[chunk] = scores.gather(1, targets[chunk, None]).squeeze(1)
            entropy[chunk] = -(scores.exp() * scores).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """d logp/dz = onehot - p; dH/dz = -p (log p + H); z are the logits over temperature."""
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in full precision: bfloat16 would lose the small ones.
        grad_weight = weight.new_zeros(weight.shape, dtype=_accurate(weight.dtype))
        grad_bias = None if bias is None else grad_weight.new_zeros(len(bias))
        for start in range(0, len(hidden), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            scores = _log_softmax(hidden[chunk], weight, bias, ctx.temperature)
            probabilities = scores.exp()
            factor = scores.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None])
            factor = factor.add_(grad_logprobs[chunk, None])
            grad_logits = probabilities.mul_(factor).neg_()
            grad_logits.scatter_add_(1, targets[chunk, None], grad_logprobs[chunk, None])
            grad_logits.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[chunk]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
