"""The replay buffer: put, completion of groups, filters, take, commit, and waiting."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from episodes import assert_same
from replays import Clock, claim, fill, make_buffer, make_episode, taken
from snapshots import assert_snapshot

from raylearner.errors import ReplayError, TooManyFailures
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.stats import batch_progress
from raylearner.types import Claim, StopReason

# -- put -----------------------------------------------------------------------------------------


def test_a_group_is_complete_at_group_size_of_its_samples() -> None:
    buffer = make_buffer(extra=2)
    a, b, c, d = claim(buffer, 4)
    assert [buffer.put(make_episode(d)), buffer.put(make_episode(b))] == ["accepted"] * 2
    assert buffer.metrics()["buffer/groups/held"] == 1
    reply = buffer.claim("a", 0, 0)
    assert sorted(reply.cancelled) == [a.key, c.key]
    assert [buffer.put(make_episode(a)), buffer.put(make_episode(c))] == ["late", "late"]
    assert buffer.metrics()["buffer/dropped/late"] == 2


def test_an_episode_counts_once_whatever_its_segments() -> None:
    buffer = make_buffer()
    first, second = claim(buffer, 2)
    buffer.put(list(reversed(make_episode(first, num_segments=3))))
    assert buffer.metrics()["buffer/groups/held"] == 0
    buffer.put(make_episode(second))
    fill(buffer, 1)
    take = buffer.take(2, 0)
    assert taken(take) == [0, 1]
    segments = [(t.sample_index, t.segment) for t in take.groups[0].trajectories]
    assert segments == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_duplicates_are_ignored_and_counted() -> None:
    buffer = make_buffer()
    first, second = claim(buffer, 2)
    assert buffer.put(make_episode(first, reward=0.0)) == "accepted"
    assert buffer.put(make_episode(first, reward=5.0)) == "duplicate"
    buffer.put(make_episode(second))
    assert buffer.put(make_episode(second)) == "duplicate"
    assert buffer.metrics()["buffer/dropped/duplicate"] == 2
    assert buffer.metrics()["buffer/size"] == 2
    assert buffer.store.groups[0][0][0].reward == 0.0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"behavior_logprobs": np.zeros(3, np.float32)}, "behavior_logprobs"),
        ({"policy_versions": np.array([-1, 0, 1], np.int32)}, "policy_versions"),
        ({"prompt_id": "other"}, "prompt_id"),
        ({"stop_reason": StopReason.ABORTED}, "aborted"),
        ({"stop_reason": StopReason.ERROR}, "error"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name_and_played_again(change: dict, rule: str) -> None:
    buffer = make_buffer()
    [first] = claim(buffer, 1)
    [segment] = make_episode(first)
    outcome = buffer.put([replace(segment, **change)])
    assert outcome.startswith("refused: ")
    assert rule in outcome
    assert buffer.metrics()["buffer/dropped/refused"] == 1
    assert buffer.metrics()["buffer/size"] == 0
    [again] = claim(buffer, 1)
    assert again.key == (0, 0, 1)
    assert buffer.put(make_episode(first)) == "late"
    assert buffer.put(make_episode(again)) == "accepted"


def test_an_episode_is_refused_whole_for_one_bad_segment() -> None:
    buffer = make_buffer()
    [first] = claim(buffer, 1)
    good, other = make_episode(first, num_segments=2)
    assert "numbers" in buffer.put([good, replace(other, segment=0)])
    [again] = claim(buffer, 1)
    good, other = make_episode(again, num_segments=2)
    assert "reward" in buffer.put([good, replace(other, reward=0.25)])
    assert buffer.metrics()["buffer/size"] == 0


def test_what_was_never_claimed_is_refused() -> None:
    buffer = make_buffer()
    [first] = claim(buffer, 1)
    [segment] = make_episode(first)
    for change in ({"group_id": 9}, {"sample_index": 7}, {"sample_index": 1}):
        assert "refused: " in buffer.put([replace(segment, **change)])
    assert buffer.put([]).startswith("refused: ")


def test_refused_too_often_a_sample_is_a_failed_member() -> None:
    buffer = make_buffer(max_attempts=2)
    for _ in range(2):
        [first] = claim(buffer, 1)
        buffer.put([replace(make_episode(first)[0], prompt_id="other")])
    [second] = claim(buffer, 1)
    buffer.put(make_episode(second))
    fill(buffer, 1)
    group = buffer.take(2, 0).groups[0]
    assert group.is_partial
    assert [t.sample_index for t in group.trajectories] == [1]


def test_members_failed_for_good_complete_a_group_at_once() -> None:
    buffer = make_buffer(max_attempts=1)
    claim(buffer, 1, actor="dead")
    [second] = claim(buffer, 1)
    buffer.put(make_episode(second))
    assert buffer.metrics()["buffer/groups/held"] == 0
    assert buffer.fail_actor("dead") == 1
    assert buffer.metrics()["buffer/groups/held"] == 1


def test_a_failed_episode_keeps_its_place_without_reward_or_tokens() -> None:
    buffer = make_buffer()
    first, second = claim(buffer, 2)
    buffer.put(make_episode(first, reward=0.5, error="tool: search is down"))
    buffer.put(make_episode(second))
    fill(buffer, 1)
    group = buffer.take(2, 0).groups[0]
    assert group.rewards == {0: None, 1: 1.0}
    assert not group.is_partial
    assert group.trajectories[0].num_trained_tokens == 0
    metrics = buffer.metrics()
    assert metrics["rollout/errors/tool"] == 1
    source = group.trajectories[0].source
    counts = [metrics[f"rollout/source/{source}/{key}"] for key in ("episodes", "errors")]
    assert counts == [4, 1]


def test_the_progress_of_a_batch_counts_the_groups_that_have_most() -> None:
    buffer = make_buffer()
    assert batch_progress(buffer.ledger, 2, 2) == 0
    first, second, third, fourth = claim(buffer, 4)
    counts: list[int] = []
    for each in (first, third, second, fourth):
        buffer.put(make_episode(each))
        counts.append(batch_progress(buffer.ledger, 2, 2))
    assert counts == [1, 2, 3, 4]
    assert batch_progress(buffer.ledger, 1, 2) == 2
    buffer.take(2, 0)
    assert batch_progress(buffer.ledger, 2, 2) == 0


def test_stored_arrays_share_no_memory_with_what_came() -> None:
    buffer = make_buffer()
    [first] = claim(buffer, 1)
    [segment] = make_episode(first)
    buffer.put([segment])
    segment.token_ids[:] = 99
    segment.train_mask[:] = False
    [stored] = buffer.store.groups[0][0]
    assert stored.token_ids.tolist() == [0, 1, 2]
    assert stored.num_trained_tokens == 2


def test_images_are_kept_once_and_go_with_their_last_trajectory() -> None:
    buffer = make_buffer()
    for each in claim(buffer, 4):
        image = bytes([each.sample_index])
        buffer.put(make_episode(each, images=(b"shared", image, b"sha" + b"red")))
    assert buffer.metrics()["buffer/images"] == 3
    stored = [
        episode[0].images for group in buffer.store.groups.values() for episode in group.values()
    ]
    assert len({id(images[0]) for images in stored} | {id(images[2]) for images in stored}) == 1
    buffer.take(2, 0)
    buffer.commit([0, 1], 1)
    assert buffer.metrics()["buffer/images"] == 0


# -- completion by time --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partial_groups", "num_done", "is_held"),
    [("train", 2, True), ("train", 1, False), ("drop", 2, False)],
)
def test_at_the_time_limit_the_partial_group_rule_decides(
    partial_groups: str, num_done: int, is_held: bool
) -> None:
    clock = Clock()
    buffer = make_buffer(clock, group_size=3, group_time_limit_s=60, partial_groups=partial_groups)
    claims = claim(buffer, 3)
    for each in claims[:num_done]:
        buffer.put(make_episode(each, reward=float(each.sample_index)))
    clock.now_s = 60.0
    buffer.close_expired()
    metrics = buffer.metrics()
    assert metrics["buffer/groups/held"] == is_held
    assert metrics["buffer/dropped/time_limit"] == (not is_held)
    assert buffer.put(make_episode(claims[2])) == "late"
    assert claims[2].key in buffer.claim("a", 0, 0).cancelled
    if is_held:
        group = buffer.take(1, 0).groups[0]
        assert group.is_partial
        assert len(group.rewards) == 2


def test_failed_members_do_not_make_a_partial_group() -> None:
    clock = Clock()
    buffer = make_buffer(clock, group_size=4, group_time_limit_s=60)
    a, b, c, _ = claim(buffer, 4)
    buffer.put(make_episode(a))
    buffer.put(make_episode(b, error="tool: down"))
    buffer.put(make_episode(c, error="tool: down"))
    clock.now_s = 60.0
    buffer.close_expired()
    assert buffer.metrics()["buffer/dropped/time_limit"] == 1


# -- filters and failure limits --------------------------------------------------------------------


def test_groups_without_variance_are_dropped_and_refilled() -> None:
    buffer = make_buffer(drop_zero_variance=True, max_staleness=0)
    fill(buffer, 2, reward=1.0)
    assert buffer.metrics()["buffer/dropped/zero_variance"] == 2
    assert buffer.take(2, 0) is None
    fill(buffer, 2)
    assert taken(buffer.take(2, 0)) == [2, 3]


def test_groups_whose_members_all_failed_are_dropped() -> None:
    buffer = make_buffer()
    fill(buffer, 1, error="engine: gone")
    assert buffer.metrics()["buffer/dropped/all_failed"] == 1
    assert buffer.metrics()["buffer/size"] == 0


def test_too_many_filtered_groups_in_a_row_end_the_run_with_the_reason() -> None:
    buffer = make_buffer(drop_zero_variance=True, max_filtered_groups=3)
    fill(buffer, 2, reward=0.0)
    fill(buffer, 1)
    fill(buffer, 2, reward=0.0)
    assert buffer.take(2, 0) is None, "a usable group in between starts the count anew"
    fill(buffer, 1, reward=0.0)
    with pytest.raises(TooManyFailures, match="3 zero_variance"):
        buffer.take(2, 0)


def test_too_many_errors_in_a_window_end_the_run_with_cause_and_example() -> None:
    buffer = make_buffer(groups_per_step=9, error_window=4, max_error_fraction=0.5)
    claims = claim(buffer, 12)
    for each, error in zip(claims, ["tool: a", None, None, "tool: b"], strict=False):
        buffer.put(make_episode(each, error=error))
    assert buffer.take(9, 0) is None, "half of the window is not more than half"
    buffer.put(make_episode(claims[4], error="engine: c"))
    assert buffer.take(9, 0) is None
    buffer.put(make_episode(claims[5], error="tool: search answers 503"))
    with pytest.raises(TooManyFailures, match=r"3 of the last 4.* 2 .*'tool'.* search answers 503"):
        buffer.take(9, 0)


# -- take, commit, release -------------------------------------------------------------------------


def test_take_leases_the_oldest_complete_groups_in_order() -> None:
    buffer = make_buffer(max_staleness=2)
    claims = claim(buffer, 8)
    for each in reversed(claims):
        if each.group_id != 1:
            buffer.put(make_episode(each, reward=float(each.sample_index)))
    assert taken(buffer.take(2, 0)) == [0, 2]
    assert buffer.take(2, 0) is None
    for each in claims[2:4]:
        buffer.put(make_episode(each, reward=float(each.sample_index)))
    assert taken(buffer.take(2, 0)) == [1, 3]


def test_a_take_crosses_processes_whole() -> None:
    buffer = make_buffer()
    first, second = claim(buffer, 2)
    buffer.put(make_episode(first, num_segments=2, images=(b"png",)))
    buffer.put(make_episode(second, versions=()))
    fill(buffer, 1)
    take = buffer.take(2, 0)
    arrived = pickle.loads(pickle.dumps(take))
    assert (arrived.metrics, arrived.staleness_histogram) == (take.metrics, [8])
    for left, right in zip(take.groups, arrived.groups, strict=True):
        assert replace(left, trajectories=()) == replace(right, trajectories=())
        for one, other in zip(left.trajectories, right.trajectories, strict=True):
            assert_same(one, other)


def test_commit_trains_once_and_a_skipped_step_keeps_the_version() -> None:
    buffer = make_buffer()
    fill(buffer, 2)
    buffer.take(2, 0)
    buffer.commit([0, 1], 0)
    assert buffer.policy_version == 0
    assert buffer.metrics()["buffer/groups/trained"] == 2
    with pytest.raises(ReplayError, match="leased"):
        buffer.commit([0, 1], 1)
    assert buffer.policy_version == 0


def test_a_learner_behind_the_replay_must_load_first() -> None:
    buffer = make_buffer()
    fill(buffer, 2)
    buffer.take(2, 0)
    buffer.commit([0, 1], 3)
    with pytest.raises(ReplayError, match="load the replay"):
        buffer.take(2, 2)


def test_a_take_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(ReplayError, match="4"):
        make_buffer().take(5, 0)


def test_the_take_reports_staleness_masks_and_mixed_versions() -> None:
    buffer = make_buffer(max_staleness=1)
    first, *others = claim(buffer, 4)
    buffer.commit([], 2)
    buffer.put(make_episode(first, versions=(0, 1, 2)))
    for each in others:
        buffer.put(make_episode(each, versions=(2, 2)))
    take = buffer.take(2, 2)
    assert take.staleness_histogram == [7, 1]
    assert take.metrics["buffer/staleness/mean"] == 0.25
    assert take.metrics["buffer/staleness/max"] == 1
    assert take.metrics["buffer/masked_tokens"] == 1
    assert take.metrics["buffer/mixed_version_fraction"] == 0.25
    assert take.metrics["buffer/over_stale_trained"] == 0


@pytest.mark.parametrize("on_stale", ["mask", "drop", "wait"])
def test_complete_groups_that_grew_too_old_make_room(on_stale: str) -> None:
    buffer = make_buffer(max_staleness=1, on_stale=on_stale)
    fill(buffer, 4)
    buffer.commit([], 2)
    assert buffer.take(2, 2) is None
    assert buffer.metrics()["buffer/dropped/stale"] == 4
    assert buffer.metrics()["buffer/size"] == 0
    fill(buffer, 2, versions=(2,))
    assert taken(buffer.take(2, 2)) == [4, 5]


def test_train_takes_what_is_too_old_and_counts_it() -> None:
    buffer = make_buffer(max_staleness=1, on_stale="train")
    fill(buffer, 2)
    assert buffer.take(2, 2).metrics["buffer/over_stale_trained"] == 8


def test_nothing_but_stale_groups_ends_the_run() -> None:
    buffer = make_buffer(max_staleness=0, max_filtered_groups=4)
    for version in (1, 2):
        fill(buffer, 2, versions=(version - 1,))
        buffer.commit([], version)
        if version == 1:
            assert buffer.take(2, version) is None
    with pytest.raises(TooManyFailures, match=r"4 .*stale"):
        buffer.take(2, 2)


# -- wait ------------------------------------------------------------------------------------------


def waiting_buffer(clock: Clock) -> tuple[ReplayBuffer, list[Claim]]:
    """Two complete groups at version 1, and group 0 running since version 0."""
    buffer = make_buffer(clock, on_stale="wait", max_staleness=1, group_time_limit_s=60)
    slow = claim(buffer, 2, actor="slow")
    buffer.commit([], 1)
    fill(buffer, 2, versions=(1, 1))
    return buffer, slow


def test_wait_holds_a_take_back_for_a_group_that_it_would_make_too_old() -> None:
    buffer, slow = waiting_buffer(Clock())
    assert buffer.take(2, 1) is None
    assert "held back" in buffer.describe()[-1]
    for each in slow:
        buffer.put(make_episode(each, versions=(0, 1)))
    assert taken(buffer.take(2, 1)) == [0, 1]


def test_wait_ends_at_the_groups_time_limit_though_its_claimant_is_silent() -> None:
    clock = Clock()
    buffer, _ = waiting_buffer(clock)
    clock.now_s = 59.0
    assert buffer.take(2, 1) is None
    clock.now_s = 60.0
    assert taken(buffer.take(2, 1)) == [1, 2]
    assert buffer.metrics()["buffer/dropped/time_limit"] == 1


def test_wait_holds_nothing_back_for_a_dead_claimants_samples() -> None:
    buffer, _ = waiting_buffer(Clock())
    buffer.fail_actor("slow")
    assert claim(buffer, 1)[0].key == (0, 0, 1), "another actor may still save the group"
    assert taken(buffer.take(2, 1)) == [1, 2], "its samples will be of a version that is new enough"


def test_groups_admitted_while_a_take_waits_do_not_hold_it() -> None:
    clock = Clock()
    buffer, slow = waiting_buffer(clock)
    assert buffer.take(2, 1) is None
    late = buffer.claim("lagging", 0, 2).claims
    assert late[0].group_id == 3
    for each in slow:
        buffer.put(make_episode(each, versions=(0,)))
    assert taken(buffer.take(2, 1)) == [0, 1]


# -- what the watchdog sees --------------------------------------------------------------------------


def test_describe_names_who_runs_what_and_what_take_waits_for() -> None:
    clock = Clock()
    buffer = make_buffer(clock)
    claim(buffer, 3, actor="rollout-1")
    buffer.commit([], 4)
    buffer.claim("rollout-0", 1, 4)
    clock.now_s = 12.0
    buffer.take(2, 4)
    assert_snapshot("replay_description", "\n".join(buffer.describe()))


def test_length_distributions_show_what_started_finished_and_trained() -> None:
    clock = Clock()
    buffer = make_buffer(clock)
    fill(buffer, 2, versions=(0,) * 9)
    claim(buffer, 1)
    clock.now_s = 7.0
    buffer.take(2, 0)
    assert buffer.metrics()["buffer/trained/tokens/mean"] == 0
    buffer.commit([0, 1], 1)
    metrics = buffer.metrics()
    assert (metrics["buffer/started/count"], metrics["buffer/started/age_s/p95"]) == (1, 7.0)
    assert metrics["buffer/finished/tokens/p50"] == metrics["buffer/trained/tokens/mean"] == 10


def test_episodes_count_as_finished_once_their_group_ended_and_greedy_ones_never() -> None:
    buffer = make_buffer(play_greedy=True, groups_per_step=1, max_staleness=1, on_stale="drop")
    short, *rest = claim(buffer, 3)
    buffer.put(make_episode(short, versions=(0,)))
    assert buffer.metrics()["buffer/finished/tokens/mean"] == 0
    for each in rest:
        buffer.put(make_episode(each, versions=(0,) * 9))
    buffer.take(1, 0)
    buffer.commit([0], 1)
    metrics = buffer.metrics()
    assert metrics["buffer/finished/tokens/mean"] == metrics["buffer/trained/tokens/mean"] == 6
    for each in claim(buffer, 3):
        buffer.put(make_episode(each, versions=(1,) * 17))
    buffer.take(1, 3)
    metrics = buffer.metrics()
    assert metrics["buffer/finished/tokens/mean"] == (2 + 10 + 18 + 18) / 4
    assert metrics["buffer/trained_to_finished_length"] == 0.5


def test_the_masked_fraction_of_a_take_counts_tokens_beyond_the_bound() -> None:
    buffer = make_buffer(groups_per_step=1, max_staleness=1)
    buffer.commit([], 1)
    fill(buffer, 1, versions=(0, 1, 1, 1))
    take = buffer.take(1, 2)
    assert take is not None
    assert take.metrics["buffer/masked_fraction"] == 0.25


def test_the_first_failure_of_each_kind_is_kept_whole() -> None:
    buffer = make_buffer(groups_per_step=9, error_window=64)
    errors = [f"tool: no answer in {number} s\n  mine.py, line 3, in look" for number in (1, 2)]
    errors.append("environment: mine raised KeyError: 'secret'")
    for error in errors:
        (claim,) = buffer.claim("a", 0, 1).claims
        buffer.put(make_episode(claim, reward=None, error=error))
    assert buffer.counters.drain_failures() == [errors[0], errors[2]]
    assert buffer.counters.drain_failures() == []
