"""Packing: nothing lost, nothing padded, every rank the same number of micro-batches."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from episodes import make_turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learners import make_groups, random_trajectory

from raylearner.learner.batch.balance import row_cost
from raylearner.learner.batch.micro_batch import MicroBatch
from raylearner.learner.batch.pack import LearnerBatch, pack
from raylearner.types import Trajectory, TrajectoryGroup

BUDGET = 64


def group_of(group_id: int, trajectories: list[Trajectory]) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id, prompt_id="p", policy_version=3, trajectories=tuple(trajectories)
    )


def rows_of(batches: list[LearnerBatch]) -> list[Any]:
    return [
        row
        for batch in batches
        for mini in batch.mini_batches
        for micro in mini.micro_batches
        for row in micro
    ]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.lists(st.integers(3, BUDGET), min_size=1, max_size=5), max_size=6),
    num_ranks=st.integers(1, 4),
    num_mini_batches=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_packing_loses_and_repeats_nothing(
    lengths: list[list[int]],
    num_ranks: int,
    num_mini_batches: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    groups = [
        group_of(
            g,
            [
                random_trajectory(
                    rng, group_id=g, sample_index=i, num_tokens=n, trains=rng.random() < 0.8
                )
                for i, n in enumerate(row)
            ],
        )
        for g, row in enumerate(lengths)
    ]
    batches = pack(
        groups,
        policy_version=3,
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=BUDGET,
        num_mini_batches=num_mini_batches,
    )
    everything = [t for g in groups for t in g.trajectories]
    trained = [t for t in everything if t.num_trained_tokens]
    rows = rows_of(batches)
    assert len(batches) == num_ranks
    assert Counter(r.trajectory.episode_key for r in rows) == Counter(
        t.episode_key for t in trained
    )
    by_key = {t.episode_key: t for t in trained}
    for row in rows:
        original, kept = by_key[row.trajectory.episode_key], row.trajectory
        for name in ("token_ids", "train_mask", "loss_mask", "behavior_logprobs"):
            head = getattr(original, name)[: kept.num_tokens]
            np.testing.assert_array_equal(getattr(kept, name), head)
        assert kept.num_trained_tokens == original.num_trained_tokens
        assert everything[row.episode].episode_key == kept.episode_key
    for batch in batches:
        assert len(batch.mini_batches) == min(num_mini_batches, len(trained))
        assert batch.num_trained_tokens == sum(t.num_trained_tokens for t in trained)
        assert batch.num_rows == len(trained)
        assert len(batch.rewards) == len(batch.groups) == len(everything)
        assert batch.num_tokens == sum(r.trajectory.num_tokens for r in rows)
    for minis in zip(*(batch.mini_batches for batch in batches), strict=True):
        assert len({len(mini.micro_batches) for mini in minis}) == 1
        assert len({mini.num_trained_tokens for mini in minis}) == 1
        for mini in minis:
            for micro in mini.micro_batches:
                assert sum(row.trajectory.num_tokens for row in micro) <= BUDGET
    sizes = [mini.num_episodes for mini in batches[0].mini_batches]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_packing_is_deterministic() -> None:
    def layout() -> list[list[tuple[int, int]]]:
        batches = pack(
            make_groups(7), policy_version=0, num_ranks=2, max_tokens_per_micro_batch=BUDGET
        )
        return [
            [(row.trajectory.group_id, row.episode) for row in micro]
            for batch in batches
            for micro in batch.mini_batches[0].micro_batches
        ]

    assert layout() == layout()


def test_ranks_are_balanced_and_micro_batches_nearly_full() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(6.0, 1.0, 256).astype(int) + 4, 8000)
    rows = [
        random_trajectory(rng, sample_index=i, num_tokens=int(n)) for i, n in enumerate(lengths)
    ]
    batches = pack(
        [group_of(0, rows)], policy_version=0, num_ranks=4, max_tokens_per_micro_batch=8192
    )
    costs = [
        [sum(row_cost(row.trajectory.num_tokens) for row in micro) for micro in mini.micro_batches]
        for batch in batches
        for mini in batch.mini_batches
    ]
    total = sum(map(sum, costs))
    # All ranks wait for the slowest in every micro-batch.
    assert sum(map(max, zip(*costs, strict=True))) < 1.1 * total / 4
    assert len(costs[0]) <= np.ceil(lengths.sum() / (4 * 8192)) + 1


def test_fewer_rows_than_ranks_leave_empty_micro_batches() -> None:
    rows = [random_trajectory(np.random.default_rng(0))]
    batches = pack(
        [group_of(0, rows)], policy_version=0, num_ranks=3, max_tokens_per_micro_batch=64
    )
    sizes = [[len(m) for m in b.mini_batches[0].micro_batches] for b in batches]
    assert sorted(sizes) == [[0], [0], [1]]


def test_without_trained_tokens_there_is_no_mini_batch_but_rewards_are_kept() -> None:
    rows = [random_trajectory(np.random.default_rng(0), trains=False, reward=0.5)]
    (batch,) = pack(
        [group_of(4, rows)], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=8
    )
    assert batch.mini_batches == ()
    assert batch.rewards.tolist() == [0.5]
    assert batch.groups.tolist() == [4]


def test_a_trajectory_over_the_budget_is_refused_with_its_length() -> None:
    rows = [random_trajectory(np.random.default_rng(0), group_id=9, sample_index=2, num_tokens=65)]
    with pytest.raises(ValueError, match="group 9, sample 2"):
        pack([group_of(9, rows)], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=64)


def test_segments_share_an_episode_and_its_reward() -> None:
    rng = np.random.default_rng(0)
    rows = [
        random_trajectory(rng, sample_index=0, segment=0, reward=1.0),
        random_trajectory(rng, sample_index=0, segment=1, reward=1.0),
        random_trajectory(rng, sample_index=1, reward=None),
    ]
    (batch,) = pack(
        [group_of(0, rows)], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=99
    )
    (mini,) = batch.mini_batches
    assert (mini.num_episodes, mini.num_rows) == (1, 2)  # what has no reward does not train
    assert batch.rewards[0] == 1.0
    assert np.isnan(batch.rewards[1])
    expected = sum(row.num_trained_tokens for row in rows[:2])
    assert batch.num_episode_tokens.tolist() == [expected, 0]
    assert batch.num_masked_tokens["unscored"] == rows[2].num_trained_tokens
    assert [row.episode for row in rows_of([batch])] == [0, 0]


def test_tokens_after_the_last_trained_one_are_cut() -> None:
    row = random_trajectory(np.random.default_rng(0), num_tokens=20)
    train_mask = row.loss_mask.copy()
    train_mask[10:] = False
    train_mask[9] = row.loss_mask[9] = True
    row = replace(row, train_mask=train_mask)
    (batch,) = pack(
        [group_of(0, [row])], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=99
    )
    assert rows_of([batch])[0].trajectory.num_tokens == 10


def test_rows_have_turns_and_hashes_of_their_start() -> None:
    """Two episodes with the same first reply and different second ones."""

    def episode(index: int, replies: tuple[str, str, str]) -> Trajectory:
        t = random_trajectory(np.random.default_rng(index), sample_index=index, num_tokens=12)
        mask = np.isin(np.arange(12), [2, 3, 6, 9, 11])
        spans = ((2, 4, 6), (6, 7, 9), (9, 12, 12))
        return replace(
            t,
            loss_mask=mask,
            train_mask=mask,
            behavior_logprobs=np.where(mask, -1, np.nan).astype(np.float32),
            policy_versions=np.where(mask, 0, -1).astype(np.int32),
            turns=tuple(
                make_turn("", start=start, end=end, reply_end=reply_end, reply=reply)
                for (start, end, reply_end), reply in zip(spans, replies, strict=True)
            ),
        )

    group = group_of(0, [episode(0, ("a", "b", "")), episode(1, ("a", "c", ""))])
    (batch,) = pack([group], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=64)
    first, second = batch.mini_batches[0].micro_batches[0]
    assert first.turns.tolist() == [-1, -1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    same = [a == b for a, b in zip(first.anchors, second.anchors, strict=True)]
    assert same == [True, True, False]
    rows = batch.mini_batches[0].micro_batches[0]
    micro = MicroBatch.of(rows, policy_version=0, dtype=torch.float32)
    assert micro.anchors[6:12].tolist() == [first.anchors[1]] * 3 + [first.anchors[2]] * 3


def test_turns_after_different_images_have_different_hashes() -> None:
    """The words of both replies are the same; each shows two images, the second in two tokens."""

    def episode(index: int, images: tuple[bytes, ...]) -> Trajectory:
        t = random_trajectory(np.random.default_rng(0), sample_index=index, num_tokens=12)
        mask = np.isin(np.arange(12), [3, 9, 11])
        places = np.isin(np.arange(12), [1, 5, 7, 8, 10])
        turns = tuple(
            make_turn("", start=start, end=start + 1, reply_end=reply_end, reply=reply)
            for start, reply_end, reply in ((3, 9, "see"), (9, 11, "see"), (11, 12, ""))
        )
        return replace(
            t,
            token_ids=np.where(places, 5, t.token_ids).astype(np.int32),
            loss_mask=mask,
            train_mask=mask,
            turns=turns,
            images=images,
            image_token_id=5,
        )

    shown = (b"pabc", b"pabd", b"pabc", b"pacb")
    group = TrajectoryGroup(
        group_id=0,
        prompt_id="0",
        policy_version=0,
        trajectories=tuple(
            episode(index, tuple(bytes([letter]) for letter in letters))
            for index, letters in enumerate(shown)
        ),
    )
    (batch,) = pack([group], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=64)
    (rows,) = batch.mini_batches[0].micro_batches
    first, second, again, turned = (row.anchors for row in rows)
    assert first == again
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
    assert [a == b for a, b in zip(first, turned, strict=True)] == [True, False, False]


def test_a_penalty_that_some_episodes_have_is_0_for_the_others() -> None:
    rng = np.random.default_rng(0)
    parts = ({"exact": 1.0}, {"exact": None, "penalty": -0.5}, {})
    group = TrajectoryGroup(
        group_id=0,
        prompt_id="0",
        policy_version=0,
        trajectories=tuple(
            replace(random_trajectory(rng, sample_index=i), rewards=rewards)
            for i, rewards in enumerate(parts)
        ),
        greedy_reward=0.5,
    )
    (batch,) = pack([group], policy_version=0, num_ranks=1, max_tokens_per_micro_batch=64)
    np.testing.assert_array_equal(batch.parts["exact"], [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(batch.parts["penalty"], [0.0, -0.5, np.nan])
    assert batch.greedy_rewards.tolist() == [0.5] * 3
