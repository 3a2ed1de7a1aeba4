"""Tokens of all ranks together, in an order that does not depend on packing.

Computations on a whole batch (whitening, baselines per token, sums over an episode's rows) run here on
every rank, so the number of ranks and micro-batches does not matter. Ranks exchange only the span of a
row from its first to its last trained token.

Waits for: the other ranks, in `WholeBatch.gather`.
Legend: `T` tokens of the spans, `R` rows, both of all ranks; `t` packed tokens of one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.batch.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """Rows of all ranks, ordered by episode and segment. Every number is float64."""

    rows: Rows
    episodes: Tensor  # [R] int64 index into the episode table
    mask: Tensor  # [T] bool, trained tokens
    of_rows: dict[str, Tensor]  # [R] each
    of_tokens: dict[str, Tensor]  # [T] each
    _mine: Tensor  # positions in T of this rank's tokens, in its own order
    _places: tuple[Tensor, ...]  # by micro-batch: positions of these tokens in its [t]
    _micros: tuple[MicroBatch, ...]

    @classmethod
    def gather(
        cls,
        micros: Sequence[MicroBatch],
        *,
        of_tokens: Sequence[dict[str, Tensor]],
        of_rows: Sequence[dict[str, Tensor]],
        group: dist.ProcessGroup,
    ) -> "WholeBatch":
        """Exchange values of tokens (`[t]` each) and rows, with the same names for each micro-batch.

        The ranks of `group` together hold each micro-batch of the batch once.
        """
        spans = [_span(micro) for micro in micros]
        row_names, token_names = sorted(of_rows[0]), sorted(of_tokens[0])
        rows = torch.cat(
            [
                torch.stack(
                    [
                        micro.episodes.double(),
                        micro.segments.double(),
                        micro.rows.count(span).double(),
                        *(more[name].detach().double() for name in row_names),
                    ],
                    dim=1,
                )
                for micro, span, more in zip(micros, spans, of_rows, strict=True)
            ]
        )
        tokens = torch.cat(
            [
                torch.stack(
                    [
                        micro.train_mask.double(),
                        *(more[name].detach().double() for name in token_names),
                    ],
                    dim=1,
                )[span]
                for micro, span, more in zip(micros, spans, of_tokens, strict=True)
            ]
        )
        all_rows, _ = _all_gather(rows, group)
        all_tokens, my_start = _all_gather(tokens, group)
        lengths = all_rows[:, 2].long()
        # By episode, then segment; the order of rows without a token does not matter.
        order = torch.argsort(all_rows[:, 1], stable=True)
        order = order[torch.argsort(all_rows[order, 0], stable=True)]
        rank_of_row = torch.empty_like(order)
        rank_of_row[order] = torch.arange(len(order), device=order.device)
        row_of_token = torch.repeat_interleave(rank_of_row, lengths)
        token_order = torch.argsort(row_of_token, stable=True)
        place = torch.empty_like(token_order)
        place[token_order] = torch.arange(len(place), device=place.device)
        all_rows, all_tokens = all_rows[order], all_tokens[token_order]
        return cls(
            rows=Rows.from_lengths(lengths[order]),
            episodes=all_rows[:, 0].long(),
            mask=all_tokens[:, 0] > 0,
            of_rows=dict(zip(row_names, all_rows[:, 3:].unbind(1), strict=True)),
            of_tokens=dict(zip(token_names, all_tokens[:, 1:].unbind(1), strict=True)),
            _mine=place[my_start : my_start + len(tokens)],
            _places=tuple(torch.nonzero(span).squeeze(1) for span in spans),
            _micros=tuple(micros),
        )

    def scatter(self, values: Tensor) -> list[Tensor]:
        """Return this rank's part of `values [T]`, by micro-batch `[t]`; 0 outside of the spans."""
        parts = torch.split(values[self._mine], [len(place) for place in self._places])
        return [
            part.new_zeros(micro.rows.num_tokens).index_copy(0, place, part)
            for micro, place, part in zip(self._micros, self._places, parts, strict=True)
        ]


def _span(micro: MicroBatch) -> Tensor:  # [t] bool
    """Select each row from its first to its last trained token."""
    positions = torch.arange(micro.rows.num_tokens, device=micro.rows.index.device)
    last = micro.rows.last(micro.train_mask)
    absent = micro.rows.num_tokens
    first = last.new_full((micro.rows.num_rows,), absent)
    first = first.scatter_reduce(
        0, micro.rows.index, torch.where(micro.train_mask, positions, absent), "amin"
    )
    return (positions >= micro.rows.spread(first)) & (positions <= micro.rows.spread(last))


def _all_gather(mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, int]:
    """Return the rows of all ranks in order, and the start of this rank's."""
    size = torch.tensor([len(mine)], device=mine.device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)  # pyright: ignore[reportUnknownMemberType]
    counts = [int(s) for s in sizes]
    padded = mine.new_zeros((max(counts), *mine.shape[1:]))
    padded[: len(mine)] = mine
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)  # pyright: ignore[reportUnknownMemberType]
    whole = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
    return whole, sum(counts[: group.rank()])
