import json
from collections import Counter
from itertools import product

from replays import PROMPTS, make_section

from raylearner.replay.groups import SampleState, episode_seed
from raylearner.replay.ledger import Ledger
from raylearner.types import Claim


def make_ledger(**values) -> Ledger:
    return Ledger(make_section(**values), PROMPTS, seed=3)


def resume(ledger: Ledger, fresh: Ledger, *, now_s: float = 0.0) -> Ledger:
    """Return the `fresh` ledger with the state of the other, by way of JSON."""
    metadata, order = ledger.state()
    fresh.restore(json.loads(json.dumps(metadata)), order, now_s=now_s)
    return fresh


def claim(ledger: Ledger, count: int, *, actor: str = "a", version: int = 0) -> list[Claim]:
    return ledger.claim(actor, version, count, now_s=0.0)


def complete(ledger: Ledger, group_id: int) -> None:
    group = ledger.running[group_id]
    for index, sample in enumerate(group.samples):
        if sample.state is SampleState.RUNNING:
            ledger.finish(group, index, 0)
    ledger.hold(group, is_partial=False)


def test_admission_counts_running_held_and_leased_groups() -> None:
    ledger = make_ledger()
    assert len(claim(ledger, 100)) == 4 * 2
    complete(ledger, 0)
    assert claim(ledger, 100) == []
    ledger.lease(ledger.held[0])
    assert claim(ledger, 100) == []
    ledger.train(0)
    assert {c.group_id for c in claim(ledger, 100)} == {4}


def test_what_is_dropped_frees_its_slot() -> None:
    ledger = make_ledger()
    claim(ledger, 100)
    ledger.drop(ledger.running[1], "time_limit")
    assert {c.group_id for c in claim(ledger, 100)} == {4}


def test_the_concurrency_cap_counts_running_groups_only() -> None:
    ledger = make_ledger(max_concurrent_groups=1)
    assert {c.group_id for c in claim(ledger, 100)} == {0}
    complete(ledger, 0)
    assert {c.group_id for c in claim(ledger, 100)} == {1}


def test_a_lagging_engine_gets_nothing_not_even_a_retry() -> None:
    ledger = make_ledger()
    claim(ledger, 1)
    ledger.fail_actor("a")
    ledger.policy_version = 5
    assert claim(ledger, 100, version=3) == []
    assert claim(ledger, 1, version=4)[0].key == (0, 0, 1)


def test_an_engine_ahead_of_the_learner_holds_lost_weights_and_gets_nothing() -> None:
    assert claim(make_ledger(), 1, version=1) == []


def test_retries_come_before_new_groups_and_need_no_capacity() -> None:
    ledger = make_ledger()
    assert len(claim(ledger, 2, actor="dead")) == 2
    assert len(claim(ledger, 6)) == 6
    assert claim(ledger, 1) == []
    assert len(ledger.fail_actor("dead")) == 2
    assert [c.key for c in claim(ledger, 5)] == [(0, 0, 1), (0, 1, 1)]


def test_claims_record_claimant_start_and_engine_version() -> None:
    ledger = make_ledger()
    [first] = ledger.claim("actor-7", 0, 1, now_s=12.5)
    sample = ledger.running[0].samples[0]
    assert (sample.claimant, sample.started_at_s, sample.version) == ("actor-7", 12.5, 0)
    assert first.policy_version == 0


def test_a_sample_fails_for_good_after_max_attempts() -> None:
    ledger = make_ledger(max_attempts=2)
    for _ in range(2):
        claim(ledger, 1)
        ledger.fail_actor("a")
    sample = ledger.running[0].samples[0]
    assert (sample.state, sample.is_failed) == (SampleState.DONE, True)
    assert claim(ledger, 1)[0].sample_index == 1


def test_a_sample_that_kills_engines_fails_alone() -> None:
    """Sample (0, 1) ends every engine that plays it; the others only happened to run there."""
    ledger, num_deaths = make_ledger(max_attempts=3), 0
    while claims := claim(ledger, 8, actor=f"actor-{num_deaths}"):
        if any(c.key[:2] == (0, 1) for c in claims):
            ledger.fail_actor(f"actor-{num_deaths}")
            num_deaths += 1
            continue
        for group_id, index, _ in (c.key for c in claims):
            ledger.finish(ledger.running[group_id], index, 0)
    assert num_deaths == 3
    samples = {(g.group_id, i): s for g in ledger.running.values() for i, s in enumerate(g.samples)}
    assert [place for place, sample in samples.items() if sample.is_failed] == [(0, 1)]
    assert {sample.state for sample in samples.values()} == {SampleState.DONE}


