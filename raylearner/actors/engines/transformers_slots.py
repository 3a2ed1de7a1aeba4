"""Keys and values of requests that come and go, for the transformers engine.

Legend: `B` running requests.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class Slots(Cache):
    """Owns keys and values of the running requests, one slot each, tokens from the left.

    A step reads the first `B` slots and writes each row's next place; a fill writes whole rows.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._shape = (num_slots, max_tokens)
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._places = torch.empty(0)  # [B] where a step writes
        self._width = 0
        self._filled: tuple[int, Tensor] | None = None

    def extend(self, places: Tensor) -> None:
        """The next forward is a step that writes these places of the first slots."""
        self._filled = None
        self._places = places
        self._rows = torch.arange(len(places), device=places.device)
        self._width = int(places.max()) + 1

    def fill(self, first: int, indices: Tensor) -> None:
        """The next forward writes its rows, picked by `indices`, to the slots from `first` on."""
        self._filled = (first, indices)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        for pair in self._tensors:
            for tensor in pair:
                tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._tensors):
            self._tensors.append((self._new(key_states), self._new(value_states)))
        stored = self._tensors[layer_idx]
        if self._filled is not None:
            first, indices = self._filled
            for tensor, states in zip(stored, (key_states, value_states), strict=True):
                tensor[first : first + len(indices), :, : states.shape[2]] = states[indices]
            return key_states, value_states
        for tensor, states in zip(stored, (key_states, value_states), strict=True):
            tensor[self._rows, :, self._places] = states[:, :, 0]
        keys, values = (tensor[: len(self._rows), :, : self._width] for tensor in stored)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are given to every forward

    def _new(self, states: Tensor) -> Tensor:
        # Zeros: what is masked is still multiplied, and must be finite.
        num_slots, max_tokens = self._shape
        _, heads, _, width = states.shape
        with torch.inference_mode(mode=False):
            return states.new_zeros(num_slots, heads, max_tokens, width)
