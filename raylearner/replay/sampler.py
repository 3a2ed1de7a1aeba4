"""The order of prompts: shuffled epochs, a curriculum, or a user-defined class.

A sampler receives every group that trained, or that was dropped since its rewards were all equal,
in order, and its complete state is saved in each checkpoint.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raylearner.config.data import ByDifficulty, SamplerSection, Shuffle
from raylearner.config.section import load_reference
from raylearner.data.cells import HASH_CHARACTERS, content_hash
from raylearner.errors import CheckpointError, ConfigError, ReplayError
from raylearner.types import Prompt, TrajectoryGroup

State = tuple[dict[str, Any], NDArray[np.int64]]
"""Values for JSON, and one array of integers in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGroup:
    """A group that left the replay, and the index of its prompt among all prompts."""

    index: int
    group: TrajectoryGroup
    is_trained: bool
    """False where all its rewards were equal and `replay.drop_zero_variance` dropped it."""


class Sampler(Protocol):
    """Orders prompts without end.

    A user-defined class is called as `Class(prompts, seed=..., weights=..., **arguments)`, with all
    prompts of all sources and the sources' weights by name. The same calls in the same order must give
    the same indices, and `restore` must accept the return value of `state`. A class may have
    `forget(indices)`, called after `restore` with prompts whose rows changed since.
    """

    def next_index(self) -> int:
        """Return the index of the next prompt among all prompts."""
        ...

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        """Receive the groups of one trained batch, or one that was dropped."""
        ...

    def state(self) -> State: ...

    def restore(self, values: dict[str, Any], array: NDArray[np.int64]) -> None: ...


class ShuffleSampler:
    """Plays every prompt of a source once per epoch, shuffled; sources alternate by weight.

    The next prompt comes from the source that is furthest behind its share.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, weights: Mapping[str, float] | None = None
    ) -> None:
        """A source that `weights` does not name has weight 1."""
        by_source: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_source.setdefault(prompt.source, []).append(index)
        self._decks = [_Deck(indices, seed, n) for n, indices in enumerate(by_source.values())]
        self._weights = [float((weights or {}).get(source, 1.0)) for source in by_source]

    def next_index(self) -> int:
        behind = min(
            range(len(self._decks)),
            key=lambda i: (self._decks[i].num_drawn + 1) / self._weights[i],
        )
        return self._decks[behind].draw()

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        return None

    def state(self) -> State:
        values = {"decks": [deck.state() for deck in self._decks]}
        return values, np.concatenate([deck.order for deck in self._decks])

    def restore(self, values: dict[str, Any], array: NDArray[np.int64]) -> None:
        start = 0
        for deck, state in zip(self._decks, values["decks"], strict=True):
            deck.restore(state, array[start : start + len(deck.order)])
            start += len(deck.order)


class _Deck:
    """Owns the prompts of one source in the order of this epoch."""

    def __init__(self, indices: Sequence[int], seed: int, number: int) -> None:
        self._indices = np.asarray(indices, np.int64)
        self._entropy = [seed, number] if number else [seed]
        self._epoch = self._position = 0
        self.num_drawn = 0
        self.order: NDArray[np.int64] = self._shuffled()

    def draw(self) -> int:
        if self._position == len(self.order):
            self._epoch, self._position = self._epoch + 1, 0
            self.order = self._shuffled()
        self._position += 1
        self.num_drawn += 1
        return int(self.order[self._position - 1])

    def state(self) -> dict[str, Any]:
        return {
            "entropy": self._entropy,
            "epoch": self._epoch,
            "position": self._position,
            "num_drawn": self.num_drawn,
        }

    def restore(self, state: dict[str, Any], order: NDArray[np.int64]) -> None:
        self._entropy, self._epoch = state["entropy"], state["epoch"]
        self._position, self.num_drawn = state["position"], state["num_drawn"]
        self.order = order

    def _shuffled(self) -> NDArray[np.int64]:
        order = self._indices.copy()
        np.random.default_rng([*self._entropy, self._epoch]).shuffle(order)
        return order


class DifficultySampler:
    """Shuffled epochs; prompts without a recent learning signal are played in one of `keep_every`.

    A prompt is held back once all rewards were equal in each of its last `min_groups` groups, and
    released by the first group whose rewards differ.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        keep_every: int = 4,
        min_groups: int = 1,
    ) -> None:
        self._shuffle = ShuffleSampler(prompts, seed=seed, weights=weights)
        self._num_prompts = len(prompts)
        self._keep_every = keep_every
        self._min_groups = min_groups
        self._num_equal: dict[int, int] = {}
        """Number of groups in a row with equal rewards, by prompt; absent at 0."""
        self._num_skipped: dict[int, int] = {}
        """Number of epochs in which a prompt was skipped since it was last played; absent at 0."""

    def next_index(self) -> int:
        """Return the next prompt that is not held back, or any where all are."""
        index = self._shuffle.next_index()
        for _ in range(self._num_prompts):
            if not self._is_held_back(index):
                break
            self._num_skipped[index] = self._num_skipped.get(index, 0) + 1
            index = self._shuffle.next_index()
        self._num_skipped.pop(index, None)
        return index

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        for seen in groups:
            rewards = {r for r in seen.group.rewards.values() if r is not None}
            if len(rewards) == 1:
                self._num_equal[seen.index] = self._num_equal.get(seen.index, 0) + 1
            elif rewards:
                self._num_equal.pop(seen.index, None)

    def forget(self, indices: Collection[int]) -> None:
        """Forget the history of prompts whose content changed."""
        for index in indices:
            self._num_equal.pop(index, None)
            self._num_skipped.pop(index, None)

    def state(self) -> State:
        values, order = self._shuffle.state()
        equal, skipped = sorted(self._num_equal.items()), sorted(self._num_skipped.items())
        return {"shuffle": values, "num_equal": equal, "num_skipped": skipped}, order

    def restore(self, values: dict[str, Any], array: NDArray[np.int64]) -> None:
        self._shuffle.restore(values["shuffle"], array)
        self._num_equal = dict(values["num_equal"])
        self._num_skipped = dict(values["num_skipped"])

    def _is_held_back(self, index: int) -> bool:
        is_held_back = self._num_equal.get(index, 0) >= self._min_groups
        return is_held_back and self._num_skipped.get(index, 0) < self._keep_every - 1


