"""Aggregation by global counts: any split of the batch has the same loss and gradient."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raylearner.learner.batch.rows import Rows, terminal_rewards
from raylearner.learner.objective.aggregation import aggregate, aggregate_rows

MODES = [
    "token_mean",
    "token_sum",
    "sequence_mean_of_sums",
    "sequence_mean_of_means",
    "sequence_mean_of_sums_scaled",
]


def naive(values: Tensor, mask: Tensor, lengths: list[int], mode: str) -> float:
    """Over lists of rows; `scale` is 7."""
    rows = [
        [v for v, m in zip(vs.tolist(), ms.tolist(), strict=True) if m]
        for vs, ms in zip(values.split(lengths), mask.split(lengths), strict=True)
    ]
    rows = [row for row in rows if row]
    flat = [value for row in rows for value in row]
    if not rows:
        return 0.0
    return {
        "token_mean": sum(flat) / len(flat),
        "token_sum": sum(flat),
        "sequence_mean_of_sums": sum(map(sum, rows)) / len(rows),
        "sequence_mean_of_means": sum(sum(row) / len(row) for row in rows) / len(rows),
        "sequence_mean_of_sums_scaled": sum(map(sum, rows)) / len(rows) / 7,
    }[mode]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], Tensor, Tensor, list[int]]:
    """Row lengths, values, a mask, and the micro-batch of each row."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    parts = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return lengths, values, mask, parts


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(MODES))
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(
    batch: tuple[list[int], Tensor, Tensor, list[int]], mode: Any
) -> None:
    lengths, values, mask, parts = batch
    rows = Rows.from_lengths(lengths)
    num_tokens, num_rows = int(mask.sum()), int((rows.count(mask) > 0).sum())
    leaf = values.clone().requires_grad_()
    counts: Any = {"mode": mode, "num_tokens": num_tokens, "num_rows": num_rows, "scale": 7}
    whole = aggregate(leaf, mask, rows, **counts)
    (gradient,) = torch.autograd.grad(whole, leaf)
    assert whole.item() == pytest.approx(naive(values, mask, lengths, mode), abs=1e-12)

    split = values.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for part in range(4):
        chosen = [row for row, number in enumerate(parts) if number == part]
        tokens = torch.isin(rows.index, torch.tensor(chosen, dtype=torch.int64))
        own = Rows.from_lengths([lengths[row] for row in chosen])
        total = total + aggregate(split[tokens], mask[tokens], own, **counts)
    torch.testing.assert_close(total, whole)
    (split_gradient,) = torch.autograd.grad(total, split)
    torch.testing.assert_close(split_gradient, gradient)


@pytest.mark.parametrize("mode", MODES)
def test_masked_values_never_leak(mode: Any) -> None:
    rows = Rows.from_lengths([2, 1])
    values = torch.tensor([1.0, math.nan, math.inf]).requires_grad_()
    mask = torch.tensor([True, False, False])
    loss = aggregate(values, mask, rows, mode=mode, num_tokens=1, num_rows=1, scale=1)
    assert loss == 1
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_segments_of_an_episode_share_one_vote() -> None:
    # An episode of 4 tokens in two segments, and one of 2 tokens in one.
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 20.0])
    mask = torch.ones(6, dtype=torch.bool)
    whole = Rows.from_lengths([4, 2])
    segments = Rows.from_lengths([3, 1, 2])
    wanted = aggregate(values, mask, whole, mode="sequence_mean_of_means", num_tokens=6, num_rows=2)
    actual = aggregate(
        values,
        mask,
        segments,
        mode="sequence_mean_of_means",
        num_tokens=6,
        num_rows=2,
        row_num_tokens=torch.tensor([4, 4, 2]),
    )
    torch.testing.assert_close(actual, wanted)


def test_row_losses_average_over_rows_that_train() -> None:
    rows = Rows.from_lengths([2, 1, 1])
    mask = torch.tensor([True, True, False, True])
    values = torch.tensor([1.0, math.nan, 5.0])
    assert aggregate_rows(values, mask, rows, num_rows=2) == 3
    halved = aggregate_rows(
        values, mask, rows, num_rows=2, row_weights=torch.tensor([1.0, 1.0, 0.5])
    )
    assert halved == 1.75


@pytest.mark.parametrize("scale", [None, 0, -1.0])
def test_the_scaled_mode_needs_a_scale(scale: float | None) -> None:
    rows, values, mask = Rows.from_lengths([1]), torch.ones(1), torch.ones(1, dtype=torch.bool)
    with pytest.raises(ValueError, match="scale"):
        aggregate(
            values,
            mask,
            rows,
            mode="sequence_mean_of_sums_scaled",
            num_tokens=1,
            num_rows=1,
            scale=scale,
        )


def test_rows_have_sums_means_extremes_and_ends() -> None:
    rows = Rows.from_lengths(torch.tensor([3, 0, 2]))
    mask = torch.tensor([True, False, True, False, False])
    values = torch.tensor([1.0, math.nan, 3.0, 7.0, 8.0])
    assert rows.sum(values, mask).tolist() == [4, 0, 0]
    assert rows.mean(values, mask).tolist() == [2, 0, 0]
    assert rows.count(mask).tolist() == [2, 0, 0]
    assert rows.max(values, mask, empty=-5).tolist() == [3, -5, -5]
    assert rows.last(mask).tolist() == [2, -1, -1]
    assert rows.spread(torch.tensor([1, 2, 3])).tolist() == [1, 1, 1, 3, 3]
    rewards = terminal_rewards(torch.tensor([0.5, 1.0, 2.0]), mask, rows)
    assert rewards.tolist() == [0, 0, 0.5, 0, 0]
