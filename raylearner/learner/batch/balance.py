"""Rows to micro-batches of similar cost: as few as fit, the expensive ones first.

Rows that share a prefix are placed together until their micro-batch would cost more than its part of the
whole; those beyond that make another micro-batch, with its own copy of the prefix. How far they may
exceed their part is tried, and the division with the shortest time of all ranks is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raylearner.config.memory import KEYS_PER_TOKEN
from raylearner.learner.batch.prefixes import SharedPrefix

QUADRATIC_TOKENS = 24_576
"""Sequence length at which attention costs as much as everything else: 12 x a hidden size of 2,048.
"""

EXCESSES = (math.inf, 1.5, 1.2, 1.1, 1.05, 1.0)
"""Costs of a micro-batch up to which rows join their family, as multiples of the mean, from most shared to
least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """What a row costs, alone and beside its family."""

    num_tokens: int
    prefix: SharedPrefix | None = None

    @property
    def num_shared(self) -> int:
        return 0 if self.prefix is None else self.prefix.num_tokens

    @property
    def cost(self) -> float:
        return row_cost(self.num_tokens)

    @property
    def saved_cost(self) -> float:
        """Cost that another row of the family in the same micro-batch saves."""
        return row_cost(self.num_shared)


@dataclass(slots=True, kw_only=True)
class Bin:
    """The rows of one micro-batch."""

    rows: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    """Computed tokens: a shared prefix counts once."""
    cost: float = 0.0


def row_cost(num_tokens: int) -> float:
    """Return a row's cost, in tokens of a short row: linear, plus attention's quadratic part."""
    return num_tokens + num_tokens * num_tokens / QUADRATIC_TOKENS


def divide(sizes: Sequence[RowSize], num_ranks: int, max_tokens: int) -> list[list[Bin]]:
    """Return rounds of `num_ranks` micro-batches each, which run at the same time."""
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index].num_tokens, index))
    tried = [(order, 0.0)]
    if any(size.prefix is not None for size in sizes):
        by_family = _by_family(order, sizes)
        tried = [*((by_family, excess) for excess in EXCESSES), *tried]
    divisions: list[list[list[Bin]]] = []
    for some_order, excess in tried:
        # Families that are together less need no fewer rounds.
        least = len(divisions[-1]) if divisions and excess else 1
        divisions.append(_divide(some_order, sizes, num_ranks, max_tokens, excess, least=least))
    return min(divisions, key=lambda rounds: (_time(rounds), len(rounds)))


def _time(rounds: Sequence[Sequence[Bin]]) -> float:
    """Return the cost of all rounds, each as long as its most expensive micro-batch."""
    return sum(max(one.cost for one in bins) for bins in rounds)


def _by_family(order: Sequence[int], sizes: Sequence[RowSize]) -> list[int]:
    """Return the rows with those of a family one after another, expensive families and rows first."""
    families: dict[int, list[int]] = {}
    for index in order:
        prefix = sizes[index].prefix
        key = -1 - index if prefix is None else prefix.family
        families.setdefault(key, []).append(index)

    def cost(members: list[int]) -> float:
        saved = sum(sizes[index].saved_cost for index in members[1:])
        return sum(sizes[index].cost for index in members) - saved

    return [index for members in sorted(families.values(), key=cost)[::-1] for index in members]


def _divide(
    order: Sequence[int],
    sizes: Sequence[RowSize],
    num_ranks: int,
    max_tokens: int,
    excess: float,
    *,
    least: int,
) -> list[list[Bin]]:
    """Return the fewest rounds that fit, but at least `least`; see `EXCESSES`."""
    shared = {size.prefix: size for size in sizes if size.prefix is not None}.values()
    total = sum(size.num_tokens - size.num_shared for size in sizes)
    total += sum(size.num_shared for size in shared)
    cost = sum(size.cost - size.saved_cost for size in sizes)
    cost += sum(size.saved_cost for size in shared)
    num_rounds = max(least, math.ceil(total / (max_tokens * num_ranks)))
    while True:
        num_bins = num_rounds * num_ranks
        limit = excess * cost / num_bins if excess else 0.0
        bins = _fill(order, sizes, num_bins, max_tokens, limit)
        if bins is not None:
            bins.sort(key=lambda one: -one.cost)
            return [bins[start : start + num_ranks] for start in range(0, num_bins, num_ranks)]
        num_rounds += 1


def _fill(
    order: Sequence[int], sizes: Sequence[RowSize], num_bins: int, max_tokens: int, limit: float
) -> list[Bin] | None:
    """Fill bins in order: a row goes where its family is, up to a cost of `limit`; else into the cheapest
    bin with space, or if that fails into the fullest."""
    for prefers_cheapest in (True, False):
        bins = [Bin() for _ in range(num_bins)]
        tokens, keys = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
        costs = np.zeros(num_bins)
        holds: dict[int | None, NDArray[np.bool_]] = {None: np.zeros(num_bins, np.bool_)}
        for index in order:
            size = sizes[index]
            family = None if size.prefix is None else size.prefix.family
            held = holds.setdefault(family, np.zeros(num_bins, np.bool_))
            saved = np.where(held, size.num_shared, 0)
            has_space = tokens + size.num_tokens - saved <= max_tokens
            has_space &= keys + size.num_tokens + size.num_shared - saved <= (
                KEYS_PER_TOKEN * max_tokens
            )
            if not has_space.any():
                break
            saved_costs = np.where(held, size.saved_cost, 0.0)
            joins = has_space & held & (costs + size.cost - saved_costs <= limit)
            key = costs - saved_costs if prefers_cheapest else saved - tokens
            chosen = int(np.argmin(np.where(joins if joins.any() else has_space, key, np.inf)))
            bins[chosen].rows.append(index)
            tokens[chosen] += size.num_tokens - saved[chosen]
            keys[chosen] += size.num_tokens + size.num_shared - saved[chosen]
            costs[chosen] += size.cost - saved_costs[chosen]
            held[chosen] |= family is not None
        else:
            for one, num_tokens, cost in zip(bins, tokens, costs, strict=True):
                one.num_tokens, one.cost = int(num_tokens), float(cost)
            return bins
    return None
