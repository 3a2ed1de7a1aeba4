"""Any interleaving of what happens to the replay, against a model that only remembers facts."""

import json
import random
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from episodes import make_trajectory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raylearner.config.schema import ReplaySection
from raylearner.replay import snapshot
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.groups import OPEN_STATES, SampleRecord, SampleState
from raylearner.replay.journal import put_back
from raylearner.types import Claim, Prompt, StopReason, Trajectory

TIME_LIMIT_S = 100.0
PROMPTS = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(3)]
ACTORS = ["a", "b", "c"]


@dataclass
class Model:
    """What must be true whatever the replay does. Episodes are known by their first token."""

    policy_version: int = 0
    open_claims: dict[tuple[int, int, int], Claim] = field(default_factory=dict)
    claimants: dict[tuple[int, int, int], str] = field(default_factory=dict)
    accepted: dict[int, list[Trajectory]] = field(default_factory=dict)
    trained_episodes: set[int] = field(default_factory=set)
    trained_groups: set[int] = field(default_factory=set)
    leased: list[int] = field(default_factory=list)
    leased_episodes: set[int] = field(default_factory=set)


def make_episode(
    claim: Claim, serial: int, versions: list[int], reward: float | None, num_segments: int = 1
) -> list[Trajectory]:
    segment = make_trajectory(
        [-1, *versions],
        claim=claim,
        token_ids=np.array([serial] + [1] * len(versions), np.int32),
        reward=reward,
        error="tool: gone" if reward is None else None,
    )
    return [replace(segment, segment=i) for i in range(num_segments)]


