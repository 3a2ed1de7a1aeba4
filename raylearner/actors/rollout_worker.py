"""Keeps an engine busy: claims samples, plays many episodes at once, sends what finishes.

Consumes claims; produces trajectories. Waits for the replay to admit groups (unblocked by the
learner's commit and by weights landing here) and for a free episode slot (unblocked by an episode).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from raylearner.actors.episode import EpisodeKit
from raylearner.actors.outbox import Outbox
from raylearner.actors.play import play
from raylearner.config.schema import SamplingSection
from raylearner.observability.spans import Tracer
from raylearner.types import Claim, ClaimReply, Prompt, Sampling, StopReason, Trajectory
from raylearner.user_code import host

CLAIM_POLL_S = 2.0
"""Longest one claim call waits in the replay actor before it is asked again."""

ClaimCall = Callable[[str, int, int, float], Awaitable[ClaimReply]]
EvaluateCall = Callable[[list[Prompt], SamplingSection], Awaitable[list[Trajectory]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutActivity:
    """What an actor did since it was last asked. Times in seconds."""

    num_episodes: int
    num_sampled_tokens: int
    idle_s: float
    wall_s: float
    tools: Mapping[str, float] = field(default_factory=dict[str, float])
    """`tools/*` of all tools of the actor."""


class RolloutWorker:
    """Owns the episodes in flight of one engine. At most `max_concurrent_episodes` run at once."""

    def __init__(
        self,
        *,
        actor_id: str,
        kit: EpisodeKit,
        sampling: Sampling,
        max_concurrent_episodes: int,
        claim: ClaimCall,
        outbox: Outbox,
        is_seeded: bool = False,
    ) -> None:
        self.actor_id = actor_id
        self._kit = kit
        self._sampling = sampling
        self._max_concurrent = max_concurrent_episodes
        self._claim = claim
        self._outbox = outbox
        self._is_seeded = is_seeded
        self._running: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._slot_freed = asyncio.Event()
        self._is_halted = False
        self._num_episodes = self._num_tokens = 0
        self._busy = _BusyClock(kit.tracer)

    async def run(self) -> None:
        """Plays until `halt`. Raises what is not the failure of one episode, `UserCodeStuck` where
        users' code has used up this process."""
        try:
            async with asyncio.TaskGroup() as episodes:
                while not self._is_halted:
                    host.shared().check()
                    await self._fill(episodes)
                for task in self._running.values():
                    task.cancel()
        except* Exception as group:
            raise group.exceptions[0] from None

    def halt(self) -> None:
        """Ends `run`; running episodes are cancelled and not reported."""
        self._is_halted = True
        self._slot_freed.set()

    async def evaluate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Trajectory]:
        """One episode per prompt, beside whatever else runs; nothing of it reaches the replay.

        Segments of an episode share its group id.
        """
        slots = asyncio.Semaphore(self._max_concurrent)

        async def play_one(index: int, prompt: Prompt) -> list[Trajectory]:
            version = self._kit.engine.policy_version
            claim = Claim(
                group_id=index,
                sample_index=0,
                attempt=0,
                prompt=prompt,
                policy_version=version,
                seed=index,
            )
            async with slots:
                return await play(self._kit, claim, sampling)

        played = await asyncio.gather(*(play_one(i, p) for i, p in enumerate(prompts)))
        return [segment for segments in played for segment in segments]

    def drain_activity(self) -> RolloutActivity:
        """What happened since the last call."""
        idle_s, wall_s = self._busy.drain()
        activity = RolloutActivity(
            num_episodes=self._num_episodes,
            num_sampled_tokens=self._num_tokens,
            idle_s=idle_s,
            wall_s=wall_s,
        )
        self._num_episodes = self._num_tokens = 0
        return activity

    async def _fill(self, episodes: asyncio.TaskGroup) -> None:
        free = self._max_concurrent - len(self._running)
        if free == 0:
            self._slot_freed.clear()
            await self._slot_freed.wait()
            return
        version = self._kit.engine.policy_version
        reply = await self._claim(self.actor_id, version, free, CLAIM_POLL_S)
        for key in reply.cancelled:
            if task := self._running.get(key):
                task.cancel()
        for claim in reply.claims:
            if self._is_halted:
                return
            self._running[claim.key] = episodes.create_task(self._play(claim))
            self._busy.set_busy(is_busy=True)

    async def _play(self, claim: Claim) -> None:
        sampling = replace(self._sampling, seed=claim.seed) if self._is_seeded else self._sampling
        if claim.is_greedy:
            sampling = replace(sampling, temperature=0.0)
        try:
            with suppress(asyncio.CancelledError):  # no longer wanted: nothing of it is reported
                segments = await play(self._kit, claim, sampling)
                if self._is_halted or segments[0].stop_reason is StopReason.ABORTED:
                    return
                self._num_episodes += 1
                self._num_tokens += sum(s.num_sampled_tokens for s in segments)
                await self._outbox.send(segments)
        finally:
            self._running.pop(claim.key, None)
            self._slot_freed.set()
            self._busy.set_busy(is_busy=bool(self._running))


class _BusyClock:
    """Seconds without any episode in flight, and in all, since the last drain; idle spells as spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._idle_since_s = time.time()
        self._is_busy = False
        self._drained_at = self._changed_at = time.monotonic()
        self._idle_s = 0.0

    def set_busy(self, *, is_busy: bool) -> None:
        now = time.monotonic()
        if not self._is_busy:
            self._idle_s += now - self._changed_at
        if is_busy and not self._is_busy:
            self._tracer.since("wait for work", self._idle_since_s)
        elif self._is_busy and not is_busy:
            self._idle_since_s = time.time()
        self._is_busy, self._changed_at = is_busy, now

    def drain(self) -> tuple[float, float]:
        self.set_busy(is_busy=self._is_busy)
        now = time.monotonic()
        idle_s, wall_s = self._idle_s, now - self._drained_at
        self._idle_s, self._drained_at = 0.0, now
        return idle_s, wall_s
