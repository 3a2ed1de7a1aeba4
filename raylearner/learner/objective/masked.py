"""Statistics over the selected tokens of a whole batch, masked by selection.

Legend: `T` packed tokens. The batch is what the caller passes: for whitening that must be the whole
batch of a step, never a micro-batch.
"""

import torch
from torch import Tensor

from raylearner.learner.batch.rows import select


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, 0 when it is empty; NaN off the mask does no harm: `[T] -> []`."""
    return select(values, mask).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (ddof 1) over the mask: `[T] -> []`. ValueError below two tokens."""
    count = mask.sum()
    if count < 2:
        raise ValueError(f"mask: a variance needs at least 2 selected tokens, got {int(count)}")
    return select(values - masked_mean(values, mask), mask).square().sum() / (count - 1)


def whiten(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), statistics (ddof 1) over the mask: `[T] -> [T]`.

    What lies off the mask is transformed too and means nothing. Fewer than two selected tokens have
    no spread: they become 0.
    """
    count = mask.sum()
    centered = values - masked_mean(values, mask)
    variance = select(centered, mask).square().sum() / (count - 1).clamp(min=1)
    return centered * (variance + epsilon).rsqrt()


def nan_std(values: Tensor, dim: int | None = None) -> Tensor:
    """Sample standard deviation (ddof 1) without the NaN entries; NaN below two of them."""
    known = ~values.isnan()
    count = known.sum() if dim is None else known.sum(dim)
    mean = values.nanmean() if dim is None else values.nanmean(dim, keepdim=True)
    squares = torch.where(known, values - mean, 0.0).square()
    total = squares.sum() if dim is None else squares.sum(dim)
    return torch.where(count > 1, (total / (count - 1).clamp(min=1)).sqrt(), torch.nan)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits): `[..., V] -> [...]`."""
    log_normalizer = torch.logsumexp(logits, dim=-1)
    return log_normalizer - (logits.softmax(dim=-1) * logits).sum(dim=-1)
