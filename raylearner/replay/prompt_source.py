"""The prompts of a run and the sampler that orders them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.data.cells import HASH_CHARACTERS, content_hash
from raylearner.errors import CheckpointError, ReplayError
from raylearner.replay.sampler import Sampler, SeenGroup, ShuffleSampler
from raylearner.types import Prompt


class PromptSource:
    """Owns the prompts and their sampler; it never ends."""

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, *, sampler: Sampler | None = None
    ) -> None:
        """Without a sampler, every epoch shuffles anew by the seed."""
        if not prompts:
            raise ValueError("at least one prompt is needed")
        self._prompts = list(prompts)
        self._hashes = [content_hash(prompt) for prompt in prompts]
        self._sampler = ShuffleSampler(prompts, seed=seed) if sampler is None else sampler

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def next_index(self) -> int:
        """The index of the next prompt. Raises `ReplayError` when the sampler names none."""
        index = self._sampler.next_index()
        if not 0 <= index < len(self._prompts):
            raise ReplayError(
                f"{self._name}.next_index gave {index!r}; expected one of {len(self._prompts)}"
                " prompts, counted from 0"
            )
        return index

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        self._sampler.observe(groups)

    def state(self) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """JSON-able metadata and the sampler's array."""
        values, array = self._sampler.state()
        metadata = {
            "rows": "".join(self._hashes),
            "sources": _sources(self._prompts),
            "sampler": self._name,
            "values": values,
        }
        return metadata, array

    def restore(self, metadata: dict[str, Any], array: NDArray[np.int64]) -> frozenset[int]:
        """Takes over a state; returns the places of prompts that hold something else now.

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
            for index, found in enumerate(self._hashes)
            if metadata["rows"][index * size : (index + 1) * size] != found
        )
        forget = getattr(self._sampler, "forget", None)
        if changed and forget is not None:
            forget(changed)
        return changed

    @property
    def _name(self) -> str:
        return type(self._sampler).__qualname__


def refuse_other_rows(metadata: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    """Raises `CheckpointError` where a saved state was of other numbers of rows."""
    saved, found = metadata["sources"], _sources(prompts)
    if [count for _, count in saved] != [count for _, count in found]:
        raise CheckpointError(
            f"data.train: the checkpoint was written with {_listed(saved)}, and the data has"
            f" {_listed(found)} now; resume with the same data, whose rows may be edited but not"
            " added or removed, or start another run from the checkpoint's model"
        )


def _sources(prompts: Sequence[Prompt]) -> list[list[Any]]:
    """Name and number of rows of each source, in order."""
    return [[name, count] for name, count in Counter(p.source for p in prompts).items()]


def _listed(sources: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{count} rows of {name!r}" for name, count in sources)
