"""Checksums by bit patterns: against whole numbers, additive over parts, and what they notice."""

import random

import numpy as np
import pytest
import torch

from raylearner.weights.checksums import (
    MODULUS,
    Checksum,
    Checksums,
    Region,
    checksum,
    plain,
    read,
    whole,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = ((), (1,), (7,), (64,), (5, 8), (6, 10), (3, 7), (4, 3, 2, 5), (8, 16, 4), (4099,))


def by_hand(tensor: torch.Tensor) -> Checksum:
    """As the module describes it, in Python's whole numbers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), dtype="<u8").tolist()
    places = sum(place * word for place, word in enumerate(words))
    return Checksum(sum(words) % MODULUS, places % MODULUS, tensor.numel())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_is_the_sum_of_words_and_of_words_times_places(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = torch.randn(shape).to(dtype)
        assert checksum(tensor) == by_hand(tensor), shape
        assert read(plain(checksum(tensor))) == by_hand(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_however_a_tensor_is_cut_turned_or_copied(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    for shape in [shape for shape in SHAPES if len(shape) > 1]:
        tensor = torch.randn(shape).to(dtype)
        for dim, cut in ((0, 1), (0, 2), (1, 1), (1, 3)):
            sums = Checksums()
            for start, size in ((0, cut), (cut, shape[dim] - cut)):
                part = tensor.narrow(dim, start, size)
                region = Region.of(part.storage_offset(), part.shape, part.stride())
                sums.add("t", part.clone() if draw.random() < 0.5 else part, region)
            assert sums.result()["t"] == by_hand(tensor), (shape, dim, cut)
        turned = tensor.transpose(0, 1)
        sums = Checksums()
        sums.add("t", turned.contiguous(), Region.of(0, turned.shape, turned.stride()))
        assert sums.result()["t"] == by_hand(tensor)


def test_rows_of_a_shard_stand_where_they_stand_in_the_whole() -> None:
    tensor = torch.randn(10, 6).bfloat16()
    sums = Checksums()
    sums.add("t", tensor[:3], whole((3, 6)))
    sums.add("t", tensor[3:], whole((7, 6), offset=18))
    assert sums.result()["t"] == by_hand(tensor)


def test_one_bit_swapped_elements_rows_and_columns_are_noticed() -> None:
    tensor = torch.randn(16, 32).bfloat16()
    right = checksum(tensor)
    for row, column in ((0, 0), (3, 1), (15, 31)):
        changed = tensor.clone()
        changed.view(torch.int16)[row, column] ^= 1
        assert checksum(changed) != right
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checksum(swapped) != right
    assert checksum(tensor[:, torch.randperm(32)].contiguous()) != right
    assert checksum(tensor.t().contiguous()) != right
    # One step up here and one down there: the sum of the words alone stays as it is.
    moved = torch.zeros(8, 8, dtype=torch.int64)
    moved[1, 1], moved[6, 2] = 1, -1
    assert checksum(moved).words == 0
    assert checksum(moved).places != 0
