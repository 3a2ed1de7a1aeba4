"""Which prompt comes next: shares of sources, what difficulty holds back, exact resume."""

import json
import sys
import types
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from kits import make_claim
from replays import make_buffer, make_episode, resume

from raylearner.config.data import ByDifficulty, Shuffle, UserSampler
from raylearner.errors import CheckpointError, ConfigError, ReplayError
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.sampler import (
    DifficultySampler,
    PromptSource,
    Sampler,
    SeenGroup,
    ShuffleSampler,
    make_sampler,
)
from raylearner.types import Prompt, TrajectoryGroup

WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}


def make_prompts(**counts: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{source}{i}", messages=(), source=source)
        for source, count in counts.items()
        for i in range(count)
    ]


def seen(index: int, *rewards: float | None) -> SeenGroup:
    prompt = Prompt(prompt_id=str(index), messages=())
    trajectories = [
        make_episode(make_claim(prompt, sample_index=i), reward=reward)[0]
        for i, reward in enumerate(rewards)
    ]
    group = TrajectoryGroup(
        group_id=0, prompt_id=str(index), policy_version=0, trajectories=tuple(trajectories)
    )
    return SeenGroup(index=index, group=group, is_trained=True)


def draw(sampler: Sampler, count: int) -> list[int]:
    return [sampler.next_index() for _ in range(count)]


def test_sources_take_turns_by_their_weights() -> None:
    prompts = make_prompts(a=5, b=7, c=3)
    sampler = ShuffleSampler(prompts, seed=4, weights=WEIGHTS)
    drawn = [prompts[i].source for i in draw(sampler, 900)]
    assert Counter(drawn) == {"a": 200, "b": 600, "c": 100}
    for end in range(9, 900, 9):
        counts = Counter(drawn[:end])
        assert all(abs(counts[s] - end * w / 4.5) <= 1 for s, w in WEIGHTS.items())


