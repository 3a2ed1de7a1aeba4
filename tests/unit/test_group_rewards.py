"""Reward functions of groups: when they run, what their scores change, how failures end."""

import asyncio
import json
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
from episodes import make_trajectory, make_turn
from kits import make_claim

from raylearner.config.rewards import RewardSection
from raylearner.config.schema import ReplaySection
from raylearner.errors import RewardError
from raylearner.replay import snapshot
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.closing import ScoreRequest
from raylearner.rewards.scorer import GroupScorer
from raylearner.types import Claim, EpisodeScore, Prompt, Trajectory

PROMPTS = [Prompt(prompt_id=f"p{i}", messages=(), columns={"level": i}) for i in range(3)]


def make_played(claim: Claim, text: str = "x", **fields: Any) -> Trajectory:
    return make_trajectory(claim=claim, turns=(make_turn(text),), **fields)


def make_buffer(**config: Any) -> ReplayBuffer:
    section = ReplaySection(**{"groups_per_step": 1, "group_size": 2, "max_staleness": 0, **config})
    return ReplayBuffer(section, PROMPTS, 0, should_score_groups=True)


def play(buffer: ReplayBuffer, **fields: Any) -> ScoreRequest:
    """Plays one group without rewards of its own; returns what is asked for it."""
    for claim in buffer.claim("actor", 0, 2).claims:
        assert buffer.put([make_played(claim, **fields)]) == "accepted"
    (request,) = buffer.score_requests()
    return request


def scores(*rewards: float | None) -> dict[int, EpisodeScore]:
    return {i: EpisodeScore(reward=r, rewards={"g": r}) for i, r in enumerate(rewards)}


def test_a_complete_group_trains_only_with_its_scores() -> None:
    buffer = make_buffer()
    request = play(buffer)
    assert request.prompt.prompt_id == request.trajectories[0].prompt_id
    assert buffer.take(1, 0) is None
    assert buffer.metrics()["buffer/groups/awaiting_scores"] == 1
    assert "await group reward functions" in buffer.describe()[-1]
    buffer.put_scores(request, scores(0.25, 0.75))
    assert buffer.metrics()["buffer/groups/awaiting_scores"] == 0
    take = buffer.take(1, 0)
    assert take is not None
    assert take.groups[0].rewards == {0: 0.25, 1: 0.75}
    assert take.groups[0].trajectories[1].rewards == {"g": 0.75}


def test_zero_variance_refers_to_the_final_rewards() -> None:
    buffer = make_buffer(drop_zero_variance=True)
    buffer.put_scores(play(buffer, reward=1.0), scores(0.0, 1.0))
    assert buffer.take(1, 0) is not None
    buffer = make_buffer(drop_zero_variance=True)
    buffer.put_scores(play(buffer), scores(1.0, 1.0))
    assert buffer.metrics()["buffer/dropped/zero_variance"] == 1


FAILED = {i: EpisodeScore(error=RewardError("the judge is down")) for i in range(2)}


def test_failed_scores_are_errors_of_the_trajectories_and_drop_the_group() -> None:
    buffer = make_buffer()
    buffer.put_scores(play(buffer), FAILED)
    assert buffer.take(1, 0) is None
    metrics = buffer.metrics()
    assert metrics["rollout/errors/reward"] == 2
    assert metrics["buffer/dropped/all_failed"] == 1


def test_too_many_failed_scores_end_the_run_with_their_cause() -> None:
    buffer = make_buffer(error_window=4, max_error_fraction=0.4)
    for _ in range(4):
        buffer.put_scores(play(buffer), FAILED)
    with pytest.raises(Exception, match="the judge is down"):
        buffer.take(1, 0)


def test_only_members_that_did_not_fail_are_scored() -> None:
    buffer = make_buffer()
    first, second = buffer.claim("actor", 0, 2).claims
    buffer.put([make_played(first)])
    buffer.put([make_played(second, error="tool: x")])
    (request,) = buffer.score_requests()
    assert [t.sample_index for t in request.trajectories] == [0]
    buffer.put_scores(request, {0: EpisodeScore(reward=0.5, rewards={"g": 0.5})})
    take = buffer.take(1, 0)
    assert take is not None
    assert take.groups[0].rewards == {0: 0.5, 1: None}


