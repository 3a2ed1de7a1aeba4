"""Metrics that can be combined over micro-batches and ranks, kept as sums and extremes until then.

Sums add and extremes take the extreme; `value()` is called only after that. `flatten` turns a dict of
metrics into two vectors, one to all-reduce by sum and one by max; `unflatten` puts the reduced vectors
back. Every part is float64 and detached.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

from raylearner.learner.lazy_torch import Tensor, torch


class Metric(Protocol):
    """A quantity that can be combined with that of another micro-batch."""

    def combine(self, other: Self) -> Self: ...

    def value(self) -> float:
        """Return the number; NaN if nothing was counted."""
        ...

    def sums(self) -> Tensor:
        """Return the parts that add, float64 `[k]`."""
        ...

    def maxima(self) -> Tensor:
        """Return the parts that take the maximum, float64 `[k]`."""
        ...

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        """Return the same metric with reduced parts."""
        ...


Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class _Sums:
    """A metric whose parts all add up."""

    parts: Tensor  # [k] float64

    def combine(self, other: Self) -> Self:
        return replace(self, parts=self.parts + other.parts)

    def sums(self) -> Tensor:
        return self.parts

    def maxima(self) -> Tensor:
        return self.parts.new_empty(0)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return replace(self, parts=sums)


def _power_sums(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return count, sum and sum of squares of the selected values, float64 `[3]`."""
    values = values.detach().double()
    if mask is None:
        count = _filled(values.numel(), values)
    else:
        values, count = torch.where(mask, values, 0.0), mask.sum(dtype=torch.float64)
    return torch.stack([count, values.sum(), values.square().sum()])


def _filled(number: float, like: Tensor) -> Tensor:
    """Return a number on the device of another tensor, which copies nothing from the host."""
    return torch.full((), number, dtype=torch.float64, device=like.device)


def _numbers(parts: Tensor) -> list[float]:
    return [float(part) for part in parts.cpu().unbind()]


def _variance(count: float, total: float, squares: float, *, ddof: int) -> float:
    if count <= ddof:
        return math.nan
    return max((squares - total**2 / count) / (count - ddof), 0.0)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as numerator and count, plus a constant `offset` added at the end."""

    total: Tensor  # [] float64
    count: Tensor  # [] float64
    offset: float = 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None, *, offset: float = 0.0) -> Self:
        """Return the mean of `values` where `mask` is True; a bool tensor gives a fraction."""
        values = values.detach()
        if mask is not None:
            values, count = torch.where(mask, values, 0), mask.sum(dtype=torch.float64)
        else:
            count = _filled(values.numel(), values)
        return cls(values.sum(dtype=torch.float64), count, offset)

    def combine(self, other: Self) -> Self:
        return replace(self, total=self.total + other.total, count=self.count + other.count)

    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count + self.offset if count else math.nan

    def sums(self) -> Tensor:
        return torch.stack([self.total, self.count])

    def maxima(self) -> Tensor:
        return self.total.new_empty(0)

    def rebuild(self, sums: Tensor, maxima: Tensor) -> Self:
        return replace(self, total=sums[0], count=sums[1])


@dataclass(frozen=True, slots=True)
class Std(_Sums):
    """A standard deviation with `ddof` degrees of freedom removed."""

    ddof: int = 0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None, *, ddof: int = 0) -> Self:
        return cls(_power_sums(values, mask), ddof)

    def value(self) -> float:
        count, total, squares = _numbers(self.parts)
        return math.sqrt(_variance(count, total, squares, ddof=self.ddof))


@dataclass(frozen=True, slots=True)
class EffectiveFraction(_Sums):
    """Kish's effective sample size over the count: (sum w)^2 / (n sum w^2), 1 for equal weights."""

    @classmethod
    def of(cls, weights: Tensor, mask: Tensor | None = None) -> Self:
        return cls(_power_sums(weights, mask))

    def value(self) -> float:
        count, total, squares = _numbers(self.parts)
        return total**2 / (count * squares) if count * squares else math.nan


@dataclass(frozen=True, slots=True)
class Correlation(_Sums):
    """Pearson's correlation of two quantities."""

    @classmethod
    def of(cls, first: Tensor, second: Tensor, mask: Tensor) -> Self:
        one = _power_sums(first, mask)
        two = _power_sums(second, mask)
        product = _power_sums(first.double() * second.double(), mask)[1:2]
        return cls(torch.cat([one, two[1:], product]))

    def value(self) -> float:
        count, x, xx, y, yy, xy = _numbers(self.parts)
        power = _variance(count, x, xx, ddof=1) * _variance(count, y, yy, ddof=1)
        if not power > 0:
            return math.nan
        return (xy - x * y / count) / (count - 1) / math.sqrt(power)


