"""The replay actor and its callers, without Ray: its first state again, and a push that it cannot fail."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from episodes import make_trajectory
from replays import PROMPTS, make_episode, make_section

from raylearner.actors.rollout_actor import RolloutActor
from raylearner.observability.spans import Tracer
from raylearner.replay.replay_actor import ReplayActor
from raylearner.replay.snapshot import Snapshot


def make_actor(**options: Any) -> Any:
    actor: Any = ReplayActor
    return actor.__ray_metadata__.modified_class(make_section(), PROMPTS, 0, **options)


async def test_the_initial_state_is_restored_with_new_claim_keys() -> None:
    replay = make_actor()
    first = (await replay.claim("a", 0, 4, 0.0)).claims
    await replay.commit([], 3)
    await replay.load(None)
    again = (await replay.claim("b", 0, 4, 0.0)).claims
    assert [c.key[:2] for c in again] == [c.key[:2] for c in first]
    assert [(c.prompt, c.seed) for c in again] == [(c.prompt, c.seed) for c in first]
    assert not {c.key for c in again} & {c.key for c in first}
    fresh = make_actor()
    await fresh.load(None, 1)
    replaced = (await fresh.claim("b", 0, 4, 0.0)).claims
    assert [(c.prompt, c.seed) for c in replaced] == [(c.prompt, c.seed) for c in first]
    assert not {c.key for c in replaced} & {c.key for c in [*first, *again]}


async def test_a_replay_actor_that_does_not_answer_does_not_fail_the_engine() -> None:
    told: list[tuple[object, ...]] = []

    def advance(*arguments: object) -> "asyncio.Future[None]":
        told.append(arguments)
        return asyncio.get_running_loop().create_future()  # never done

    async def receive(_: object) -> Any:
        return SimpleNamespace(policy_version=7)

    own: Any = RolloutActor
    kind = own.__ray_metadata__.modified_class
    actor = kind.__new__(kind)
    actor._actor_id, actor._engine = "rollout-0", SimpleNamespace(receive=receive)
    actor._tracer = Tracer("rollout-0", is_enabled=False)
    actor._replay = SimpleNamespace(advance_engine=SimpleNamespace(remote=advance))
    async with asyncio.timeout(5):
        receipt = await actor.receive(SimpleNamespace(policy_version=7))
    assert receipt.policy_version == 7
    assert told == [("rollout-0", 7)]


async def test_a_replacement_has_the_episodes_since_the_checkpoint(tmp_path: Path) -> None:
    journal = str(tmp_path / "replay_journal")
    lost = make_actor(journal=journal)
    claims = (await lost.claim("a", 0, 2, 0.0)).claims
    await lost.cut()
    await lost.save(str(tmp_path / "replay"))
    assert await lost.put([make_episode(claims[0])]) == ["accepted"]
    await lost._journal.read()  # waits until it is written
    replaced = make_actor(journal=journal)
    await replaced.load(str(tmp_path / "replay"), 1)
    assert list(replaced._buffer.store.groups) == [claims[0].group_id]
    again = (await replaced.claim("b", 0, 1, 0.0)).claims
    assert again[0].key[:2] == claims[1].key[:2]
    assert await replaced.put([make_episode(again[0])]) == ["accepted"]
    take = await replaced.take(1, 0, 0.0)
    assert len(take.groups[0].trajectories) == 2


async def test_episodes_of_discarded_claims_are_late_and_no_errors() -> None:
    """Also where their groups were not admitted yet in the restored state."""
    replay = make_actor()
    claims = (await replay.claim("a", 0, 4, 0.0)).claims
    episodes = [[make_trajectory([-1, 0], claim=claim)] for claim in claims]
    for restored in (replay, make_actor()):
        await restored.load(None, int(restored is not replay))
        assert await restored.put(episodes) == ["late"] * 4
        never = make_trajectory([-1, 0], group_id=99, attempt=1 << 40)
        assert "never issued" in (await restored.put([[never]]))[0]


async def test_an_exchange_stores_episodes_and_gives_what_is_there_for_their_slots() -> None:
    replay = make_actor()
    claims = (await replay.claim("a", 0, 6, 0.0)).claims
    outcomes, reply = await replay.exchange("a", 0, [make_episode(c) for c in claims[:4]], 4)
    assert outcomes == ["accepted"] * 4
    assert [claim.key for claim in reply.claims] == [(3, 0, 0), (3, 1, 0)]  # the capacity
    outcomes, reply = await replay.exchange("a", 0, [make_episode(claims[4])], 1)
    assert (outcomes, reply.claims) == (["accepted"], [])


async def test_a_save_that_was_given_up_ends_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def save(_: Snapshot, folder: Path) -> None:
        events.append(f"begin {folder.name}")
        time.sleep(0.05)
        events.append(f"end {folder.name}")

    monkeypatch.setattr(Snapshot, "save", save)
    replay = make_actor()
    await asyncio.gather(*(replay.save(str(tmp_path / name)) for name in "ab"))
    assert events == ["begin a", "end a", "begin b", "end b"]
