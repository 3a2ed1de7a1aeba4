"""Which prompt comes next: shuffled epochs, a curriculum, or a class of the user's.

A sampler sees every group that trained, or that was dropped for teaching nothing, in the order in
which that happened, and its whole state goes into each checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raylearner.config.data import ByDifficulty, SamplerSection, Shuffle
from raylearner.config.section import load_reference
from raylearner.errors import ConfigError
from raylearner.types import Prompt, TrajectoryGroup

State = tuple[dict[str, Any], NDArray[np.int64]]
"""JSON-able values, and one array of whole numbers as the sampler likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGroup:
    """A group that left the replay, and the place of its prompt among all prompts."""

    index: int
    group: TrajectoryGroup
    is_trained: bool
    """False where all its rewards were equal and `replay.drop_zero_variance` dropped it."""


class Sampler(Protocol):
    """Orders prompts without end.

    A class that the YAML names is called as `Class(prompts, seed=..., weights=..., **arguments)`,
    with all prompts of all sources and the sources' weights by name. The same calls in the same
    order must give the same indices, and `restore` must bring back what `state` gave. A class may have
    `forget(indices)`, called after `restore` with prompts whose rows changed since.
    """

    def next_index(self) -> int:
        """The place of the next prompt among all prompts."""
        ...

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        """The groups of one trained batch, or one that was dropped."""
        ...

    def state(self) -> State: ...

    def restore(self, values: dict[str, Any], array: NDArray[np.int64]) -> None: ...


class ShuffleSampler:
    """Every prompt of a source once an epoch, shuffled anew; sources take turns by their weights.

    Of several sources, the one whose share lies furthest behind comes next.
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
    """The prompts of one source in the order of this epoch."""

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
    """Shuffled epochs in which prompts that taught nothing lately come up once in `keep_every`.

    A prompt is held back once `min_groups` groups of it in a row had equal rewards throughout, and
    free again with the first group that had not.
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
        """Groups with equal rewards in a row, by prompt; absent at none."""
        self._num_skipped: dict[int, int] = {}
        """Turns that a prompt was passed over since it last came up; absent at none."""

    def next_index(self) -> int:
        """Where every prompt is held back, one comes up all the same."""
        index = self._shuffle.next_index()
        for _ in range(self._num_prompts):
            if not self._is_passed_over(index):
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
        """Those prompts hold something else now: nothing is known of them."""
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

    def _is_passed_over(self, index: int) -> bool:
        is_held_back = self._num_equal.get(index, 0) >= self._min_groups
        return is_held_back and self._num_skipped.get(index, 0) < self._keep_every - 1


def make_sampler(
    section: SamplerSection,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    weights: Mapping[str, float],
) -> Sampler:
    """The sampler that the YAML asks for. Raises `ConfigError` for a class that cannot be taken."""
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
            return _of_user(section.kind, prompts, seed, weights, section.arguments)


def _of_user(
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