@dataclass(frozen=True, slots=True)
class ExplainedVariance(_Sums):
    """1 - Var(target - prediction) / (Var(target) + epsilon), both with ddof 1."""

    epsilon: float = 1e-5

    @classmethod
    def of(cls, targets: Tensor, predictions: Tensor, mask: Tensor) -> Self:
        residual = _power_sums(targets - predictions, mask)
        return cls(torch.cat([_power_sums(targets, mask), residual[1:]]))

    def value(self) -> float:
        count, total, squares, residual, residual_squares = _numbers(self.parts)
        unexplained = _variance(count, residual, residual_squares, ddof=1)
        return 1 - unexplained / (_variance(count, total, squares, ddof=1) + self.epsilon)


_HISTOGRAM_BINS = 512
_HISTOGRAM_KNEE = 1e-3
_HISTOGRAM_REACH = math.asinh(20.0 / _HISTOGRAM_KNEE)


@dataclass(frozen=True, slots=True)
class LogQuantile(_Sums):
    """exp of a quantile of log-ratios, from a histogram: good to about 4% of the log-ratio."""

    quantile: float = 0.5

    @classmethod
    def of(cls, log_ratios: Tensor, mask: Tensor, *, quantile: float) -> Self:
        """Count `log_ratios` in nats; those beyond plus or minus 20 are in the outermost bin."""
        place = torch.asinh(log_ratios.detach().double() / _HISTOGRAM_KNEE) / _HISTOGRAM_REACH
        bins = ((place + 1) / 2 * _HISTOGRAM_BINS).nan_to_num(0.0)
        bins = bins.clamp(0, _HISTOGRAM_BINS - 1).long()
        counts = torch.zeros(_HISTOGRAM_BINS, dtype=torch.float64, device=log_ratios.device)
        return cls(counts.index_add(0, bins, mask.double()), quantile)

    def value(self) -> float:
        total = float(self.parts.sum())
        if not total:
            return math.nan
        target = self.quantile * total
        below = self.parts.cumsum(0)
        index = min(int(torch.searchsorted(below, target)), _HISTOGRAM_BINS - 1)
        count = float(self.parts[index])
        inside = (target - float(below[index]) + count) / count if count else 0.5
        place = (index + inside) / _HISTOGRAM_BINS * 2 - 1
        return math.exp(math.sinh(place * _HISTOGRAM_REACH) * _HISTOGRAM_KNEE)


@dataclass(frozen=True, slots=True)
class Max:
    """Largest value; NaN without any."""

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
class Min(Max):
    """Smallest value, stored as the largest of the negated values."""

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Self:
        return cls(Max.of(-values.detach().double(), mask).extreme)

    def value(self) -> float:
        extreme = float(self.extreme)
        return math.nan if extreme == -math.inf else -extreme


def summary(name: str, values: Tensor, mask: Tensor | None = None) -> Metrics:
    """Return mean, max and min of one quantity under `name/...`."""
    return {
        f"{name}/mean": Mean.of(values, mask),
        f"{name}/max": Max.of(values, mask),
        f"{name}/min": Min.of(values, mask),
    }


def combine(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine the metrics of micro-batches or ranks, key by key."""
    out: Metrics = {}
    for part in parts:
        for key, metric in part.items():
            out[key] = out[key].combine(metric) if key in out else metric
    return out


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return every metric's number; call it once, after all are combined."""
    return {key: metric.value() for key, metric in metrics.items()}


def flatten(metrics: Mapping[str, Metric]) -> tuple[Tensor, Tensor]:
    """Return all parts that add and all that take the maximum, keys sorted: two float64 vectors.

    Ranks must have the same keys. All-reduce the first by SUM, the second by MAX.
    """
    ordered = [metrics[key] for key in sorted(metrics)]
    if not ordered:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    sums = torch.cat([metric.sums() for metric in ordered])
    return sums, torch.cat([metric.maxima() for metric in ordered])


def unflatten(metrics: Mapping[str, Metric], sums: Tensor, maxima: Tensor) -> Metrics:
    """Return the metrics with the reduced vectors in place of their own parts."""
    out: Metrics = {}
    for key in sorted(metrics):
        num_sums, num_maxima = len(metrics[key].sums()), len(metrics[key].maxima())
        out[key] = metrics[key].rebuild(sums[:num_sums], maxima[:num_maxima])
        sums, maxima = sums[num_sums:], maxima[num_maxima:]
    return out