def test_completing_a_group_cancels_what_it_still_runs_once_and_to_its_claimant() -> None:
    ledger = make_ledger(extra=1)
    claim(ledger, 2, actor="a")
    claim(ledger, 1, actor="b")
    group = ledger.running[0]
    ledger.finish(group, 0, 0)
    ledger.finish(group, 1, 0)
    ledger.hold(group, is_partial=False)
    assert ledger.pop_cancelled("a") == []
    assert ledger.pop_cancelled("b") == [(0, 2, 0)]
    assert ledger.pop_cancelled("b") == []
    assert group.samples[2].state is SampleState.DROPPED


def test_seeds_differ_between_starts_and_repeat_between_runs() -> None:
    seeds = {episode_seed(0, *key) for key in product(range(9), range(4), range(3))}
    assert len(seeds) == 9 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert episode_seed(1, 2, 3, 4) == episode_seed(1, 2, 3, 4)


def test_a_retry_draws_anew_and_a_reissue_repeats_its_seed() -> None:
    ledger = make_ledger()
    [first] = claim(ledger, 1)
    [again] = claim(resume(ledger, make_ledger()), 1)
    assert (again.key, again.seed, again.prompt) == ((0, 0, 1), first.seed, first.prompt)
    ledger.fail_actor("a")
    [retry] = claim(ledger, 1)
    assert retry.key == (0, 0, 1)
    assert retry.seed != first.seed


def test_restore_brings_running_samples_back_pending_and_leased_ones_done() -> None:
    ledger = make_ledger()
    claim(ledger, 5)
    complete(ledger, 0)
    complete(ledger, 1)
    ledger.lease(ledger.held[0])
    resumed = resume(ledger, make_ledger(), now_s=50.0)
    assert (list(resumed.running), sorted(resumed.held), resumed.leased) == ([2], [0, 1], {})
    states = Counter(s.state for g in resumed.held.values() for s in g.samples)
    assert states == {SampleState.DONE: 4}
    assert [s.state for s in resumed.running[2].samples] == [SampleState.PENDING] * 2
    assert resumed.counts.reissued == 1
    assert resumed.next_deadline_s() == 50.0 + resumed.config.group_time_limit_s
    assert [c.key for c in claim(resumed, 3)] == [(2, 0, 1), (2, 1, 0), (3, 0, 0)]


def test_a_restore_in_place_never_issues_a_key_again_and_cancels_what_runs() -> None:
    ledger = make_ledger()
    issued = claim(ledger, 2)
    metadata, order = ledger.state()
    issued += claim(ledger, 4)
    ledger.restore(json.loads(json.dumps(metadata)), order, now_s=0.0)
    assert sorted(ledger.pop_cancelled("a")) == sorted(c.key for c in issued)
    again = claim(ledger, 8)
    assert not {c.key for c in again} & {c.key for c in issued}
    assert {c.key[:2]: c.seed for c in issued}.items() <= {c.key[:2]: c.seed for c in again}.items()


def test_claim_keys_of_lost_ledgers_are_never_issued_again() -> None:
    """Whether the lost one had restored a checkpoint or had only begun, and once more after the next."""
    ledger = make_ledger()
    issued: list[Claim] = []
    states = [ledger.state()]
    for num_lost in range(5):
        metadata, order = states[-1]
        ledger = make_ledger()
        ledger.restore(json.loads(json.dumps(metadata)), order, now_s=0.0, num_lost=num_lost)
        for _ in range(3):
            issued += claim(ledger, 4)
            ledger.fail_actor("a")
        if num_lost % 2:
            states.append(ledger.state())
        issued += claim(ledger, 4)
    assert len({c.key for c in issued}) == len(issued)


def test_time_limits_run_from_admission() -> None:
    ledger = make_ledger(group_time_limit_s=10)
    ledger.claim("a", 0, 2, now_s=0.0)
    ledger.claim("a", 0, 2, now_s=5.0)
    assert ledger.next_deadline_s() == 10.0
    assert ledger.expired(9.9) == []
    assert [g.group_id for g in ledger.expired(10.0)] == [0]
    assert [g.group_id for g in ledger.expired(15.0)] == [0, 1]