class ReplayMachine(RuleBasedStateMachine):
    @initialize(
        on_stale=st.sampled_from(["mask", "drop", "wait", "train"]),
        max_staleness=st.integers(0, 2),
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(1, 3),
        extra=st.integers(0, 2),
        drop_zero_variance=st.booleans(),
        partial_groups=st.sampled_from(["train", "drop"]),
        max_concurrent_groups=st.sampled_from([None, 1, 2]),
        max_attempts=st.integers(1, 3),
    )
    def start(self, **values) -> None:
        if values["group_size"] == 1:  # one reward never varies
            values["drop_zero_variance"] = False
        limits = {"error_window": 100_000, "max_filtered_groups": 100_000}
        self.config = ReplaySection(group_time_limit_s=TIME_LIMIT_S, **limits, **values)
        self.now_s = 0.0
        self.serial = 0
        self.buffer = self.make_buffer()
        self.model = Model()
        self.saved: tuple[str, snapshot.Arrays, Model] | None = None
        self.journal: dict[int, list[Trajectory]] = {}
        self.void_claims: list[Claim] = []
        self.issued: set[tuple[int, int, int]] = set()

    def make_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(self.config, PROMPTS, seed=7, clock=lambda: self.now_s)

    @rule(actor=st.sampled_from(ACTORS), lag=st.integers(0, 3), max_claims=st.integers(0, 9))
    def claim(self, actor: str, lag: int, max_claims: int) -> None:
        model, ledger = self.model, self.buffer.ledger
        engine_version = max(model.policy_version - lag, 0)
        num_pending = sum(g.num_in(SampleState.PENDING) for g in ledger.running.values())
        reply = self.buffer.claim(actor, engine_version, max_claims)
        for key in reply.cancelled:
            assert model.claimants.get(key, actor) == actor
            if claim := model.open_claims.pop(key, None):
                self.void_claims.append(claim)
        if model.policy_version - engine_version > self.config.max_staleness:
            assert not reply.claims
        elif len(reply.claims) < max_claims:
            assert ledger.why_full() is not None
            pending = [s for s in self.samples() if s.state is SampleState.PENDING]
            assert all(self.is_on_last_attempt(sample) for sample in pending)
            assert not pending or any(
                sample.claimant == actor and self.is_on_last_attempt(sample)
                for sample in self.samples()
            )
        else:
            assert len(reply.claims) == max_claims
        if len(reply.claims) <= num_pending:
            order = [claim.key[:2] for claim in reply.claims]
            assert order == sorted(order)
        for claim in reply.claims:
            assert claim.key not in self.issued
            self.issued.add(claim.key)
            assert claim.policy_version == engine_version
            model.open_claims[claim.key] = claim
            model.claimants[claim.key] = actor

    def samples(self) -> list[SampleRecord]:
        return [s for g in self.buffer.ledger.running.values() for s in g.samples]

    def is_on_last_attempt(self, sample: SampleRecord) -> bool:
        return 0 < sample.num_failures == self.config.max_attempts - 1

    def put_claim(
        self, claim: Claim, reward: float | None, ages: list[int], num_segments: int = 1
    ) -> str:
        newest, oldest = self.model.policy_version, claim.policy_version
        versions = sorted(max(newest - age, oldest) for age in ages)
        versions = [max(version, oldest) for version in versions]
        self.serial += 1
        episode = make_episode(claim, self.serial, versions, reward, num_segments)
        outcome = self.buffer.put(episode)
        if outcome == "accepted":
            self.model.accepted[self.serial] = episode
            self.journal[self.serial] = episode
        return outcome

    @precondition(lambda self: self.model.open_claims)
    @rule(
        data=st.data(),
        reward=st.sampled_from([0.0, 0.0, 1.0, 2.0, None]),
        ages=st.lists(st.integers(0, 4), max_size=4),
        num_segments=st.integers(1, 2),
    )
    def put(self, data, reward: float | None, ages: list[int], num_segments: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.open_claims)))
        claim = self.model.open_claims.pop(key)
        self.buffer.close_expired()
        group = self.buffer.ledger.find(claim.group_id)
        is_wanted = group is not None and claim.group_id in self.buffer.ledger.running
        outcome = self.put_claim(claim, reward, ages, num_segments)
        assert outcome == ("accepted" if is_wanted else "late")

    @rule(
        lag=st.integers(0, 2),
        ages=st.lists(st.integers(0, 3), min_size=1, max_size=3),
        num_left=st.integers(0, 3),
        advance=st.integers(0, 2),
    )
    def step(self, lag: int, ages: list[int], num_left: int, advance: int) -> None:
        """A whole step at once, some episodes left running: states deep in a run stay reachable."""
        self.claim("a", lag, 9)
        for key in sorted(self.model.open_claims)[num_left:]:
            self.put_claim(self.model.open_claims.pop(key), float(key[1]), ages)
        self.take()
        if self.model.leased:
            self.commit(advance)

    @precondition(lambda self: self.model.open_claims)
    @rule(data=st.data())
    def put_broken(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.open_claims)))
        claim = self.model.open_claims.pop(key)
        [segment] = make_episode(claim, 0, [claim.policy_version], 1.0)
        segment = replace(segment, behavior_logprobs=np.zeros(2, np.float32))
        outcome = self.buffer.put([segment])
        assert outcome == "late" or outcome.startswith("refused: behavior_logprobs")

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data())
    def put_again(self, data) -> None:
        serial = data.draw(st.sampled_from(sorted(self.model.accepted)))
        assert self.buffer.put(self.model.accepted[serial]) in {"duplicate", "late"}

    @precondition(lambda self: self.void_claims)
    @rule(data=st.data())
    def put_void(self, data) -> None:
        """What a dead, cancelled or rolled back claim sends is never stored."""
        claim = data.draw(st.sampled_from(self.void_claims))
        outcome = self.put_claim(claim, 1.0, [0])
        assert outcome == "late" or outcome.endswith("was never issued")

    def void(self, keys) -> None:
        self.void_claims += [self.model.open_claims.pop(key) for key in list(keys)]

    @rule(actor=st.sampled_from(ACTORS))
    def fail_actor(self, actor: str) -> None:
        num_failed = self.buffer.fail_actor(actor)
        mine = [key for key in self.model.open_claims if self.model.claimants[key] == actor]
        assert num_failed <= len(mine)
        self.void(mine)

    @rule()
    def take(self) -> None:
        model, config = self.model, self.config
        take = self.buffer.take(config.groups_per_step, model.policy_version)
        if take is None:
            return
        ids = [group.group_id for group in take.groups]
        assert len(ids) == config.groups_per_step
        assert ids == sorted(set(ids))
        assert not set(ids) & (model.trained_groups | set(model.leased))
        num_trained_tokens = 0
        for group in take.groups:
            episodes = {t.sample_index: int(t.token_ids[0]) for t in group.trajectories}
            assert len(episodes) == config.group_size or group.is_partial
            assert len(episodes) <= config.group_size
            assert any(reward is not None for reward in group.rewards.values())
            for trajectory in group.trajectories:
                serial = int(trajectory.token_ids[0])
                assert serial in model.accepted
                assert serial not in model.trained_episodes
                model.leased_episodes.add(serial)
                trained = trajectory.policy_versions[trajectory.train_mask]
                num_trained_tokens += len(trained)
                if config.on_stale != "train" and len(trained):
                    assert model.policy_version - trained.min() <= config.max_staleness
                if trajectory.stop_reason is StopReason.ERROR:
                    assert trajectory.reward is None
                    assert not trajectory.train_mask.any()
            assert len(set(episodes.values())) == len(episodes)
        assert sum(take.staleness_histogram) == num_trained_tokens
        model.leased += ids

    @precondition(lambda self: self.model.leased)
    @rule(advance=st.integers(0, 2))
    def commit(self, advance: int) -> None:
        """Advances by 0 for a skipped step."""
        model = self.model
        model.policy_version += advance
        self.buffer.commit(model.leased, model.policy_version)
        model.trained_groups |= set(model.leased)
        model.trained_episodes |= model.leased_episodes
        model.leased, model.leased_episodes = [], set()

    @rule()
    def lose_learner(self) -> None:
        self.buffer.release()
        self.model.leased, self.model.leased_episodes = [], set()

    @rule(seconds=st.sampled_from([1.0, 30.0, TIME_LIMIT_S]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def save(self) -> None:
        metadata, arrays = snapshot.take_snapshot(self.buffer).state()
        self.saved = (json.dumps(metadata), arrays, deepcopy(self.model))
        self.journal.clear()

    @precondition(lambda self: self.saved is not None)
    @rule(is_fresh=st.booleans(), has_journal=st.booleans())
    def load(self, is_fresh: bool, has_journal: bool) -> None:
        """Into the living replay, or after everything died, perhaps with what was accepted since."""
        metadata, arrays, model = self.saved
        if is_fresh:
            self.buffer = self.make_buffer()
            self.void_claims.clear()
            self.issued.clear()
            self.issued |= set(model.open_claims)
            self.model.open_claims.clear()
        else:
            self.void(self.model.open_claims)
        snapshot.restore(self.buffer, json.loads(metadata), arrays, {})
        self.model = model
        self.model.open_claims.clear()
        self.model.leased, self.model.leased_episodes = [], set()
        self.saved = None
        if has_journal:
            self.put_back()

    def put_back(self) -> None:
        """Twice, since a batch may be read again after a second rollback."""
        for serial, episode in [*self.journal.items(), *self.journal.items()]:
            group = self.buffer.ledger.running.get(episode[0].group_id)
            is_open = (
                group is not None
                and group.samples[episode[0].sample_index].state is SampleState.PENDING
            )
            newest = max(int(segment.policy_versions.max()) for segment in episode)
            is_valid = newest <= self.model.policy_version and episode[0].reward is not None
            assert put_back(self.buffer, episode) == (is_open and is_valid)
            if is_open and is_valid:
                group_id, index, _ = episode[0].episode_key
                (stored, *_) = self.buffer.store.groups.get(group_id, {}).get(index, episode)
                if stored is not episode[0]:  # or the group was dropped at once
                    assert stored.episode_key not in self.issued
                    self.issued.add(stored.episode_key)
                self.model.accepted[serial] = episode

    @invariant()
    def ledger_balances(self) -> None:
        ledger, model = self.buffer.ledger, self.model
        counts = ledger.counts
        assert ledger.size <= ledger.capacity
        assert counts.admitted == ledger.size + counts.trained + counts.dropped.total()
        assert counts.admitted == ledger.next_group_id
        assert counts.trained == len(model.trained_groups)
        assert set(ledger.leased) == set(model.leased)
        for group in ledger.running.values():
            assert group.num_in(SampleState.DONE) < self.config.group_size
            assert group.num_in(*OPEN_STATES) > 0, "a group that nothing can complete is closed"
        for groups, state in ((ledger.held, "done"), (ledger.leased, "leased")):
            assert {s.state for g in groups.values() for s in g.samples} <= {state, "dropped"}
        stored: set[int] = set()
        for group in [*ledger.running.values(), *ledger.held.values(), *ledger.leased.values()]:
            episodes = self.buffer.store.groups.get(group.group_id, {})
            done = {
                index
                for index, sample in enumerate(group.samples)
                if sample.state in (SampleState.DONE, SampleState.LEASED) and not sample.is_failed
            }
            assert done == set(episodes)
            stored |= {int(episode[0].token_ids[0]) for episode in episodes.values()}
        alive = {
            serial
            for serial, episode in model.accepted.items()
            if ledger.find(episode[0].group_id) is not None
        }
        assert stored == alive, "an accepted episode is stored until its group trains or drops"
        ended = {
            episode[0].group_id
            for serial, episode in model.accepted.items()
            if serial not in alive | model.trained_episodes
        }
        assert not ended & model.trained_groups, "a group trains with all its accepted episodes"
        assert len(ended) <= counts.dropped.total()
        num_stored = sum(
            len(e) for group in self.buffer.store.groups.values() for e in group.values()
        )
        assert self.buffer.store.num_trajectories == num_stored

    def teardown(self) -> None:
        """From any state, a take is served: claimants that never answer only cost time."""
        if not hasattr(self, "buffer"):
            return
        if self.model.leased:
            self.commit(1)
        for _ in range(3):
            for _ in range(4 * self.buffer.ledger.capacity):
                if self.serve_one_round():
                    break
            else:
                self.now_s += TIME_LIMIT_S
                continue
            break
        else:
            raise AssertionError(f"no take after three time limits: {self.buffer.describe()}")

    def serve_one_round(self) -> bool:
        version = self.model.policy_version
        self.buffer.fail_actor("fresh")
        for claim in self.buffer.claim("fresh", version, 100).claims:
            outcome = self.put_claim(claim, float(claim.sample_index % 2), [0])
            assert outcome in {"accepted", "late"}
        return self.buffer.take(self.config.groups_per_step, version) is not None


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def random_operation(machine: ReplayMachine, dice: random.Random) -> None:
    model = machine.model
    match dice.choices(
        ["claim", "put", "take", "commit", "wait", "fail", "lose", "save", "load"],
        weights=[20, 60, 12, 12, 4, 1, 1, 1, 1],
    )[0]:
        case "claim":
            machine.claim(dice.choice(ACTORS), dice.choice([0, 0, 0, 1, 2, 3]), dice.randint(0, 9))
        case "put" if model.open_claims:
            claim = model.open_claims.pop(dice.choice(sorted(model.open_claims)))
            reward = dice.choice([0.0, 0.0, 1.0, 2.0, None])
            ages = [dice.randint(0, 3) for _ in range(dice.randint(0, 4))]
            machine.put_claim(claim, reward, ages, num_segments=dice.randint(1, 2))
        case "take":
            machine.take()
        case "commit" if model.leased:
            machine.commit(dice.choice([0, 1, 1, 1, 2]))
        case "wait":
            machine.pass_time(dice.choice([1.0, 5.0, TIME_LIMIT_S / 2]))
        case "fail":
            machine.fail_actor(dice.choice(ACTORS))
        case "lose":
            machine.lose_learner()
        case "save":
            machine.save()
        case "load" if machine.saved is not None:
            machine.load(is_fresh=dice.random() < 0.5, has_journal=dice.random() < 0.5)
        case _:
            pass


@pytest.mark.parametrize("seed", range(60))
def test_long_random_walks(seed: int) -> None:
    """Longer than Hypothesis goes: hundreds of operations, tens of learner steps."""
    dice = random.Random(seed)
    machine = ReplayMachine()
    machine.start(
        on_stale=["mask", "drop", "wait", "train"][seed % 4],
        max_staleness=dice.randint(0, 2),
        groups_per_step=dice.randint(1, 3),
        group_size=dice.randint(1, 3),
        extra=dice.randint(0, 2),
        drop_zero_variance=dice.random() < 0.5,
        partial_groups=dice.choice(["train", "drop"]),
        max_concurrent_groups=dice.choice([None, 1, 2]),
        max_attempts=dice.randint(1, 3),
    )
    for _ in range(400):
        random_operation(machine, dice)
        machine.ledger_balances()
    machine.teardown()
