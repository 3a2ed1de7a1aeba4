"""Log-probabilities and entropy of scored tokens, without logits of all of them at once.

Legend: `N` scored tokens, `H` hidden width, `V` vocab. Logits exist for one chunk of tokens at a
time, in the forward and again in the backward; memory is linear in `N` apart from one chunk. The last
chunk's logits stay for the backward, which begins with them: it needs their memory anyway.

liger-kernel's fused linear losses save the same memory, but each returns one loss whose gradient is
computed in the forward: no log-probabilities and no entropy that an objective could use.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOWEST_SCORE = -1e30
"""Log-probability of a token that cannot be sampled: finite, so that 0 times it is 0."""


def chunked_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    targets: Tensor,  # [N] int64
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    is_exact: bool = True,
    should_compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy of the distribution at `temperature`: `[N]` each.

    Computed in float32, or in float64 for float64 states. `is_exact` keeps logits in float32 from the
    matrix product on; otherwise they are rounded to the states' precision first. `should_compile`
    fuses the operations on a chunk of logits.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")
    return _ChunkedLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden, weight, bias, targets, temperature, chunk_tokens, is_exact, should_compile
    )


@torch.no_grad()
def chunked_squared_probs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V, H]
    *,
    bias: Tensor | None = None,  # [V]
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """Return the sum of squared probabilities of each token's distribution: `[N]`, without gradient."""
    squares = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
    for start in range(0, len(hidden), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        logits = _logits(hidden[chunk], weight, is_exact=True)
        squares[chunk] = torch.softmax(_scores(logits, bias, temperature), -1).square().sum(1)
    return squares


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, is_exact: bool) -> Tensor:  # [n, V]
    """Return logits without their bias."""
    accurate = _accurate(hidden.dtype)
    if not is_exact or hidden.dtype == accurate:
        return (hidden @ weight.t()).to(accurate)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=accurate)
    return torch.mm(hidden.to(accurate), weight.to(accurate).t())


def _scores(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:  # [n, V]
    """Return new logits of the distribution. The compiler fuses this with what comes after."""
    return logits / temperature if bias is None else (logits + bias).div_(temperature)


def _measure(
    logits: Tensor,  # [n, V]
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [n]
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and log-sum of exponentials: `[n]` each.

    With s the scores below their maximum and Z the sum of exp(s), the entropy is
    log Z - sum(exp(s) s) / Z: two passes over the logits.
    """
    scores = _scores(logits, bias, temperature)
    peak = scores.amax(1, keepdim=True)
    scores = scores.sub_(peak)
    of_targets = scores.gather(1, targets[:, None]).squeeze(1)
    scores = scores.clamp_(min=LOWEST_SCORE)
    exponentials = scores.exp()
    total = exponentials.sum(1)
    log_total = total.log()
    entropy = log_total - exponentials.mul_(scores).sum(1) / total
    return of_targets - log_total, entropy, peak.squeeze(1) + log_total


def _grad_logits(
    logits: Tensor,  # [n, V]
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [n]
    total: Tensor,  # [n]
    entropy: Tensor,  # [n]
    grad_logprobs: Tensor,  # [n]
    grad_entropy: Tensor,  # [n]
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:  # [n, V]
    """Return gradients: d logp/dz = onehot - p; dH/dz = -p (log p + H); z are logits / temperature.

    Computed as precisely as the logits, and returned in `dtype`.
    """
    scores = _scores(logits, bias, temperature).sub_(total[:, None]).clamp_(min=LOWEST_SCORE)
    probs = scores.exp()
    factor = scores.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
    grad = probs.mul_(factor).neg_().div_(temperature)
    of_targets = grad.gather(1, targets[:, None]) + (grad_logprobs / temperature)[:, None]
    return grad.to(dtype).scatter_(1, targets[:, None], of_targets.to(dtype))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` in place to a `total` of full precision.

    Sums of half precision are not rounded on GPUs: bfloat16 would lose the contributions of single chunks.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left @ right


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
        is_exact: bool,
        should_compile: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
        entropy, total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        measure = _compiled(_measure) if should_compile else _measure
        logits = None
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _logits(hidden[chunk], weight, is_exact)
            logprobs[chunk], entropy[chunk], total[chunk] = measure(
                logits, bias, targets[chunk], temperature
            )
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, total)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.is_exact, ctx.should_compile = is_exact, should_compile
        ctx.last_logits = logits
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_logprobs, grad_entropy = grads
        hidden, weight, bias, targets, entropy, total = ctx.saved_tensors
        grad_of = _compiled(_grad_logits) if ctx.should_compile else _grad_logits
        grad_hidden = torch.empty_like(hidden)
        accurate = _accurate(weight.dtype)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # a head may be frozen
        grad_weight = weight.new_zeros(weight.shape, dtype=accurate) if needs_weight else None
        grad_bias = weight.new_zeros(len(bias), dtype=accurate) if needs_bias else None
        logits, ctx.last_logits = ctx.last_logits, None
        for start in reversed(range(0, len(hidden), ctx.chunk_tokens)):
            chunk = slice(start, start + ctx.chunk_tokens)
            if logits is None:
                logits = _logits(hidden[chunk], weight, ctx.is_exact)
            grad_logits = grad_of(
                logits,
                bias,
                targets[chunk],
                total[chunk],
                entropy[chunk],
                grad_logprobs[chunk],
                grad_entropy[chunk],
                ctx.temperature,
                accurate if needs_bias else hidden.dtype,
            )
            logits = None
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[chunk])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )
