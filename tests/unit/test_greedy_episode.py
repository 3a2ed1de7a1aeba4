"""One greedy episode per prompt: played, never trained, its reward the group's baseline."""

import pytest
from episodes import make_trajectory

from raylearner.config.schema import ReplaySection
from raylearner.replay import snapshot
from raylearner.replay.buffer import ReplayBuffer
from raylearner.types import Claim, Prompt, Trajectory

PROMPTS = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(4)]


def make_buffer(**values: object) -> ReplayBuffer:
    options = {"groups_per_step": 1, "group_size": 2, "play_greedy": True} | values
    return ReplayBuffer(ReplaySection.model_validate(options), PROMPTS, seed=0)


def make_episode(
    claim: Claim, *, reward: float | None = 1.0, error: str | None = None
) -> list[Trajectory]:
    reward = None if error else reward
    return [make_trajectory([-1, 0, 0], claim=claim, reward=reward, error=error)]


def test_a_group_waits_for_its_greedy_episode_and_carries_its_reward_only() -> None:
    buffer = make_buffer()
    claims = buffer.claim("a", 0, 3).claims
    assert [(claim.sample_index, claim.is_greedy) for claim in claims] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    buffer.put(make_episode(claims[0], reward=0.0))
    buffer.put(make_episode(claims[1], reward=1.0))
    assert buffer.take(1, 0) is None
    buffer.put(make_episode(claims[2], reward=0.25))
    take = buffer.take(1, 0)
    assert take is not None
    (group,) = take.groups
    assert [t.sample_index for t in group.trajectories] == [0, 1]
    assert (group.greedy_reward, group.is_partial) == (0.25, False)
    buffer.commit([group.group_id], 1)
    assert buffer.store.num_trajectories == 0


def test_an_extra_episode_may_stay_out_but_not_the_greedy_one() -> None:
    buffer = make_buffer(extra=1)
    claims = buffer.claim("a", 0, 4).claims
    assert [claim.is_greedy for claim in claims] == [False, False, False, True]
    for claim in claims[1:]:
        buffer.put(make_episode(claim))
    take = buffer.take(1, 0)
    assert take is not None
    assert [t.sample_index for t in take.groups[0].trajectories] == [1, 2]
    assert buffer.put(make_episode(claims[0])) == "late"


@pytest.mark.parametrize("reward", [None, "error"])
def test_a_group_without_a_baseline_is_dropped(reward: object) -> None:
    buffer = make_buffer()
    claims = buffer.claim("a", 0, 3).claims
    buffer.put(make_episode(claims[2], reward=None, error="tool: x" if reward else None))
    buffer.put(make_episode(claims[0]))
    buffer.put(make_episode(claims[1]))
    assert buffer.take(1, 0) is None
    assert buffer.metrics()["buffer/dropped/no_baseline"] == 1


def test_equal_rewards_of_the_members_are_zero_variance_whatever_the_greedy_one_got() -> None:
    buffer = make_buffer(drop_zero_variance=True)
    claims = buffer.claim("a", 0, 3).claims
    for claim, reward in zip(claims, (1.0, 1.0, 0.0), strict=True):
        buffer.put(make_episode(claim, reward=reward))
    assert buffer.metrics()["buffer/dropped/zero_variance"] == 1


def test_the_greedy_episode_survives_a_dump() -> None:
    buffer = make_buffer()
    claims = buffer.claim("a", 0, 3).claims
    for claim in claims[1:]:
        buffer.put(make_episode(claim, reward=0.5))
    cut = snapshot.take_snapshot(buffer)
    resumed = make_buffer()
    snapshot.restore(resumed, *cut.state(), cut.images())
    (claim,) = [c for c in resumed.claim("b", 0, 1).claims if c.group_id == claims[0].group_id]
    assert (claim.sample_index, claim.is_greedy) == (0, False)
    resumed.put(make_episode(claim, reward=1.0))
    take = resumed.take(1, 0)
    assert take is not None
    assert take.groups[0].greedy_reward == 0.5
