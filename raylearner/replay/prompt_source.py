"""The prompts of a run and the sampler that orders them."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
            "fingerprint": self._fingerprint(),
            "sampler": self._name,
            "values": values,
        }
        return metadata, array

    def restore(self, metadata: dict[str, Any], array: NDArray[np.int64]) -> None:
        """Raises `CheckpointError` for other prompts or another sampler."""
        if metadata["fingerprint"] != self._fingerprint():
            raise CheckpointError(
                "the checkpoint was written with other prompts than the"
                f" {len(self._prompts)} given: resume with the same data"
            )
        if metadata["sampler"] != self._name:
            raise CheckpointError(
                f"the checkpoint was written with the sampler {metadata['sampler']}, not"
                f" {self._name}: resume with the same data.sampler"
            )
        self._sampler.restore(metadata["values"], array)

    @property
    def _name(self) -> str:
        return type(self._sampler).__qualname__

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(prompt.prompt_id.encode() + b"\0" + prompt.source.encode() + b"\0")
        return digest.hexdigest()
