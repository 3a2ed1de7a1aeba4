"""Checksums of tensors by their bit patterns, which add up over any strided parts of a tensor.

A contiguous tensor is taken as 64-bit words w_q at positions q, 4 bfloat16 or 2 float32 elements a
word; its checksum is (sum of w_q, sum of q * w_q) modulo 2^64. Any changed element changes the first
sum, swapped elements change the second. Fused, sharded or gathered tensors are compared without assembling
them: parts with their positions in the tensor add up to the tensor's own checksum. Each element is read
twice, on its own device, without synchronization before `result`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 8
MAX_SLOW_ELEMENTS = 1 << 22
"""Maximum number of elements widened to words at a time, if they do not fill complete words."""
MODULUS = 1 << 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum(NamedTuple):
    """Checksum of a tensor or of a part of it; parts of one tensor add up to the tensor's."""

    words: int
    """Sum of the words, modulo 2^64."""
    places: int
    """Sum of the words times their positions, modulo 2^64."""
    num_elements: int

    def __add__(self, other: object) -> "Checksum":
        assert isinstance(other, Checksum)
        return Checksum(
            (self.words + other.words) % MODULUS,
            (self.places + other.places) % MODULUS,
            self.num_elements + other.num_elements,
        )


NOTHING = Checksum(0, 0, 0)


