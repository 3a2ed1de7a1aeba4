"""Chunked log-probabilities and entropy equal the unchunked ones, and so do their gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from raylearner.learner.model import logprobs
from raylearner.learner.model.logprobs import chunked_logprobs


def full(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    scores = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return scores.gather(1, targets[:, None]).squeeze(1), -(scores.exp() * scores).sum(1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [True, False])
def test_chunked_equals_full(chunk_tokens: int, temperature: float, has_bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(23, dtype=torch.float64, requires_grad=True) if has_bias else None
    targets = torch.randint(23, (11,))
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    ours = chunked_logprobs(
        hidden, weight, targets, bias=bias, temperature=temperature, chunk_tokens=chunk_tokens
    )
    theirs = full(hidden, weight, targets, bias, temperature)
    weights = torch.randn(2, 11, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((out[0] * weights[0] + out[1] * weights[1]).sum(), inputs)
        for out in (ours, theirs)
    ]
    for a, b in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_tokens_that_cannot_be_sampled_leave_entropy_and_gradients_finite() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 3, 4])
    bias = torch.zeros(9, dtype=torch.float64)
    bias[5:] = -torch.inf
    ours = chunked_logprobs(hidden, weight, targets, bias=bias, temperature=0.7)
    theirs = full(hidden, weight[:5], targets, None, 0.7)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    mine, right = (
        torch.autograd.grad((out[0] + 0.3 * out[1]).sum(), [hidden, weight])
        for out in (ours, theirs)
    )
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_nothing_scored_still_reaches_every_input() -> None:
    hidden = torch.randn(0, 6, requires_grad=True)
    weight = torch.randn(23, 6, requires_grad=True)
    found, entropy = chunked_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    (found.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_states_give_float32_values() -> None:
    hidden = torch.randn(5, 8).bfloat16().requires_grad_()
    weight = torch.randn(9, 8).bfloat16().requires_grad_()
    found, _ = chunked_logprobs(hidden, weight, torch.arange(5), chunk_tokens=2)
    found.sum().backward()
    assert found.dtype == torch.float32
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature"):
        chunked_logprobs(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1).long(), temperature=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_of_known_distributions(temperature: float) -> None:
    # Each unit vector picks a column of logits: (log 2, 0, 0) and (0, log 3, 0).
    hidden = torch.eye(2, dtype=torch.float64)
    weight = torch.tensor([[2.0, 1.0], [1.0, 3.0], [1.0, 1.0]], dtype=torch.float64).log()
    _, entropy = chunked_logprobs(
        hidden * temperature, weight, torch.zeros(2, dtype=torch.int64), temperature=temperature
    )
    # (1/2, 1/4, 1/4): 1.5 bits. (1/5, 3/5, 1/5): log 5 - 0.6 log 3.
    expected = [1.5 * math.log(2), math.log(5) - 0.6 * math.log(3)]
    torch.testing.assert_close(entropy, torch.tensor(expected, dtype=torch.float64))


def test_the_backward_makes_the_logits_of_all_chunks_again_but_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    make = logprobs._logits

    def counted(hidden: Tensor, *rest: Any) -> Tensor:
        made.append(len(hidden))
        return make(hidden, *rest)

    monkeypatch.setattr(logprobs, "_logits", counted)
    hidden = torch.randn(11, 6, requires_grad=True)
    found, _ = chunked_logprobs(
        hidden, torch.randn(23, 6), torch.randint(23, (11,)), chunk_tokens=4
    )
    found.sum().backward(retain_graph=True)
    assert made == [4, 4, 3, 4, 4]
    first = hidden.grad
    hidden.grad = None
    found.sum().backward()
    assert made == [4, 4, 3, 4, 4, 3, 4, 4]
    torch.testing.assert_close(hidden.grad, first)
