"""The replay actor and its callers, without Ray: its first state again, and a push that it cannot fail."""

import asyncio
from types import SimpleNamespace
from typing import Any

from replays import PROMPTS, make_section

from raylearner.actors.rollout_actor import RolloutActor
from raylearner.observability.spans import Tracer
from raylearner.replay.replay_actor import ReplayActor


def make_actor() -> Any:
    actor: Any = ReplayActor
    return actor.__ray_metadata__.modified_class(make_section(), PROMPTS, 0)


async def test_the_first_state_comes_back_with_other_claim_keys() -> None:
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


async def test_a_replay_that_does_not_answer_fails_no_engine() -> None:
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
