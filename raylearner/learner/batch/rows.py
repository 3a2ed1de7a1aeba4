"""The packed layout: which row of a micro-batch each flat token belongs to, and sums over rows.

Legend: `T` packed tokens, `R` rows (one row is one trajectory segment), nothing is padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, cast

from raylearner.learner.lazy_torch import Tensor, torch

LOG_RATIO_LIMIT = 20.0
"""Every log-ratio is clamped to plus or minus this before `exp` (e^20 is about 4.9e8)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The row of each of `T` packed tokens; guarantees that tokens of a row are contiguous."""

    index: Tensor  # [T] int64, non-decreasing, in 0..num_rows-1
    num_rows: int
    """Number of rows; a row may have no tokens."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Tensor) -> Self:
        """Lay rows end to end; `lengths [R]` counts all tokens of each row."""
        counts = torch.as_tensor(lengths, dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        return cls(index=index, num_rows=len(counts))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Lay the rows of several packed batches end to end."""
        offsets = accumulate((part.num_rows for part in parts), initial=0)
        index = torch.cat([part.index + start for part, start in zip(parts, offsets, strict=False)])
        return cls(index=index, num_rows=sum(part.num_rows for part in parts))

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, trained or not."""
        return self.index.shape[0]

    def spread(self, values: Tensor) -> Tensor:
        """Give every token its row's value: `[R] -> [T]`."""
        return values[self.index]

    def sum(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the sum over each row's selected tokens, 0 without any: `[T] -> [R]`."""
        if mask is not None:
            values = select(values, mask)
        out = values.new_zeros(self.num_rows)
        return out.index_add(0, self.index, values)

    def count(self, mask: Tensor) -> Tensor:
        """Count the selected tokens of each row: `[T] bool -> [R] int64`."""
        return self.sum(mask.to(torch.int64))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over each row's selected tokens, 0 without any: `[T] -> [R]`."""
        return self.sum(values, mask) / self.count(mask).clamp(min=1)

    def max(self, values: Tensor, mask: Tensor, *, empty: float) -> Tensor:
        """Return the maximum over each row's selected tokens, `empty` without any: `[T] -> [R]`."""
        out = values.new_full((self.num_rows,), -torch.inf)
        out = out.scatter_reduce(0, self.index, torch.where(mask, values, -torch.inf), "amax")
        return torch.where(self.count(mask) > 0, out, empty)

    def last(self, mask: Tensor) -> Tensor:
        """Return the position in `[T]` of each row's last selected token, -1 without any: `[R]`."""
        positions = torch.arange(self.num_tokens, device=self.index.device)
        out = positions.new_full((self.num_rows,), -1)
        return out.scatter_reduce(0, self.index, torch.where(mask, positions, -1), "amax")


def select(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where the mask is True, else 0, even for masked NaN."""
    return torch.where(mask, values, torch.zeros_like(values))


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Bound a log-ratio to plus or minus `LOG_RATIO_LIMIT`; the gradient is 0 beyond it."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def dense_ids(ids: Tensor) -> tuple[Tensor, int]:
    """Renumber integers 0, 1, ... in ascending order; return `[N]` and how many there are."""
    distinct, index = cast("tuple[Tensor, Tensor]", torch.unique(ids, return_inverse=True))  # pyright: ignore[reportUnknownMemberType]
    return index, len(distinct)


def terminal_rewards(rewards: Tensor, mask: Tensor, rows: Rows) -> Tensor:
    """Put each row's reward `[R]` on its last selected token, 0 elsewhere: `[T]`.

    Token-level estimators expect it there, with the mask of sampled tokens. The reward of a row without
    a selected token is dropped.
    """
    last = rows.last(mask)  # [R]
    out = rewards.new_zeros(rows.num_tokens)
    has_token = last >= 0
    out[last[has_token]] = rewards[has_token]
    return out
