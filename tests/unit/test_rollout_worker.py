"""The worker on the real replay, both in one process: dead engines, cancellations, halts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from episodes import make_trajectory
from kits import make_claim, make_kit, make_renderer

from benchmarks.faults.scripts import Dies, Fails
from raylearner.actors import rollout_worker
from raylearner.actors.engines.scripted import RandomTokens, Script
from raylearner.actors.engines.watched import MAX_FAILED_IN_ROW
from raylearner.actors.episode import EpisodeKit
from raylearner.actors.rollout_worker import RolloutWorker
from raylearner.config.schema import ReplaySection
from raylearner.environments.catalogue import SingleTurnEnvironment
from raylearner.errors import EngineDead
from raylearner.replay.groups import SampleState
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import Claim, ClaimReply, Message, Prompt, Sampling, StopReason, Trajectory

PROMPTS = [
    Prompt(prompt_id=f"p{i}", messages=(Message(role="user", content=f"{i}+{i}="),), answer="0")
    for i in range(40)
]
SHORT = {"vocab_size": 60, "max_tokens": 4}


def claims(prompts: Sequence[Prompt]) -> list[Claim]:
    return [
        Claim(group_id=i, sample_index=0, attempt=0, prompt=prompt, policy_version=0, seed=i)
        for i, prompt in enumerate(prompts)
    ]


class Hangs(RandomTokens):
    """Never answers its first `num` calls."""

    def __init__(self, num: int) -> None:
        super().__init__(**SHORT)
        self.num_begun = self.num_cancelled = 0
        self._num = num

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self.num_begun += 1
        if self.num_begun <= self._num:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        return await super().complete(token_ids, sampling)


class Replay:
    """The class of the replay actor, with the calls that it got."""

    def __init__(self, *, group_rewards: Any = None, **section: Any) -> None:
        own: Any = ReplayActor
        values = {"groups_per_step": 4, "group_size": 2, "max_staleness": 2}
        self.actor = own.__ray_metadata__.modified_class(
            ReplaySection(**values | section), PROMPTS, 0, group_rewards=group_rewards
        )
        self.max_claims: list[int] = []
        self.stored: list[Trajectory] = []

    async def claim(
        self, actor_id: str, version: int, max_claims: int, wait_s: float
    ) -> ClaimReply:
        self.max_claims.append(max_claims)
        return await self.actor.claim(actor_id, version, max_claims, wait_s)

    async def exchange(
        self, actor_id: str, version: int, episodes: list[list[Trajectory]], max_claims: int
    ) -> tuple[list[str], ClaimReply]:
        self.stored += [episode[0] for episode in episodes]
        return await self.actor.exchange(actor_id, version, episodes, max_claims)

    def states(self) -> list[SampleState]:
        return [s.state for g in self.actor._buffer.ledger.running.values() for s in g.samples]


def make_stage(folder: Path, script: Script) -> EpisodeKit:
    return make_kit(make_renderer(folder), script, make_environment=SingleTurnEnvironment)


def make_worker(
    kit: EpisodeKit,
    replay: Any,
    *,
    actor_id: str = "a",
    num_slots: int = 4,
    is_seeded: bool = False,
) -> RolloutWorker:
    return RolloutWorker(
        actor_id=actor_id,
        kit=kit,
        sampling=Sampling(max_tokens=4),
        max_concurrent_episodes=num_slots,
        claim=replay.claim,
        exchange=replay.exchange,
        is_seeded=is_seeded,
    )


@asynccontextmanager
async def running(worker: RolloutWorker) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        worker.halt()
        await asyncio.wait([task], timeout=10)


async def until(condition: Any, *, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_an_actor_without_free_slots_cancels_episodes_of_closed_groups(
    tokenizer_folder: Path,
) -> None:
    replay, script = Replay(group_time_limit_s=0.3, partial_groups="drop"), Hangs(4)
    async with running(make_worker(make_stage(tokenizer_folder, script), replay)):
        await until(lambda: len(replay.stored) >= 8)
    assert script.num_cancelled == 4
    assert not any(t.stop_reason is StopReason.ERROR for t in replay.stored)


async def test_an_actor_without_free_slots_polls_rarely(tokenizer_folder: Path) -> None:
    replay = Replay()
    async with running(make_worker(make_stage(tokenizer_folder, Hangs(99)), replay)):
        await asyncio.sleep(0.5)
    assert replay.max_claims == [4, 0]


async def test_a_dead_engine_sends_nothing_and_its_samples_are_played_by_others(
    tokenizer_folder: Path,
) -> None:
    replay = Replay(max_attempts=1)
    dying = make_worker(make_stage(tokenizer_folder, Dies(num_calls=6, **SHORT)), replay)
    async with running(dying) as task:
        with pytest.raises(EngineDead):
            await asyncio.wait_for(task, 10)
    assert not any(t.stop_reason is StopReason.ERROR for t in replay.stored)
    assert 0 < len(replay.stored) <= 6, "what had ended well is sent"
    num_running = replay.states().count(SampleState.RUNNING)
    assert num_running
    # Each of these had no failure before, so that all count one.
    assert await replay.actor.fail_actor("a") == num_running


async def test_the_death_of_an_idle_engine_ends_the_worker(tokenizer_folder: Path) -> None:
    replay = Replay()
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    async with running(make_worker(kit, replay)) as task:
        await until(lambda: len(replay.stored) == 24)  # all that is admitted
        await kit.engine.close()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(task, 10)


async def test_an_engine_that_fails_every_request_is_declared_dead(tokenizer_folder: Path) -> None:
    replay = Replay(groups_per_step=16)
    kit = make_stage(tokenizer_folder, Fails(share=1.0, **SHORT))
    async with running(make_worker(kit, replay)) as task:
        with pytest.raises(EngineDead, match=str(MAX_FAILED_IN_ROW)):
            await asyncio.wait_for(task, 10)
    assert len(replay.stored) < MAX_FAILED_IN_ROW


async def test_failures_do_not_end_an_engine_while_an_earlier_request_runs(
    tokenizer_folder: Path,
) -> None:
    class OneRuns(Fails):
        has_begun = False

        async def complete(
            self, token_ids: Sequence[int], sampling: Sampling
        ) -> tuple[list[int], list[float]]:
            if not self.has_begun:
                self.has_begun = True
                await asyncio.sleep(0.3)
                return [1], [-1.0]
            return await super().complete(token_ids, sampling)

    worker = make_worker(make_stage(tokenizer_folder, OneRuns(share=1.0, **SHORT)), Replay())
    played = await worker.evaluate(claims(PROMPTS[:20]), Sampling(max_tokens=4), 60.0)
    assert [t.error_kind for t in played].count("engine") == 19


async def test_groups_closed_during_a_poll_are_scored(tokenizer_folder: Path) -> None:
    """The time limit closes a group with two of three episodes; nothing else happens then."""

    class GroupRewards:
        num_calls = 0

        async def remote(
            self, prompt: Prompt, trajectories: Sequence[Trajectory]
        ) -> dict[int, Any]:
            self.num_calls += 1
            return {}

    scored = GroupRewards()
    replay = Replay(
        groups_per_step=1,
        group_size=3,
        max_staleness=0,
        group_time_limit_s=0.3,
        group_rewards=SimpleNamespace(score=scored),
    )
    kit = make_stage(tokenizer_folder, Hangs(1))
    async with running(make_worker(kit, replay, num_slots=3)):
        await until(lambda: scored.num_calls)


async def test_a_prompt_that_every_engine_rejects_ends_no_engine(tokenizer_folder: Path) -> None:
    worker = make_worker(make_stage(tokenizer_folder, Fails(share=1.0, **SHORT)), Replay())
    played = await worker.evaluate(
        claims([PROMPTS[0]] * 3 * MAX_FAILED_IN_ROW), Sampling(max_tokens=4), 60.0
    )
    assert [t.error_kind for t in played] == ["engine"] * 3 * MAX_FAILED_IN_ROW


async def test_an_evaluation_on_a_dead_engine_has_no_episodes(tokenizer_folder: Path) -> None:
    worker = make_worker(make_stage(tokenizer_folder, Dies(num_calls=5, **SHORT)), Replay())
    for _ in range(2):
        with pytest.raises(EngineDead):
            await worker.evaluate(claims(PROMPTS[:12]), Sampling(max_tokens=4), 60.0)
    with pytest.raises(EngineDead):
        await worker.run()


async def test_an_evaluation_aborts_episodes_at_its_time_limit(tokenizer_folder: Path) -> None:
    script = Hangs(2)
    worker = make_worker(make_stage(tokenizer_folder, script), Replay())
    played = await worker.evaluate(claims(PROMPTS[:8]), Sampling(max_tokens=4), 2.0)
    assert len({t.prompt_id for t in played}) == 6
    assert script.num_cancelled == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_samples_of_a_prompt_differ_unless_they_are_greedy(
    tokenizer_folder: Path, temperature: float
) -> None:
    kit = make_stage(tokenizer_folder, RandomTokens(vocab_size=60, max_tokens=8))
    worker = make_worker(kit, Replay(), is_seeded=True)
    asked = [replace(claims(PROMPTS[:1])[0], sample_index=i, seed=i) for i in range(4)]
    played = await worker.evaluate(asked, Sampling(max_tokens=8, temperature=temperature), 60.0)
    assert {t.sample_index for t in played} == {0, 1, 2, 3}
    num_texts = len({tuple(t.token_ids.tolist()) for t in played})
    assert num_texts == 1 if temperature == 0 else num_texts > 1


async def test_an_abort_ends_the_evaluation(tokenizer_folder: Path) -> None:
    script = Hangs(99)
    worker = make_worker(make_stage(tokenizer_folder, script), Replay())
    playing = asyncio.create_task(worker.evaluate(claims(PROMPTS), Sampling(max_tokens=4), 60.0))
    await until(lambda: script.num_begun == 4)
    worker.end_evaluations()
    await asyncio.wait([playing], timeout=10)
    assert playing.cancelled()
    assert (script.num_begun, script.num_cancelled) == (4, 4)


async def test_a_halt_does_not_wait_for_a_claim(tokenizer_folder: Path) -> None:
    replay = Replay()
    await replay.claim("other", 0, 99, 0.0)
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    worker = make_worker(kit, replay)
    task = asyncio.create_task(worker.run())
    await asyncio.sleep(0.05)
    worker.halt()
    await kit.engine.close()
    await asyncio.wait_for(task, 1.0)  # without an error: the engine was closed after the halt


async def test_a_worker_continues_after_the_replay_actor_was_replaced(
    tokenizer_folder: Path,
) -> None:
    replay = Replay()
    worker = make_worker(make_stage(tokenizer_folder, RandomTokens(**SHORT)), replay)
    put, claim = replay.actor.put, replay.actor.claim

    async def lose(*arguments: Any) -> Any:
        raise ConnectionError("the replay is gone")

    for method in ("put", "claim"):
        setattr(replay.actor, method, lose)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(worker.run(), 10)
        replay.actor.put, replay.actor.claim = put, claim
    replay.stored.clear()
    async with running(worker):
        await until(lambda: len(replay.stored) >= 8)


class Answers:
    """A replay whose claims are answered by hand."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, asyncio.Future[ClaimReply]]] = []
        self.next: list[Claim] = []
        """Claims for the slots of finished episodes, given while there are any."""
        self.may_exchange = asyncio.Event()
        self.may_exchange.set()
        self.num_slots: list[int] = []

    async def claim(
        self, actor_id: str, version: int, max_claims: int, wait_s: float
    ) -> ClaimReply:
        answer = asyncio.get_running_loop().create_future()
        self.calls.append((max_claims, answer))
        return await answer

    async def exchange(
        self, actor_id: str, version: int, episodes: list[list[Trajectory]], max_claims: int
    ) -> tuple[list[str], ClaimReply]:
        self.num_slots.append(max_claims)
        given, self.next = self.next[:max_claims], self.next[max_claims:]
        await self.may_exchange.wait()
        reply = ClaimReply(claims=given, cancelled=[], policy_version=0)
        return ["late"] * len(episodes), reply

    def answer(self, call: int, *claims: Claim, cancelled: Sequence[Claim] = ()) -> None:
        keys = [claim.key for claim in cancelled]
        reply = ClaimReply(claims=list(claims), cancelled=keys, policy_version=0)
        self.calls[call][1].set_result(reply)


