"""Group rewards at the replay actor: when they are asked for, and what happens when their actor dies."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from replays import PROMPTS, make_episode, make_section

from raylearner.replay import replay_actor
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import EpisodeScore, Prompt, Trajectory


class Rewards:
    """Stands in for the reward actor: dead in the first `num_deaths` calls."""

    def __init__(self, *, num_deaths: int = 0) -> None:
        self._num_deaths = num_deaths
        self.score = self

    async def remote(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> dict[int, EpisodeScore]:
        if self._num_deaths:
            self._num_deaths -= 1
            raise ActorDiedError
        return {t.sample_index: EpisodeScore(reward=2.0) for t in trajectories}


def make_replay(rewards: Rewards, **section: Any) -> Any:
    plain: Any = ReplayActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    values = {"groups_per_step": 1, "group_size": 3} | section
    return plain(make_section(**values), PROMPTS, 0, group_rewards=rewards)


async def play(replay: Any, *, num_episodes: int) -> None:
    """Play some of the samples of one group; the others hang."""
    reply = await replay.claim("rollout-0", 0, 3, 0.0)
    await replay.put([make_episode(claim) for claim in reply.claims[:num_episodes]])


async def test_a_group_that_reaches_its_time_limit_in_a_take_is_scored() -> None:
    replay = make_replay(Rewards(), group_time_limit_s=0.2)
    await play(replay, num_episodes=2)
    take = await asyncio.wait_for(replay.take(1, 0, 5.0), 4.0)
    assert [len(group.trajectories) for group in take.groups] == [2]


async def test_a_call_is_repeated_after_the_reward_actor_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_actor, "SCORE_PAUSES_S", (0.01, 0.01))
    replay = make_replay(Rewards(num_deaths=2))
    await play(replay, num_episodes=3)
    take = await replay.take(1, 0, 5.0)
    assert all(t.error is None for t in take.groups[0].trajectories)


async def test_episodes_whose_reward_actor_keeps_dying_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_actor, "SCORE_PAUSES_S", (0.01, 0.01))
    replay = make_replay(Rewards(num_deaths=3))
    await play(replay, num_episodes=3)
    assert await replay.take(1, 0, 0.3) is None
    assert any("the group's rewards" in line for line in await replay.failures())
