"""Prefixes that several rows of a micro-batch have in common: found, counted and laid out.

Rows of a group begin with the same prompt. A micro-batch computes it once: the prefix becomes a sequence
of its own, each row keeps its other tokens, and their attention reads the keys of both. The prefix ends
one token before the last common one, so that each row's first sampled token is scored from a hidden
state of that row.
Legend: `T` tokens of whole rows, `C` computed tokens, `S` computed sequences, `K` keys.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raylearner.types import Trajectory

SHORTEST_PREFIX = 32
"""Minimum number of tokens to share: below it a gather of keys costs as much as it saves."""
SMALLEST_SHARE = 1 / 16
"""Minimum share of the prefix in the family's longest row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """The first tokens of a row, the same in all rows with an equal one."""

    family: int
    """Number of the family, unique in a mini-batch."""
    num_tokens: int
    num_images: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which tokens of the rows are computed, in which order, and which keys they read."""

    pieces: tuple[tuple[int, int, int], ...]
    """Row, start and end of each computed sequence; a prefix is taken from its first row."""
    places: NDArray[np.int64]  # [T] position in C of each token of the rows
    keys: NDArray[np.int64]  # [K] position in C of each key
    num_keys: NDArray[np.int64]  # [S] keys of each sequence

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[SharedPrefix | None]) -> "Layout | None":
        """Lay out rows; None if no two of them share a prefix."""
        sizes = Counter(prefix.family for prefix in prefixes if prefix is not None)
        shared = [p if p is not None and sizes[p.family] > 1 else None for p in prefixes]
        if all(prefix is None for prefix in shared):
            return None
        pieces: list[tuple[int, int, int]] = []
        places: list[NDArray[np.int64]] = []
        keys: list[NDArray[np.int64]] = []
        prefix_places: dict[int, NDArray[np.int64]] = {}
        num_computed = 0

        def compute(row: int, start: int, end: int) -> NDArray[np.int64]:
            nonlocal num_computed
            pieces.append((row, start, end))
            num_computed += end - start
            return np.arange(num_computed - (end - start), num_computed)

        for row, (length, prefix) in enumerate(zip(lengths, shared, strict=True)):
            if prefix is None:
                places.append(compute(row, 0, length))
                keys.append(places[-1])
                continue
            if prefix.family not in prefix_places:
                prefix_places[prefix.family] = compute(row, 0, prefix.num_tokens)
                keys.append(prefix_places[prefix.family])
            own = compute(row, prefix.num_tokens, length)
            places.append(np.concatenate([prefix_places[prefix.family], own]))
            keys.append(places[-1])
        return cls(
            pieces=tuple(pieces),
            places=np.concatenate(places),
            keys=np.concatenate(keys),
            num_keys=np.array([len(of_one) for of_one in keys], np.int64),
        )


def saved_prefixes(prefixes: Sequence[SharedPrefix | None]) -> list[int]:
    """Return the length of each prefix that a micro-batch of rows with these prefixes does not compute
    again."""
    seen: set[int] = set()
    saved: list[int] = []
    for prefix in prefixes:
        if prefix is not None:
            saved += [prefix.num_tokens] if prefix.family in seen else []
            seen.add(prefix.family)
    return saved


def find_prefixes(trajectories: Sequence[Trajectory]) -> list[SharedPrefix | None]:
    """Return the prefix that each row shares with others of its group, None for those that share none.

    A row joins the family in which most tokens are saved.
    """
    by_group: dict[int, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        by_group.setdefault(trajectory.group_id, []).append(index)
    prefixes: list[SharedPrefix | None] = [None] * len(trajectories)
    family = 0
    for waiting in by_group.values():
        while len(waiting) > 1:
            first, others = waiting[0], waiting[1:]
            common = {i: _common_tokens(trajectories[first], trajectories[i]) for i in others}
            by_length = sorted(others, key=lambda index: -common[index])
            best = max(range(len(others)), key=lambda n: (n + 1) * common[by_length[n]])
            members, length = [first, *by_length[: best + 1]], common[by_length[best]]
            longest = max(trajectories[index].num_tokens for index in members)
            if length < max(SHORTEST_PREFIX, SMALLEST_SHARE * longest):
                members = [first]
            else:
                shared = SharedPrefix(
                    family=family,
                    num_tokens=length,
                    num_images=len(_image_starts(trajectories[first], length)),
                )
                for index in members:
                    prefixes[index] = shared
                family += 1
            waiting = [index for index in waiting if index not in members]
    return prefixes


def _common_tokens(one: Trajectory, other: Trajectory) -> int:
    """Return how many tokens both may share: equal, with equal images, none sampled, not the last."""
    limit = max(0, min(_num_before_sampled(one), _num_before_sampled(other)) - 1)
    differs = one.token_ids[:limit] != other.token_ids[:limit]
    end = int(differs.argmax()) if differs.any() else limit
    is_image, starts = one.is_placeholder, _image_starts(one, end)
    for number, start in enumerate(starts):
        is_cut = (
            number + 1 == len(starts) and end < one.num_tokens and is_image[start : end + 1].all()
        )
        if is_cut or one.images[number] != other.images[number]:
            return start
    return end


def _image_starts(trajectory: Trajectory, end: int) -> list[int]:
    """Return the first placeholder of each image that begins before `end`."""
    is_image = trajectory.is_placeholder[:end].astype(np.int8)
    return np.flatnonzero(np.diff(is_image, prepend=0) == 1).tolist()


def _num_before_sampled(trajectory: Trajectory) -> int:
    return int(trajectory.loss_mask.argmax()) if trajectory.loss_mask.any() else 0
