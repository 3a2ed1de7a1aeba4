"""Metrics that combine: what a micro-batch measures, kept as sums and extremes until all are in.

Rule: sums add, extremes take the extreme, over micro-batches and over ranks alike, and only then
is `value()` asked. `flatten` turns a dict of metrics into two vectors, one to all-reduce by sum and
one by max; `unflatten` puts the reduced vectors back.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Metric(Protocol):
    """One measured quantity that can be combined with the same quantity of another micro-batch."""

    def combine(self, other: Self) -> Self: ...

    def value(self) -> float:
        """The finished number; NaN when nothing was counted."""
        ...

    def sums(self) -> Tensor:
        """The parts that add, float64 `[k]`."""
        ...

    def maxima(self) -> Tensor:
        """The parts of which the largest survives, float64 `[k]`."""
        ...

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        """The same metric from reduced parts."""
        ...


Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as numerator and count."""

    total: Tensor  # [] float64
    count: Tensor  # [] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        """Mean of `values` where `mask` is True; a bool tensor gives a fraction."""
        values = values.detach().double()
        if mask is None:
            return cls(values.sum(), values.new_tensor(float(values.numel())))
        return cls(torch.where(mask, values, 0.0).sum(), mask.sum().double())

    def combine(self, other: Self) -> Self:
        return type(self)(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else math.nan

    def sums(self) -> Tensor:
        return torch.stack([self.total, self.count])

    def maxima(self) -> Tensor:
        return self.total.new_empty(0)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return type(self)(sums[0], sums[1])


@dataclass(frozen=True, slots=True)
class Std:
    """A standard deviation (`ddof` degrees of freedom removed) as count, sum and sum of squares."""

    total: Tensor  # [] float64
    squares: Tensor  # [] float64
    count: Tensor  # [] float64
    ddof: int = 0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None, *, ddof: int = 0) -> Self:
        mean = Mean.of(values, mask)
        return cls(mean.total, Mean.of(values.detach().double() ** 2, mask).total, mean.count, ddof)

    def combine(self, other: Self) -> Self:
        return self.rebuild(self.sums() + other.sums(), self.maxima())

    def value(self) -> float:
        count = float(self.count)
        if count <= self.ddof:
            return math.nan
        variance = (float(self.squares) - float(self.total) ** 2 / count) / (count - self.ddof)
        return math.sqrt(max(variance, 0.0))

    def sums(self) -> Tensor:
        return torch.stack([self.total, self.squares, self.count])

    def maxima(self) -> Tensor:
        return self.total.new_empty(0)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return type(self)(sums[0], sums[1], sums[2], self.ddof)


@dataclass(frozen=True, slots=True)
class EffectiveFraction:
    """Kish's effective sample size over the count: (sum w)^2 / (n sum w^2), 1 for equal weights."""

    total: Tensor  # [] float64
    squares: Tensor  # [] float64
    count: Tensor  # [] float64

    @classmethod
    def of(cls, weights: Tensor, mask: Tensor | None = None) -> Self:
        mean = Mean.of(weights, mask)
        return cls(mean.total, Mean.of(weights.detach().double() ** 2, mask).total, mean.count)

    def combine(self, other: Self) -> Self:
        return self.rebuild(self.sums() + other.sums(), self.maxima())

    def value(self) -> float:
        power = float(self.squares) * float(self.count)
        return float(self.total) ** 2 / power if power else math.nan

    def sums(self) -> Tensor:
        return torch.stack([self.total, self.squares, self.count])

    def maxima(self) -> Tensor:
        return self.total.new_empty(0)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return type(self)(sums[0], sums[1], sums[2])


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen; -inf (reported NaN) when none was."""

    extreme: Tensor  # [] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        values = values.detach().double()
        if mask is not None:
            values = torch.where(mask, values, -torch.inf)
        return cls(values.amax() if values.numel() else values.new_tensor(-torch.inf))

    def combine(self, other: Self) -> Self:
        return type(self)(torch.maximum(self.extreme, other.extreme))

    def value(self) -> float:
        extreme = float(self.extreme)
        return math.nan if extreme == -math.inf else extreme

    def sums(self) -> Tensor:
        return self.extreme.new_empty(0)

    def maxima(self) -> Tensor:
        return self.extreme.reshape(1)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return type(self)(maxima[0])


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value seen, kept as the largest of the negated values."""

    negated: Tensor  # [] float64

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        return cls(Max.of(-values, mask).extreme)

    def combine(self, other: Self) -> Self:
        return type(self)(torch.maximum(self.negated, other.negated))

    def value(self) -> float:
        negated = float(self.negated)
        return math.nan if negated == -math.inf else -negated

    def sums(self) -> Tensor:
        return self.negated.new_empty(0)

    def maxima(self) -> Tensor:
        return self.negated.reshape(1)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return type(self)(maxima[0])


def combine(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine the metrics of micro-batches or ranks, key by key."""
    out: Metrics = {}
    for part in parts:
        for key, metric in part.items():
            out[key] = out[key].combine(metric) if key in out else metric
    return out


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Finish every metric; call it once, after all are combined."""
    return {key: metric.value() for key, metric in metrics.items()}


def flatten(metrics: Mapping[str, Metric]) -> tuple[Tensor, Tensor]:
    """All parts that add and all that take the maximum, keys sorted: two float64 vectors.

    Ranks must hold the same keys. All-reduce the first by SUM, the second by MAX.
    """
    ordered = [metrics[key] for key in sorted(metrics)]
    if not ordered:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    sums = torch.cat([metric.sums() for metric in ordered])
    return sums, torch.cat([metric.maxima() for metric in ordered])


def unflatten(metrics: Mapping[str, Metric], sums: Tensor, maxima: Tensor) -> Metrics:
    """The metrics again, with the reduced vectors in the place of their own parts."""
    out: Metrics = {}
    for key in sorted(metrics):
        num_sums, num_maxima = len(metrics[key].sums()), len(metrics[key].maxima())
        out[key] = metrics[key].rebuild(sums[:num_sums], maxima[:num_maxima])
        sums, maxima = sums[num_sums:], maxima[num_maxima:]
    return out
