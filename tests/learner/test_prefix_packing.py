"""Which prefixes rows share, and how they are divided into micro-batches."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from learners import make_episodes, prepend, random_trajectory

from raylearner.config.memory import KEYS_PER_TOKEN
from raylearner.learner.batch.balance import RowSize, divide
from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.batch.pack import LearnerBatch, pack
from raylearner.learner.batch.prefixes import Layout, SharedPrefix, find_prefixes
from raylearner.types import Trajectory

BUDGET = 160


def test_a_prefix_never_ends_within_an_image_nor_after_a_sampled_token() -> None:
    rng = np.random.default_rng(0)
    one = prepend(random_trajectory(rng, num_tokens=9), np.arange(20, 60, dtype=np.int32))
    other = replace(one, sample_index=1)
    assert [p and p.num_tokens for p in find_prefixes([one, other])] == [41, 41]
    assert one.loss_mask.argmax() == 42

    def with_run(start: int, end: int, image: bytes) -> Trajectory:
        ids = one.token_ids.copy()
        ids[start:end] = 5
        return replace(one, token_ids=ids, images=(image,), image_token_id=5)

    cut = [with_run(38, 42, b"a"), with_run(38, 42, b"a")]
    assert [p and (p.num_tokens, p.num_images) for p in find_prefixes(cut)] == [(38, 0)] * 2
    longer = [with_run(36, 38, b"a"), with_run(36, 39, b"b")]
    assert [p and (p.num_tokens, p.num_images) for p in find_prefixes(longer)] == [(36, 0)] * 2
    whole = [with_run(36, 38, b"a"), with_run(36, 38, b"a")]
    assert [p and (p.num_tokens, p.num_images) for p in find_prefixes(whole)] == [(41, 1)] * 2


row_sizes = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([None, 0, 1, 2])), min_size=1, max_size=24
)


@given(row_sizes, st.integers(1, 4), st.sampled_from([100, 130, 400]))
def test_division_places_each_row_once_within_the_budget(
    rows: list[tuple[int, int | None]], num_ranks: int, max_tokens: int
) -> None:
    prefixes = [
        None if family is None else SharedPrefix(family=family, num_tokens=(40, 32, 35)[family])
        for _, family in rows
    ]
    sizes = [
        RowSize(num_tokens=own + (0 if prefix is None else prefix.num_tokens), prefix=prefix)
        for (own, _), prefix in zip(rows, prefixes, strict=True)
    ]
    rounds = divide(sizes, num_ranks, max_tokens)
    assert {len(bins) for bins in rounds} == {num_ranks}
    bins = [one for bins in rounds for one in bins]
    assert sorted(index for one in bins for index in one.rows) == list(range(len(rows)))
    whole = divide([RowSize(num_tokens=size.num_tokens) for size in sizes], num_ranks, max_tokens)

    def time(rounds: Any) -> float:
        return sum(max(one.cost for one in bins) for bins in rounds)

    assert sum(one.num_tokens for one in bins) <= sum(size.num_tokens for size in sizes)
    assert time(rounds) <= time(whole) * 1.3
    for one in bins:
        assert one.num_tokens <= max_tokens
        lengths = [sizes[index].num_tokens for index in one.rows]
        layout = Layout.of(lengths, [prefixes[index] for index in one.rows])
        num_computed = sum(lengths)
        if layout is not None:
            num_computed = sum(end - start for _, start, end in layout.pieces)
            assert len(layout.keys) <= KEYS_PER_TOKEN * max_tokens
            starts = np.cumsum([0, *lengths])
            reads = np.split(layout.keys, layout.num_keys.cumsum()[:-1])
            for start, end in pairwise(starts):
                places = layout.places[start:end]
                assert sum(np.array_equal(read, places) for read in reads) >= 1
        assert num_computed == one.num_tokens


def test_a_group_is_divided_where_ranks_would_wait() -> None:
    prefix = SharedPrefix(family=0, num_tokens=200)
    sizes = [RowSize(num_tokens=300, prefix=prefix)] * 16
    assert [len(bins[0].rows) for bins in divide(sizes, 1, 4000)] == [16]
    (bins,) = divide(sizes, 2, 4000)
    assert [len(one.rows) for one in bins] == [8, 8]
    three = [
        RowSize(num_tokens=300, prefix=SharedPrefix(family=i, num_tokens=200))
        for i in range(3)
        for _ in range(8)
    ]
    (bins,) = divide(three, 2, 4000)  # one and a half groups each
    assert sorted(one.num_tokens for one in bins) == [1600, 1600]


def test_packing_with_shared_prefixes_is_deterministic_and_counts_what_is_computed() -> None:
    def layout() -> list[Any]:
        return [
            [
                [(row.trajectory.key, row.prefix) for row in micro]
                for mini in batch.mini_batches
                for micro in mini.micro_batches
            ]
            for batch in packed()
        ]

    def packed() -> list[LearnerBatch]:
        return pack(
            make_episodes(),
            policy_version=0,
            num_ranks=2,
            max_tokens_per_micro_batch=BUDGET,
            num_mini_batches=2,
            shares_prefixes=True,
        )

    assert layout() == layout()
    batch, other = packed()
    micros = [m for b in (batch, other) for mini in b.mini_batches for m in mini.micro_batches]
    computed = [
        len(MicroBatch.of(rows, policy_version=0, dtype=torch.float32).tokens.input_ids)
        for rows in micros
        if rows
    ]
    assert batch.num_computed_tokens == sum(computed) < batch.num_tokens
    assert max(computed) <= BUDGET
    trained = Counter(
        (row.trajectory.key, place)
        for rows in micros
        for row in rows
        for place in np.flatnonzero(row.trajectory.train_mask)
    )
    wanted = [
        (t.key, place)
        for group in make_episodes()
        for t in group.trajectories
        for place in np.flatnonzero(t.train_mask)
    ]
    assert trained == Counter(wanted)
