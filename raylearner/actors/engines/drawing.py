"""Sampling of the next token of many requests at once, each with its own parameters and seed.

Legend: `B` requests, `V` vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from raylearner.types import Sampling

BELOW_ONE = 1.0 - 1e-12
"""Keeps a draw inside the cumulative probabilities, whose sum is rounded."""


@dataclass(slots=True, kw_only=True)
class Draw:
    """Input of one request for a step: sampling parameters, tokens so far, random generator."""

    sampling: Sampling
    generator: np.random.Generator
    token_ids: list[int] = field(default_factory=list[int])


def draw_tokens(
    logits: Tensor, draws: Sequence[Draw]
) -> tuple[Tensor, Tensor]:  # [B, V] -> [B], [B]
    """Return tokens and their log-probabilities under the distribution that they were drawn from.

    Greedy requests take the most likely token and report it at temperature 1.
    """
    samplings = [draw.sampling for draw in draws]
    logits = _penalize(logits.float(), draws)
    temperatures = [1.0 if s.is_greedy else s.temperature for s in samplings]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / logits.new_tensor(temperatures)[:, None]
    logits = _truncate(logits, samplings)
    logprobs = logits.log_softmax(dim=-1)
    if all(s.is_greedy for s in samplings):
        tokens = logprobs.argmax(dim=-1)
    else:
        cumulative = logprobs.double().exp().cumsum(dim=-1)  # [B, V]
        uniform = torch.tensor([draw.generator.random() for draw in draws], dtype=torch.float64)
        targets = uniform.to(logits.device) * cumulative[:, -1] * BELOW_ONE
        tokens = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
        if any(s.is_greedy for s in samplings):
            greedy = torch.tensor([s.is_greedy for s in samplings], device=logits.device)
            tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # where the logits are not finite
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _penalize(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Remove the banned tokens, and apply the repetition penalty of arXiv 1909.05858."""
    touched = [
        (row, draw)
        for row, draw in enumerate(draws)
        if draw.sampling.banned_token_ids or draw.sampling.repetition_penalty != 1.0
    ]
    if touched:
        logits = logits.clone()
    for row, draw in touched:
        if banned := list(draw.sampling.banned_token_ids):
            logits[row, banned] = -torch.inf
        if (penalty := draw.sampling.repetition_penalty) != 1.0:
            earlier = torch.tensor(sorted(set(draw.token_ids)), device=logits.device)
            values = logits[row, earlier]
            logits[row, earlier] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _truncate(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set logits outside min-p, top-k and top-p, in this order, to minus infinity.

    The most likely token always stays.
    """
    if all(s.top_p == 1.0 and s.top_k == 0 and s.min_p == 0.0 for s in samplings):
        return logits
    if any(s.min_p for s in samplings):
        minimum = logits.new_tensor([s.min_p for s in samplings])[:, None]
        logprobs = logits.log_softmax(dim=-1)
        best = logprobs.max(dim=-1, keepdim=True).values
        logits = logits.masked_fill(logprobs < best + minimum.log(), -torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True)  # [B, V]
    size = logits.shape[-1]
    kept = torch.tensor([s.top_k or size for s in samplings], device=logits.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(size, device=logits.device) >= kept, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    nucleus = logits.new_tensor([s.top_p if s.top_p < 1.0 else torch.inf for s in samplings])
    ordered = ordered.masked_fill(before >= nucleus[:, None], -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(1, order, ordered)
