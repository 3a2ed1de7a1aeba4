"""The replay behind Ray: waiting calls, deaths, coalesced puts, disk."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from episodes import make_trajectory

from raylearner.actors.outbox import Outbox
from raylearner.config.schema import ReplaySection
from raylearner.errors import TooManyFailures
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import Claim, Prompt, Trajectory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

PROMPTS = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(4)]
LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=300_000_000)
    yield
    ray.shutdown()


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Iterator["ray.actor.ActorHandle"]:
    values = {"groups_per_step": 2, "group_size": 2, "max_staleness": 1}
    config = ReplaySection(**values | getattr(request, "param", {}))
    actor = ReplayActor.remote(config, PROMPTS, 0)
    yield actor
    ray.kill(actor)


def make_episode(
    claim: Claim, *, num_tokens: int = 4, version: int = 0, error: str | None = None
) -> list[Trajectory]:
    trajectory = make_trajectory(
        [-1] + [version] * (num_tokens - 1),
        claim=claim,
        images=(b"image" * 100,),
        image_token_id=0,
        reward=float(claim.sample_index),
        error=error,
    )
    return [trajectory]


async def test_claim_waits_for_a_slot_and_is_woken_by_the_commit(replay) -> None:
    reply = await replay.claim.remote("a", 0, 99, LONG_S)
    assert len(reply.claims) == 8
    waiting = asyncio.ensure_future(replay.claim.remote("a", 0, 99, LONG_S))
    await replay.put.remote([make_episode(claim) for claim in reply.claims])
    take = await replay.take.remote(2, 0, LONG_S)
    assert not waiting.done()
    await replay.commit.remote([group.group_id for group in take.groups], 1)
    reply = await waiting
    assert {claim.group_id for claim in reply.claims} == {4, 5}
    assert reply.policy_version == 1


async def test_claim_is_empty_after_its_timeout(replay) -> None:
    await replay.claim.remote("a", 0, 99, LONG_S)
    started_s = time.monotonic()
    reply = await replay.claim.remote("a", 0, 99, 0.2)
    assert (reply.claims, reply.cancelled) == ([], [])
    assert 0.15 < time.monotonic() - started_s < 10


async def test_an_actors_failure_gives_its_samples_to_others(replay) -> None:
    lost = (await replay.claim.remote("dead", 0, 99, LONG_S)).claims
    orphan = asyncio.ensure_future(replay.claim.remote("dead", 0, 99, LONG_S))
    other = asyncio.ensure_future(replay.claim.remote("other", 0, 99, LONG_S))
    await asyncio.sleep(0.3)
    assert await replay.fail_actor.remote("dead") == 8
    assert (await orphan).claims == [], "a call that outlived its actor gets nothing"
    retries = (await other).claims
    assert [claim.key for claim in retries] == [(*claim.key[:2], 1) for claim in lost]
    assert await replay.put.remote([make_episode(lost[0])]) == ["late"]
    again = await replay.claim.remote("dead", 0, 1, 0.1)
    assert again.claims == [], "a replacement of the same name may ask, but all is taken"


async def test_puts_are_coalesced_and_arrive_whole(replay) -> None:
    claims = (await replay.claim.remote("a", 0, 99, LONG_S)).claims
    calls = []

    async def put(episodes: list[list[Trajectory]]) -> list[str]:
        calls.append(len(episodes))
        return await replay.put.remote(episodes)

    outbox = Outbox(put, max_episodes=8, max_delay_s=0.5)
    episodes = [make_episode(claim, num_tokens=50_000) for claim in claims]
    assert await asyncio.gather(*map(outbox.send, episodes)) == ["accepted"] * 8
    assert calls == [8]
    take = await replay.take.remote(2, 0, LONG_S)
    trajectory = take.groups[1].trajectories[1]
    assert np.array_equal(trajectory.token_ids, episodes[3][0].token_ids)
    assert trajectory.images == (b"image" * 100,)
    assert take.staleness_histogram == [4 * 49_999]
    assert (await replay.metrics.remote())["buffer/images"] == 1


async def test_take_is_none_after_its_timeout_and_woken_by_a_put(replay) -> None:
    assert await replay.take.remote(2, 0, 0.1) is None
    waiting = asyncio.ensure_future(replay.take.remote(2, 0, LONG_S))
    claims = (await replay.claim.remote("a", 0, 4, LONG_S)).claims
    await asyncio.sleep(0.2)
    assert "take of 2 groups at version 0 waits" in (await replay.describe.remote())[-1]
    before = await replay.progress.remote()
    await replay.put.remote([make_episode(claim) for claim in claims])
    assert [group.group_id for group in (await waiting).groups] == [0, 1]
    assert await replay.progress.remote() > before
    await replay.release.remote()
    assert (await replay.take.remote(2, 0, LONG_S)) is not None


@pytest.mark.parametrize("replay", [{"group_time_limit_s": 1.0, "group_size": 3}], indirect=True)
async def test_time_limits_wake_those_who_wait(replay) -> None:
    claims = (await replay.claim.remote("a", 0, 6, LONG_S)).claims
    finished = [claim for claim in claims if claim.sample_index < 2]
    await replay.put.remote([make_episode(claim) for claim in finished])
    take = await replay.take.remote(2, 0, LONG_S)
    assert [group.is_partial for group in take.groups] == [True, True]
    reply = await replay.claim.remote("a", 0, 0, LONG_S)
    assert sorted(reply.cancelled) == [(0, 2, 0), (1, 2, 0)]


@pytest.mark.parametrize("replay", [{"error_window": 4}], indirect=True)
async def test_too_many_errors_reach_the_one_who_takes(replay) -> None:
    waiting = asyncio.ensure_future(replay.take.remote(2, 0, LONG_S))
    claims = (await replay.claim.remote("a", 0, 4, LONG_S)).claims
    episodes = [make_episode(claim, error="tool: search is down") for claim in claims]
    assert await replay.put.remote(episodes) == ["accepted"] * 4
    with pytest.raises(TooManyFailures, match="search is down"):
        await waiting


async def test_save_and_load_in_place_and_in_another_actor(replay, tmp_path: Path) -> None:
    claims = (await replay.claim.remote("a", 0, 6, LONG_S)).claims
    await replay.put.remote([make_episode(claim) for claim in claims[:4]])
    await replay.save.remote(str(tmp_path / "replay"))
    await replay.take.remote(2, 0, LONG_S)
    await replay.commit.remote([0, 1], 1)

    await replay.load.remote(str(tmp_path / "replay"))
    assert sorted((await replay.claim.remote("a", 0, 0, LONG_S)).cancelled) == [
        (2, 0, 0),
        (2, 1, 0),
    ]
    assert await replay.put.remote([make_episode(claims[4])]) == ["late"]

    fresh = ReplayActor.remote(
        ReplaySection(groups_per_step=2, group_size=2, max_staleness=1), PROMPTS, 0
    )
    await fresh.load.remote(str(tmp_path / "replay"))
    for actor, attempt in ((replay, 1), (fresh, 1)):
        take = await actor.take.remote(2, 0, LONG_S)
        assert [group.group_id for group in take.groups] == [0, 1]
        retries = (await actor.claim.remote("b", 0, 2, LONG_S)).claims
        assert [claim.key for claim in retries] == [(2, 0, attempt), (2, 1, attempt)]
    ray.kill(fresh)