class Region(NamedTuple):
    """A strided part of a contiguous tensor, in elements; dimensions of one element are left out."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, offset: int, shape: Sequence[int], strides: Sequence[int]) -> "Region":
        kept = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
        return cls(offset, tuple(size for size, _ in kept), tuple(step for _, step in kept))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        """Return this part of a tensor's storage, counted from the tensor's first element."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def whole(shape: Sequence[int], offset: int = 0) -> Region:
    """Return the region of a whole contiguous tensor, or of rows of one that begin at `offset`."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return Region.of(offset, shape, strides)


class Checksums:
    """Adds up parts under their keys, in any order; a key's parts may come from several calls."""

    def __init__(self) -> None:
        self._keys: list[tuple[str, int]] = []
        self._marginals: list[list[Tensor]] = []
        self._weights: list[list[tuple[int, int]]] = []
        self._slow: dict[str, list[tuple[Tensor, int]]] = {}

    @torch.no_grad()
    def add(self, key: str, values: Tensor, region: Region | None = None) -> None:
        """Add `values`, which are the part `region` of the tensor `key`, or all of it.

        The region has the values' shape. The values may be freed or changed afterwards.
        """
        region = whole(values.shape) if region is None else region
        assert region.num_elements == values.numel(), (key, region, values.shape)
        if not values.numel():
            return
        values = values.detach().reshape(region.shape)
        per_word = WORD_BYTES // values.element_size()
        is_whole = region == whole(region.shape, region.offset) and values.is_contiguous()
        if is_whole and values.numel() % per_word == 0:
            # Any two-dimensional shape will do.
            values = values.reshape(-1, _columns(values, per_word))
            region = Region(region.offset, tuple(values.shape), (values.shape[1], 1))
        words = _words(values, region, per_word)
        if words is None:
            slow = _slow(values, region, per_word)
            self._slow.setdefault(key, []).append((slow, values.numel()))
            return
        dims = range(words[0].ndim)
        self._keys.append((key, values.numel()))
        self._marginals.append(
            [words[0].sum([d for d in dims if d != dim]) for dim in dims]
            if len(dims) > 1
            else [words[0].clone()]
        )
        self._weights.append(
            [(0 if d else words[1].offset, s) for d, s in enumerate(words[1].strides)]
        )

    def result(self) -> dict[str, Checksum]:
        """Return the checksums by key, after synchronizing with the device."""
        found: dict[str, Checksum] = {}
        by_device: dict[torch.device, list[int]] = {}
        for index, marginals in enumerate(self._marginals):
            by_device.setdefault(marginals[0].device, []).append(index)
        for device, indices in by_device.items():
            for index, (words, places) in zip(indices, self._sums(indices, device), strict=True):
                key, num_elements = self._keys[index]
                part = Checksum(words % MODULUS, places % MODULUS, num_elements)
                found[key] = found.get(key, NOTHING) + part
        for key, parts in self._slow.items():
            for sums, num_elements in parts:
                words, places = sums.tolist()
                part = Checksum(words % MODULUS, places % MODULUS, num_elements)
                found[key] = found.get(key, NOTHING) + part
        return found

    def _sums(self, indices: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return for each part the sum of its words and of its words times their positions."""
        pieces = [piece for index in indices for piece in self._marginals[index]]
        weights = [weight for index in indices for weight in self._weights[index]]
        counts = [len(self._marginals[index]) for index in indices]
        sizes = np.array([len(piece) for piece in pieces])
        ends = sizes.cumsum()
        starts = ends - sizes
        firsts = np.array([first for first, _ in weights])
        steps = np.array([step for _, step in weights])
        # The weight of an element of a piece is first + step * (place - start).
        table = torch.from_numpy(np.stack([firsts - steps * starts, steps, sizes])).to(device)
        flat = torch.cat(pieces)
        repeated = table[:2].repeat_interleave(table[2], dim=1, output_size=len(flat))
        places = repeated[0] + repeated[1] * torch.arange(len(flat), device=device)
        sums = torch.stack([flat, flat * places]).cumsum(1)
        sums = torch.cat([sums.new_zeros(2, 1), sums], 1)
        last = np.cumsum(counts, dtype=np.int64)  # pieces behind each part
        first = last - counts
        bounds = torch.from_numpy(
            np.stack([starts[first], ends[first], starts[first], ends[last - 1]])
        ).to(device)
        words = sums[0, bounds[1]] - sums[0, bounds[0]]
        weighted = sums[1, bounds[3]] - sums[1, bounds[2]]
        return torch.stack([words, weighted], 1).tolist()


def checksum(values: Tensor) -> Checksum:
    """Return the checksum of one tensor."""
    sums = Checksums()
    sums.add("", values)
    return sums.result().get("", NOTHING)


def plain(sums: Checksum) -> list[str | int]:
    """Return a checksum in plain types; the sums are text, since they are unsigned and have 64 bits."""
    return [f"{sums.words:016x}", f"{sums.places:016x}", sums.num_elements]


def read(travelled: Sequence[Any]) -> Checksum:
    """Return the checksum that `plain` converted."""
    words, places, num_elements = travelled
    return Checksum(int(words, 16), int(places, 16), num_elements)


def _columns(values: Tensor, per_word: int) -> int:
    """Return the number of columns of a table with few sums along either side."""
    if values.ndim > 1 and values.shape[-1] % per_word == 0:
        return values.shape[-1]
    words = values.numel() // per_word
    return per_word * min(words & -words, 1 << 12)


def _words(values: Tensor, region: Region, per_word: int) -> tuple[Tensor, Region] | None:
    """Return the values as words with their region; None if they do not fill complete words."""
    if not values.ndim or values.stride(-1) != 1 or region.strides[-1] != 1:
        return None
    steps = (*values.stride()[:-1], *region.strides[:-1])
    sizes = (values.shape[-1], values.storage_offset(), region.offset)
    if any(number % per_word for number in (*steps, *sizes)) or values.data_ptr() % WORD_BYTES:
        return None
    words = values.view(torch.int64)
    strides = (*(step // per_word for step in region.strides[:-1]), 1)
    return words, Region(region.offset // per_word, tuple(words.shape), strides)


def _slow(values: Tensor, region: Region, per_word: int) -> Tensor:
    """Return the same sums, with each element shifted to its place in its word."""
    size = values.element_size()
    bits = values.contiguous().view(_INTEGERS[size])
    device = values.device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    rows = bits.reshape(len(bits), -1) if bits.ndim else bits.reshape(1, 1)
    first = region.strides[0] if region.strides else 0
    others = torch.zeros((), dtype=torch.int64, device=device)
    for count, step in zip(region.shape[1:], region.strides[1:], strict=True):
        others = others[..., None] + step * torch.arange(count, device=device)
    num_rows = max(1, MAX_SLOW_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), num_rows):
        some = rows[start : start + num_rows].to(torch.int64)
        places = torch.arange(start, start + len(some), device=device) * first + region.offset
        places = places[:, None] + others.reshape(1, -1)
        if per_word > 1:
            some = (some & ((1 << 8 * size) - 1)) << (8 * size * (places % per_word))
        total += torch.stack([some.sum(), (some * (places // per_word)).sum()])
    return total