def test_each_source_runs_through_its_own_epochs() -> None:
    prompts = make_prompts(a=4, b=4)
    sampler = ShuffleSampler(prompts, seed=4)
    of_a = [i for i in draw(sampler, 80) if prompts[i].source == "a"]
    epochs = [of_a[start : start + 4] for start in range(0, 40, 4)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert any(one != other for one, other in pairwise(epochs))


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptSource([], seed=1)


def test_the_order_depends_on_the_seed_alone() -> None:
    prompts = make_prompts(a=9, b=9)
    first, again, other = (
        draw(ShuffleSampler(prompts, seed=seed, weights=WEIGHTS), 60) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_prompt_that_teaches_nothing_comes_up_every_few_epochs() -> None:
    sampler = DifficultySampler(make_prompts(a=6), seed=0, keep_every=3)
    draw(sampler, 6)
    sampler.observe([seen(0, 1.0, 1.0), seen(1, 0.0, 0.0, None), seen(2, 0.0, 1.0)])
    counts = Counter(draw(sampler, 14 * 3))
    assert counts[0] == counts[1] == 3
    assert {counts[i] for i in (2, 3, 4, 5)} == {9}
    sampler.observe([seen(0, 0.0, 1.0)])
    assert Counter(draw(sampler, 48))[0] == 9


def test_a_prompt_is_held_back_after_min_groups_in_a_row_without_variance() -> None:
    sampler = DifficultySampler(make_prompts(a=2), seed=0, keep_every=5, min_groups=2)
    sampler.observe([seen(0, 1.0, 1.0), seen(0, 0.0, 1.0), seen(0, 1.0, 1.0)])
    assert Counter(draw(sampler, 10)) == {0: 5, 1: 5}
    sampler.observe([seen(0, 1.0, 1.0)])
    assert Counter(draw(sampler, 12)) == {0: 2, 1: 10}


def test_where_every_prompt_is_held_back_prompts_still_come() -> None:
    sampler = DifficultySampler(make_prompts(a=3), seed=0, keep_every=100)
    sampler.observe([seen(i, 1.0, 1.0) for i in range(3)])
    assert len(draw(sampler, 9)) == 9


@pytest.mark.parametrize("section", [Shuffle(kind="shuffle"), ByDifficulty(kind="by_difficulty")])
def test_a_restored_sampler_goes_on_exactly(section) -> None:
    prompts = make_prompts(a=5, b=4)

    def make(seed: int) -> PromptSource:
        sampler = make_sampler(section, prompts, seed=seed, weights=WEIGHTS)
        return PromptSource(prompts, seed, sampler=sampler)

    source = make(3)
    for _ in range(13):
        source.next_index()
    source.observe([seen(2, 1.0, 1.0), seen(7, 0.0, 0.0)])
    for _ in range(11):
        source.next_index()
    metadata, array = source.state()
    resumed = make(99)
    resumed.restore(json.loads(json.dumps(metadata)), array)
    assert [resumed.next_index() for _ in range(60)] == [source.next_index() for _ in range(60)]


def test_what_was_seen_of_a_row_is_forgotten_once_it_changed() -> None:
    prompts = make_prompts(a=2)
    source = PromptSource(prompts, 0, sampler=DifficultySampler(prompts, seed=0, keep_every=5))
    source.observe([seen(0, 1.0, 1.0), seen(1, 1.0, 1.0)])
    metadata, array = source.state()
    edited = [replace(prompts[0], answer="new"), prompts[1]]
    sampler = DifficultySampler(edited, seed=0, keep_every=5)
    changed = PromptSource(edited, 0, sampler=sampler).restore(metadata, array)
    assert changed == {0}
    assert Counter(draw(sampler, 12)) == {0: 10, 1: 2}


def test_a_checkpoint_of_another_sampler_is_refused() -> None:
    prompts = make_prompts(a=3)
    metadata, array = PromptSource(prompts, 0).state()
    other = PromptSource(prompts, 0, sampler=DifficultySampler(prompts, seed=0))
    with pytest.raises(CheckpointError, match=r"ShuffleSampler.*DifficultySampler"):
        other.restore(metadata, array)


class Hardest:
    """Always the prompt with the least mean reward so far; all that was seen is its state."""

    def __init__(self, prompts, *, seed: int, weights, start: float = 0.5) -> None:
        self.means = dict.fromkeys(range(len(prompts)), start)

    def next_index(self) -> int:
        return min(self.means, key=lambda i: (self.means[i], i))

    def observe(self, groups) -> None:
        for each in groups:
            rewards = [r for r in each.group.rewards.values() if r is not None]
            self.means[each.index] = sum(rewards) / len(rewards)

    def state(self):
        return {"means": sorted(self.means.items())}, np.empty(0, np.int64)

    def restore(self, values, array) -> None:
        self.means = dict(values["means"])


@pytest.fixture(autouse=True)
def user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("user_samplers")
    module.Hardest = Hardest
    module.Half = type("Half", (), {"__init__": lambda self, prompts, seed, weights: None})
    module.Beyond = type("Beyond", (Hardest,), {"next_index": lambda self: 7})
    monkeypatch.setitem(sys.modules, "user_samplers", module)


def make_users(name: str, **arguments) -> Sampler:
    section = UserSampler(kind=f"user_samplers:{name}", arguments=arguments)
    return make_sampler(section, make_prompts(a=3), seed=0, weights={})


def hardest_buffer(**values) -> ReplayBuffer:
    sampler = make_users("Hardest", start=0.4)
    return make_buffer(
        prompts=make_prompts(a=3), sampler=sampler, groups_per_step=1, max_staleness=0, **values
    )


def play(buffer: ReplayBuffer, *rewards: float) -> str:
    """One group with these rewards, trained; returns its prompt."""
    claims = buffer.claim("actor", 0, 2).claims
    for claim, reward in zip(claims, rewards, strict=True):
        assert buffer.put(make_episode(claim, reward=reward)) == "accepted"
    take = buffer.take(1, 0)
    if take is not None:
        buffer.commit([group.group_id for group in take.groups], 0)
    return claims[0].prompt.prompt_id


def test_a_users_sampler_sees_what_trained_and_orders_what_comes_next() -> None:
    buffer = hardest_buffer()
    assert play(buffer, 0.0, 1.0) == "a0"
    assert play(buffer, 0.0, 0.0) == "a1"
    assert play(buffer, 1.0, 1.0) == "a1"
    assert play(buffer, 0.1, 0.2) == "a2"
    assert play(buffer, 0.0, 0.0) == "a2"


def test_a_users_sampler_is_saved_with_the_replay() -> None:
    buffer = hardest_buffer()
    play(buffer, 1.0, 1.0)
    resumed = resume(buffer, hardest_buffer())
    assert play(resumed, 0.0, 1.0) == play(buffer, 0.0, 1.0) == "a1"


def test_a_group_dropped_without_variance_is_seen_as_well() -> None:
    buffer = hardest_buffer(drop_zero_variance=True)
    assert play(buffer, 1.0, 1.0) == "a0"
    assert play(buffer, 1.0, 1.0) == "a1"


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("Half", {}, "next_index, observe, state, restore"),
        ("Hardest", {"begin": 1}, "must take"),
        ("None_", {}, "user_samplers:None_"),
    ],
)
def test_a_class_that_is_no_sampler_is_a_config_error(name, arguments, part) -> None:
    with pytest.raises(ConfigError, match=part):
        make_users(name, **arguments)


def test_an_index_without_a_prompt_is_refused_with_the_samplers_name() -> None:
    buffer = make_buffer(prompts=make_prompts(a=3), sampler=make_users("Beyond"))
    with pytest.raises(ReplayError, match=r"Beyond\.next_index"):
        buffer.claim("actor", 0, 1)