async def test_a_cancellation_may_overtake_its_claim(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Claim] = []
    ends = asyncio.Event()

    async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        played.append(claim)
        await ends.wait()
        return [make_trajectory(claim=claim)]

    monkeypatch.setattr(rollout_worker, "play_episode", play)
    first, second, third = (make_claim(group_id=i) for i in range(3))
    replay = Answers()
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    async with running(make_worker(kit, replay, num_slots=1)):
        await until(lambda: len(replay.calls) == 1)
        replay.answer(0, first)
        await until(lambda: len(replay.calls) == 2)  # full: it listens
        ends.set()
        await until(lambda: len(replay.calls) == 3)  # a slot is free: it claims
        assert [max_claims for max_claims, _ in replay.calls] == [1, 0, 1]
        replay.answer(1, cancelled=[second])
        await asyncio.sleep(0.05)
        replay.answer(2, second)
        await until(lambda: len(replay.calls) == 4)
        replay.answer(3, third)
        await until(lambda: third in played)
    assert second not in played


async def test_a_finished_episode_brings_the_next_one(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further claim is made while there are samples."""
    played: list[Claim] = []

    async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        played.append(claim)
        return [make_trajectory(claim=claim)]

    monkeypatch.setattr(rollout_worker, "play_episode", play)
    claims = [make_claim(group_id=i) for i in range(4)]
    replay = Answers()
    replay.next = claims[2:]
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    async with running(make_worker(kit, replay, num_slots=2)):
        await until(lambda: len(replay.calls) == 1)
        replay.answer(0, *claims[:2])
        await until(lambda: len(replay.num_slots) == 2)
        await until(lambda: len(replay.calls) == 3)
    assert played == claims
    assert [max_claims for max_claims, _ in replay.calls if max_claims] == [2, 2]
    assert replay.num_slots == [2, 2]


async def test_a_cancellation_may_overtake_a_claim_for_a_finished_slot(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Claim] = []

    async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        played.append(claim)
        return [make_trajectory(claim=claim)]

    monkeypatch.setattr(rollout_worker, "play_episode", play)
    first, second = (make_claim(group_id=i) for i in range(2))
    replay = Answers()
    replay.next = [second]
    replay.may_exchange.clear()
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    async with running(make_worker(kit, replay, num_slots=1)):
        await until(lambda: len(replay.calls) == 1)
        replay.answer(0, first)
        await until(lambda: len(replay.calls) == 2 and len(replay.num_slots) == 1)
        replay.answer(1, cancelled=[second])
        await asyncio.sleep(0.05)
        replay.may_exchange.set()
        await until(lambda: [max_claims for max_claims, _ in replay.calls].count(1) == 2)
    assert played == [first]


async def test_a_cancelled_episode_that_is_sent_brings_none(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot was free before."""

    async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        return [make_trajectory(claim=claim)]

    monkeypatch.setattr(rollout_worker, "play_episode", play)
    first = make_claim()
    replay = Answers()
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    worker = make_worker(kit, replay, num_slots=1)
    worker._outbox._max_delay_s = 0.2
    async with running(worker):
        await until(lambda: len(replay.calls) == 1)
        replay.answer(0, first)
        await until(lambda: len(replay.calls) == 2)
        replay.answer(1, cancelled=[first])
        await until(lambda: len(replay.num_slots) == 1)
    assert replay.num_slots == [0]


async def test_an_episode_that_ignores_its_cancellation_loses_its_slot(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Claim] = []
    is_over = False

    async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        played.append(claim)
        while not is_over:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        raise AssertionError

    monkeypatch.setattr(rollout_worker, "play_episode", play)
    monkeypatch.setattr(rollout_worker, "CANCEL_LIMIT_S", 0.05)
    monkeypatch.setattr(rollout_worker, "END_LIMIT_S", 0.05)
    first, second = (make_claim(group_id=i) for i in range(2))
    replay = Answers()
    kit = make_stage(tokenizer_folder, RandomTokens(**SHORT))
    async with running(make_worker(kit, replay, num_slots=1)):
        await until(lambda: len(replay.calls) == 1)
        replay.answer(0, first)
        await until(lambda: len(replay.calls) == 2)
        replay.answer(1, cancelled=[first])
        await until(lambda: replay.calls[-1][0] == 1)
        replay.answer(len(replay.calls) - 1, second)
        await until(lambda: second in played)
    is_over = True


async def test_a_late_claim_of_a_dead_actor_returns_nothing(tokenizer_folder: Path) -> None:
    replay = Replay()
    await replay.actor.fail_actor("a")
    assert (await replay.claim("a", 0, 4, 0.05)).claims == []
    assert len((await replay.claim("b", 0, 4, 0.05)).claims) == 4


async def test_an_episode_that_ignores_its_end_holds_no_slot_when_the_actor_plays_again(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = False

    async def play(kit: EpisodeKit, claim: Claim, sampling: Sampling) -> list[Trajectory]:
        while not is_over:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                continue
        raise AssertionError

    monkeypatch.setattr(rollout_worker, "play_episode", play)
    monkeypatch.setattr(rollout_worker, "END_LIMIT_S", 0.05)
    replay = Answers()
    worker = make_worker(make_stage(tokenizer_folder, RandomTokens(**SHORT)), replay, num_slots=1)
    playing = asyncio.create_task(worker.run())
    await until(lambda: len(replay.calls) == 1)
    replay.answer(0, make_claim(group_id=0))
    await until(lambda: len(replay.calls) == 2)
    worker._fail(ConnectionError("the replay died"))
    with pytest.raises(ConnectionError):
        await playing
    async with running(worker):
        await until(lambda: len(replay.calls) == 3)
        assert replay.calls[2][0] == 1, "the slot is free"
    is_over = True


async def test_a_halt_beside_another_failure_is_not_forgotten(tokenizer_folder: Path) -> None:
    replay = Answers()
    worker = make_worker(make_stage(tokenizer_folder, RandomTokens(**SHORT)), replay)
    playing = asyncio.create_task(worker.run())
    await until(lambda: len(replay.calls) == 1)
    worker._fail(ConnectionError("the replay died"))
    worker.halt()
    async with asyncio.timeout(5):
        await playing
        await worker.run()
