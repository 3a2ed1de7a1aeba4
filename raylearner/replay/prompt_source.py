"""An endless, reproducible order of prompts."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.errors import CheckpointError
from raylearner.types import Prompt


class PromptSource:
    """Owns the prompts and the cursor. Every epoch shuffles anew by the seed; it never ends."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("at least one prompt is needed")
        self._prompts = list(prompts)
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order: NDArray[np.int64] = self._shuffle()

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def next_index(self) -> int:
        """The index of the next prompt; the cursor moves on."""
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._shuffle()
        self._position += 1
        return int(self._order[self._position - 1])

    def state(self) -> tuple[dict[str, Any], NDArray[np.int64]]:
        metadata = {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self._fingerprint(),
        }
        return metadata, self._order

    def restore(self, metadata: dict[str, Any], order: NDArray[np.int64]) -> None:
        if metadata["fingerprint"] != self._fingerprint():
            raise CheckpointError(
                f"the checkpoint was written with {len(order)} other prompts than the "
                f"{len(self._prompts)} given: resume with the same data"
            )
        self._seed, self._epoch = metadata["seed"], metadata["epoch"]
        self._position = metadata["position"]
        self._order = order

    def _shuffle(self) -> NDArray[np.int64]:
        order = np.arange(len(self._prompts), dtype=np.int64)
        np.random.default_rng([self._seed, self._epoch]).shuffle(order)
        return order

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(prompt.prompt_id.encode() + b"\0")
        return digest.hexdigest()