def test_a_group_that_failed_as_a_whole_is_not_scored() -> None:
    buffer = make_buffer()
    for claim in buffer.claim("actor", 0, 2).claims:
        buffer.put([make_played(claim, error="tool: x")])
    assert buffer.score_requests() == []
    assert buffer.metrics()["buffer/dropped/all_failed"] == 1


def test_scores_of_before_a_restore_are_ignored_and_requested_again() -> None:
    buffer = make_buffer()
    request = play(buffer)
    metadata, arrays = snapshot.take_snapshot(buffer).state()
    snapshot.restore(buffer, json.loads(json.dumps(metadata)), arrays, {})
    buffer.put_scores(request, scores(0.0, 1.0))
    assert buffer.take(1, 0) is None
    (again,) = buffer.score_requests()
    assert again.group_id == request.group_id
    buffer.put_scores(again, scores(0.0, 1.0))
    assert buffer.take(1, 0) is not None


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("user_groups")
    monkeypatch.setitem(sys.modules, "user_groups", module)
    return module


def make_group(*texts: str, **fields: Any) -> list[Trajectory]:
    claims = (make_claim(PROMPTS[2], sample_index=i) for i in range(len(texts)))
    return [make_played(c, text, **fields) for c, text in zip(claims, texts, strict=True)]


def make_scorer(*functions: dict[str, Any], **section: Any) -> GroupScorer:
    return GroupScorer(RewardSection.model_validate({"functions": list(functions), **section}))


async def test_a_function_of_groups_compares_all_episodes_and_keeps_their_other_parts(
    functions: types.ModuleType,
) -> None:
    async def longest(episodes, *, log_extra, log_metric) -> list[float]:
        most = max(len(e.completion) for e in episodes)
        log_extra("length", [len(e.completion) for e in episodes])
        log_metric("longest", most)
        return [float(len(e.completion) == most) for e in episodes]

    functions.longest = longest
    scorer = make_scorer(
        {"kind": "f1", "weight": 2.0},
        {"kind": "user_groups:longest", "per": "group", "weight": 0.5},
        clip=(0.0, 1.2),
    )
    group = make_group("a", "abc", "ab")
    group[0] = replace(group[0], rewards={"f1": 0.5, "invalid_action_penalty": -0.25})
    group[1] = replace(group[1], rewards={"f1": 0.5})
    group[2] = replace(group[2], rewards={"f1": None})
    found = await scorer.score(PROMPTS[2], group)
    assert [found[i].reward for i in range(3)] == [0.75, 1.2, 0.0]
    assert found[1].rewards == {"f1": 0.5, "longest": 1.0}
    assert [found[i].columns["length"] for i in range(3)] == [1, 3, 2]
    assert found[0].metrics == {"longest/longest": 3.0}


async def test_trl_functions_of_groups_get_one_entry_an_episode(
    functions: types.ModuleType,
) -> None:
    def trl(completions, level, trainer_state, **rest):
        assert (level, trainer_state.global_step) == ([2, 2], 3)
        return [float(len(c)) for c in completions]

    functions.trl = trl
    scorer = make_scorer({"kind": "user_groups:trl", "per": "group"})
    found = await scorer.score(PROMPTS[2], make_group("a", "abc", claim_step=3))
    assert [found[i].reward for i in range(2)] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("function", "timeout_s", "words"),
    [
        (lambda episodes: [1.0], 30.0, "list of 2 values"),
        (lambda episodes: {}[1], 30.0, "KeyError: 1"),
        (lambda episodes: asyncio.sleep(9), 0.05, "0.05 s"),
    ],
)
async def test_a_failing_function_is_an_error_of_every_episode(
    functions: types.ModuleType, function: Any, timeout_s: float, words: str
) -> None:
    functions.fails = function
    scorer = make_scorer({"kind": "user_groups:fails", "per": "group"}, timeout_s=timeout_s)
    found = await scorer.score(PROMPTS[2], make_group("a", "abc"))
    assert sorted(found) == [0, 1]
    assert all(isinstance(s.error, RewardError) and words in str(s.error) for s in found.values())


async def test_segments_of_an_episode_count_as_one(functions: types.ModuleType) -> None:
    functions.count = lambda episodes: [float(len(e.completion_ids)) for e in episodes]
    scorer = make_scorer({"kind": "user_groups:count", "per": "group"})
    one, other = make_group("a", "b")
    found = await scorer.score(PROMPTS[2], [one, replace(one, segment=1), other])
    assert {index: score.reward for index, score in found.items()} == {0: 2.0, 1: 1.0}
