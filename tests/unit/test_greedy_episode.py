"""One greedy episode per prompt: played, never trained, its reward the group's baseline."""

import pytest
from replays import make_buffer, make_episode, resume, taken

from raylearner.replay.buffer import ReplayBuffer
from raylearner.types import Claim

GREEDY = {"groups_per_step": 1, "play_greedy": True}


def start(**values: object) -> tuple[ReplayBuffer, list[Claim]]:
    """Return a buffer and the claims of its first group, the greedy one last."""
    buffer = make_buffer(**GREEDY | values)
    claims = buffer.claim("a", 0, 3 + buffer.config.extra).claims
    assert [claim.is_greedy for claim in claims] == [False] * (len(claims) - 1) + [True]
    assert [claim.sample_index for claim in claims] == list(range(len(claims)))
    return buffer, claims


def test_a_group_waits_for_its_greedy_episode_and_carries_its_reward_only() -> None:
    buffer, claims = start()
    buffer.put(make_episode(claims[0], reward=0.0))
    buffer.put(make_episode(claims[1], reward=1.0))
    assert buffer.take(1, 0) is None
    buffer.put(make_episode(claims[2], reward=0.25))
    (group,) = buffer.take(1, 0).groups
    assert [t.sample_index for t in group.trajectories] == [0, 1]
    assert (group.greedy_reward, group.is_partial) == (0.25, False)
    buffer.commit([group.group_id], 1)
    assert buffer.store.num_trajectories == 0


def test_an_extra_episode_may_stay_out_but_not_the_greedy_one() -> None:
    buffer, claims = start(extra=1)
    for claim in claims[1:]:
        buffer.put(make_episode(claim))
    (group,) = buffer.take(1, 0).groups
    assert [t.sample_index for t in group.trajectories] == [1, 2]
    assert buffer.put(make_episode(claims[0])) == "late"


@pytest.mark.parametrize("error", [None, "tool: x"])
def test_a_group_without_a_baseline_is_dropped(error: str | None) -> None:
    buffer, claims = start()
    buffer.put(make_episode(claims[2], reward=None, error=error))
    buffer.put(make_episode(claims[0]))
    buffer.put(make_episode(claims[1]))
    assert buffer.take(1, 0) is None
    assert buffer.metrics()["buffer/dropped/no_baseline"] == 1


def test_equal_rewards_of_the_members_are_zero_variance_whatever_the_greedy_one_got() -> None:
    buffer, claims = start(drop_zero_variance=True)
    for claim, reward in zip(claims, (1.0, 1.0, 0.0), strict=True):
        buffer.put(make_episode(claim, reward=reward))
    assert buffer.metrics()["buffer/dropped/zero_variance"] == 1


def test_the_greedy_episode_survives_a_dump() -> None:
    buffer, claims = start()
    for claim in claims[1:]:
        buffer.put(make_episode(claim, reward=0.5))
    resumed = resume(buffer, make_buffer(**GREEDY))
    (claim,) = resumed.claim("b", 0, 1).claims
    assert (claim.group_id, claim.sample_index, claim.is_greedy) == (0, 0, False)
    resumed.put(make_episode(claim, reward=1.0))
    take = resumed.take(1, 0)
    assert taken(take) == [0]
    assert take.groups[0].greedy_reward == 0.5
