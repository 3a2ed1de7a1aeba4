import numpy as np
import pytest
from episodes import make_trajectory
from hypothesis import given
from hypothesis import strategies as st

from raylearner.replay.staleness import (
    decide_staleness,
    is_mixed_version,
    over_stale,
    should_wait_for,
    staleness_histogram,
    trained_versions,
)
from raylearner.types import Trajectory, TrajectoryGroup


def make_tokens(
    versions: list[int], *, trained: list[bool] | None = None, index: int = 0, claim: int = 0
) -> Trajectory:
    mask = {} if trained is None else {"train_mask": np.array(trained)}
    return make_trajectory(
        versions, sample_index=index, claim_policy_version=claim, reward=1.0, **mask
    )


def make_group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=0, prompt_id="p", policy_version=0, trajectories=trajectories)


def test_trained_versions_leave_out_what_does_not_train() -> None:
    assert trained_versions(make_tokens([-1, 3, 4])).tolist() == [3, 4]
    partly = make_tokens([-1, 3, 4], trained=[False, False, True])
    assert trained_versions(partly).tolist() == [4]


def test_the_bound_is_inclusive() -> None:
    mask = over_stale(make_tokens([-1, 2, 3, 4]), 5, max_staleness=2)
    assert mask.tolist() == [False, True, False, False]


def test_mask_takes_over_old_tokens_out_and_keeps_the_reward() -> None:
    group = make_group(make_tokens([-1, 1, 3]), make_tokens([-1, 1, 1], index=1))
    decision = decide_staleness(group, 4, max_staleness=2, on_stale="mask")
    assert decision.group is not None
    assert [t.train_mask.tolist() for t in decision.group.trajectories] == [
        [False, False, True],
        [False, False, False],
    ]
    assert decision.group.rewards == {0: 1.0, 1: 1.0}
    assert (decision.num_masked_tokens, decision.num_over_stale_tokens) == (3, 0)
    assert group.trajectories[0].num_trained_tokens == 2, "the stored trajectory stays as it was"


@pytest.mark.parametrize(
    ("on_stale", "versions", "is_kept", "num_masked", "num_over_stale"),
    [
        ("mask", [0, 1], False, 2, 0),
        ("mask", [0, 4], True, 1, 0),
        ("wait", [0, 4], True, 1, 0),  # what waiting could not save
        ("drop", [0, 4], False, 0, 0),
        ("train", [0, 4], True, 0, 1),
    ],
)
def test_each_rule_decides_on_tokens_beyond_the_bound(
    on_stale, versions: list[int], is_kept: bool, num_masked: int, num_over_stale: int
) -> None:
    group = make_group(make_tokens([-1, *versions]))
    decision = decide_staleness(group, 4, max_staleness=2, on_stale=on_stale)
    assert (decision.group is not None) == is_kept
    assert (decision.num_masked_tokens, decision.num_over_stale_tokens) == (
        num_masked,
        num_over_stale,
    )
    assert (decision.group is group) == (on_stale == "train")


def test_old_tokens_that_do_not_train_drop_nothing() -> None:
    group = make_group(make_tokens([-1, 0, 4], trained=[False, False, True]))
    assert decide_staleness(group, 4, max_staleness=2, on_stale="drop").group is group


@pytest.mark.parametrize(
    ("oldest", "should_wait"), [([3], False), ([2], True), ([4, 2], True), ([], False)]
)
def test_waiting_is_for_what_the_step_would_push_over_the_bound(
    oldest: list[int], should_wait: bool
) -> None:
    assert should_wait_for(oldest, 4, max_staleness=2) is should_wait


def test_histogram_counts_trained_tokens() -> None:
    trajectories = [
        make_tokens([-1, 1, 3, 3]),
        make_tokens([-1, 2, 3], trained=[False, False, True]),
    ]
    assert staleness_histogram([trained_versions(t) for t in trajectories], 3) == [3, 0, 1]
    assert staleness_histogram([], 3) == []


def test_mixed_versions_are_recognised() -> None:
    assert is_mixed_version(make_tokens([-1, 2, 3]))
    assert not is_mixed_version(make_tokens([-1, 3, 3]))
    assert not is_mixed_version(make_tokens([-1]))


@given(
    versions=st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=8), min_size=1, max_size=4),
    policy_version=st.integers(9, 12),
    max_staleness=st.integers(0, 4),
    on_stale=st.sampled_from(["mask", "drop", "wait"]),
)
def test_no_trained_token_exceeds_the_bound(
    versions: list[list[int]], policy_version: int, max_staleness: int, on_stale
) -> None:
    group = make_group(*(make_tokens(v, index=i) for i, v in enumerate(versions)))
    decision = decide_staleness(
        group, policy_version, max_staleness=max_staleness, on_stale=on_stale
    )
    if decision.group is not None:
        histogram = staleness_histogram(
            [trained_versions(t) for t in decision.group.trajectories], policy_version
        )
        assert len(histogram) <= max_staleness + 1
        num_sampled = sum(t.num_sampled_tokens for t in group.trajectories)
        assert sum(histogram) == num_sampled - decision.num_masked_tokens
