"""Claims that wait in the replay actor: each change answers those that it serves, and no others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from replays import PROMPTS, make_episode, make_section

from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import ClaimReply

LONG_S = 30.0
Waiting = list["asyncio.Task[ClaimReply]"]


def make_actor(**section: Any) -> Any:
    """Groups of 2, 2 per step, of which 4 may be in flight."""
    values = {"groups_per_step": 2, "group_size": 2, "max_staleness": 1}
    actor: Any = ReplayActor
    return actor.__ray_metadata__.modified_class(make_section(**values | section), PROMPTS, 0)


async def fill(replay: Any) -> Any:
    """Take up the capacity."""
    return (await replay.claim("full", 0, 99, 0.0)).claims


@asynccontextmanager
async def waiting_claims(replay: Any, num: int, *, version: int = 0) -> AsyncIterator[Waiting]:
    """Let actors named by number wait for one sample each, in order."""
    tasks = [
        asyncio.create_task(replay.claim(str(index), version, 1, LONG_S)) for index in range(num)
    ]
    await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def count_claims(replay: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the actor of every claim that the buffer is asked for."""
    asked: list[str] = []
    claim = replay._buffer.claim

    def counted(actor_id: str, *arguments: Any) -> ClaimReply:
        asked.append(actor_id)
        return claim(actor_id, *arguments)

    monkeypatch.setattr(replay._buffer, "claim", counted)
    return asked


async def test_a_put_asks_for_no_waiting_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make_actor()
    claims = await fill(replay)
    async with waiting_claims(replay, 100) as tasks:
        asked = count_claims(replay, monkeypatch)
        for claim in claims[:4]:
            assert await replay.put([make_episode(claim)]) == ["accepted"]
        await settle()
        assert asked == []
        assert not any(task.done() for task in tasks)


async def test_freed_slots_go_to_the_first_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make_actor()
    claims = await fill(replay)
    await replay.put([make_episode(claim) for claim in claims[:4]])
    take = await replay.take(2, 0, 0.0)
    async with waiting_claims(replay, 100) as tasks:
        asked = count_claims(replay, monkeypatch)
        await replay.commit([group.group_id for group in take.groups], 1)
        await settle()
        assert asked == ["0", "1", "2", "3"]
        assert [task.done() for task in tasks] == [True] * 4 + [False] * 96
        keys = [task.result().claims[0].key[:2] for task in tasks[:4]]
        assert keys == [(4, 0), (4, 1), (5, 0), (5, 1)]


async def test_new_weights_answer_their_own_actor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines too far behind are passed over, and asked for once."""
    replay = make_actor()
    await replay.commit([], 2)
    async with waiting_claims(replay, 100) as tasks:
        asked = count_claims(replay, monkeypatch)
        await replay.advance_engine("7", 1)
        await settle()
        assert asked == ["7"]
        assert [index for index, task in enumerate(tasks) if task.done()] == [7]
        await replay.commit([], 2)  # samples are left, but for no other
        await settle()
        assert asked == ["7"]


async def test_cancellations_reach_an_actor_that_asks_for_none() -> None:
    replay = make_actor(extra=1)
    claims = await fill(replay)
    listening = asyncio.create_task(replay.claim("full", 0, 0, LONG_S))
    async with waiting_claims(replay, 3) as tasks:
        await replay.put([make_episode(claim) for claim in claims[:2]])
        reply = await listening
        assert (reply.claims, reply.cancelled) == ([], [claims[2].key])
        await settle()
        assert not any(task.done() for task in tasks)


async def test_a_repeated_claim_replaces_the_one_that_was_given_up() -> None:
    replay = make_actor()
    claims = await fill(replay)
    await replay.put([make_episode(claim) for claim in claims[:4]])
    take = await replay.take(2, 0, 0.0)
    async with waiting_claims(replay, 1) as (given_up,):
        again = asyncio.create_task(replay.claim("0", 0, 1, LONG_S))
        await settle()
        assert given_up.result().claims == []
        await replay.commit([group.group_id for group in take.groups], 1)
        assert len((await again).claims) == 1


async def test_time_limits_close_groups_while_claims_wait() -> None:
    replay = make_actor(group_time_limit_s=0.1, partial_groups="drop")
    claims = await fill(replay)
    listening = asyncio.create_task(replay.claim("full", 0, 0, LONG_S))
    async with waiting_claims(replay, 4) as tasks:
        assert {key[0] for key in (await listening).cancelled} == {c.group_id for c in claims}
        for task in tasks:
            assert (await task).claims[0].group_id > 3


async def test_time_limits_count_for_groups_that_new_weights_start() -> None:
    replay = make_actor(group_time_limit_s=0.05, partial_groups="drop")
    await replay.commit([], 2)
    listening = asyncio.create_task(replay.claim("0", 0, 0, LONG_S))
    async with waiting_claims(replay, 1) as (task,):
        await settle()
        await replay.advance_engine("0", 2)
        (claim,) = (await task).claims
        assert claim.key in (await asyncio.wait_for(listening, 5)).cancelled


async def test_a_rollback_reconsiders_engines_that_were_ahead(tmp_path: Path) -> None:
    replay = make_actor()
    await replay.save(str(tmp_path / "replay"))
    await replay.commit([], 5)
    async with waiting_claims(replay, 2) as tasks:
        await settle()
        assert not any(task.done() for task in tasks)
        await replay.load(str(tmp_path / "replay"))
        await settle()
        assert [len(task.result().claims) for task in tasks] == [1, 1]


async def test_an_answer_at_the_deadline_is_not_lost() -> None:
    """A sample is either given in the reply or not at all."""
    replay = make_actor()
    claims = await fill(replay)
    await replay.put([make_episode(claim) for claim in claims[:4]])
    take = await replay.take(2, 0, 0.0)
    calls = [asyncio.create_task(replay.claim(str(i), 0, 1, 0.05)) for i in range(8)]
    await asyncio.sleep(0.045)
    await replay.commit([group.group_id for group in take.groups], 1)
    replies = await asyncio.gather(*calls)
    running = [s.claimant for g in replay._buffer.ledger.running.values() for s in g.samples]
    given = [str(i) for i, reply in enumerate(replies) if reply.claims]
    assert sorted(c for c in running if c not in (None, "full")) == given