def make_sampler(
    section: SamplerSection,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    weights: Mapping[str, float],
) -> Sampler:
    """Return the configured sampler. Raises `ConfigError` for a class that does not fit."""
    match section:
        case Shuffle():
            return ShuffleSampler(prompts, seed=seed, weights=weights)
        case ByDifficulty():
            return DifficultySampler(
                prompts,
                seed=seed,
                weights=weights,
                keep_every=section.keep_every,
                min_groups=section.min_groups,
            )
        case _:
            return _make_custom(section.kind, prompts, seed, weights, section.arguments)


def _make_custom(
    path: str,
    prompts: Sequence[Prompt],
    seed: int,
    weights: Mapping[str, float],
    arguments: Mapping[str, Any],
) -> Sampler:
    make = load_reference(path)
    try:
        sampler = make(prompts, seed=seed, weights=weights, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"data.sampler: {path!r} must take (prompts, seed=, weights=) and the keys of"
            f" `arguments`: {error}"
        ) from error
    missing = [
        name
        for name in ("next_index", "observe", "state", "restore")
        if not callable(getattr(sampler, name, None))
    ]
    if missing:
        raise ConfigError(f"data.sampler: {path!r} has no {', '.join(missing)}")
    return sampler


class PromptSource:
    """Owns the prompts and their sampler, and draws from them without end."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, *, sampler: Sampler | None = None
    ) -> None:
        """Without a sampler, every epoch is shuffled by the seed."""
        if not prompts:
            raise ValueError("at least one prompt is needed")
        self._prompts = list(prompts)
        self._hashes = [content_hash(prompt) for prompt in prompts]
        self._sampler = ShuffleSampler(prompts, seed=seed) if sampler is None else sampler

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def next_index(self) -> int:
        """Return the index of the next prompt. Raises `ReplayError` for an index out of range."""
        index = self._sampler.next_index()
        if not 0 <= index < len(self._prompts):
            raise ReplayError(
                f"{self._name}.next_index returned {index!r}; expected one of {len(self._prompts)}"
                " prompts, counted from 0"
            )
        return index

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        self._sampler.observe(groups)

    def state(self) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Return metadata for JSON, and the sampler's array."""
        values, array = self._sampler.state()
        metadata = {
            "rows": "".join(self._hashes),
            "sources": _sources(self._prompts),
            "sampler": self._name,
            "values": values,
        }
        return metadata, array

    def restore(self, metadata: dict[str, Any], array: NDArray[np.int64]) -> frozenset[int]:
        """Restore a saved state; return the indices of prompts whose content changed since.

        Raises `CheckpointError` for other numbers of rows, or another sampler.
        """
        refuse_other_rows(metadata, self._prompts)
        if metadata["sampler"] != self._name:
            raise CheckpointError(
                f"the checkpoint was written with the sampler {metadata['sampler']}, not"
                f" {self._name}: resume with the same data.sampler"
            )
        self._sampler.restore(metadata["values"], array)
        size = HASH_CHARACTERS
        changed = frozenset(
            index
            for index, current in enumerate(self._hashes)
            if metadata["rows"][index * size : (index + 1) * size] != current
        )
        forget = getattr(self._sampler, "forget", None)
        if changed and forget is not None:
            forget(changed)
        return changed

    @property
    def _name(self) -> str:
        return type(self._sampler).__qualname__


def refuse_other_rows(metadata: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    """Raise `CheckpointError` where the numbers of rows differ from the saved ones."""
    saved, current = metadata["sources"], _sources(prompts)
    if [count for _, count in saved] != [count for _, count in current]:
        raise CheckpointError(
            f"data.train: the checkpoint was written with {_listed(saved)}, but the data now has "
            f"{_listed(current)}; resume with the same data, whose rows may be edited but not "
            "added or removed, or start another run from the checkpoint's model"
        )


def _sources(prompts: Sequence[Prompt]) -> list[list[Any]]:
    """Return name and number of rows of each source, in order."""
    return [[name, count] for name, count in Counter(p.source for p in prompts).items()]


def _listed(sources: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{count} rows of {name!r}" for name, count in sources)
