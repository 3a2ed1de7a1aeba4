"""Keeps an engine busy: claims samples, plays many episodes at once, sends the finished ones.

Consumes claims; produces trajectories. Waits for the replay to admit groups (unblocked by the
learner's commit and by new weights of this engine) and for a free episode slot (unblocked by an
episode), and receives meanwhile which episodes are no longer wanted. A finished episode waits briefly,
to be sent together with others.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raylearner.actors.engines.watched import WatchedEngine
from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.actors.outbox import Episode, Outbox
from raylearner.config.schema import SamplingSection
from raylearner.errors import EngineDead
from raylearner.observability.spans import Tracer
from raylearner.types import Claim, ClaimReply, Sampling, StopReason, Trajectory
from raylearner.user_code import host

CLAIM_POLL_S = 10.0
"""Maximum time one claim call waits in the replay actor before it is repeated."""
CANCEL_LIMIT_S = 30.0
"""Maximum time that a cancelled episode keeps its slot."""
END_LIMIT_S = 5.0
"""Maximum wait, when `run` ends, for cancelled episodes, and for finished ones to be sent."""

ClaimCall = Callable[[str, int, int, float], Awaitable[ClaimReply]]
Key = tuple[int, int, int]
ExchangeCall = Callable[[str, int, list[Episode], int], Awaitable[tuple[list[str], ClaimReply]]]
"""Puts episodes and claims samples for their slots: actor, engine version, episodes, number of samples."""
EvaluateCall = Callable[[list[Claim], SamplingSection, float], Awaitable[list[Trajectory]]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutActivity:
    """Activity of an actor since the last report. Times in seconds."""

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
        exchange: ExchangeCall,
        is_seeded: bool = False,
    ) -> None:
        self.actor_id = actor_id
        self._engine = WatchedEngine(kit.engine, on_death=self._die)
        self._kit = replace(kit, engine=self._engine)
        self._sampling = sampling
        self._max_concurrent = max_concurrent_episodes
        self._claim = claim
        self._exchange = exchange
        self._outbox = Outbox(self._send)
        self._is_seeded = is_seeded
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._evaluations: set[asyncio.Task[Any]] = set()
        self._slot_freed, self._is_full = asyncio.Event(), asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: Exception | None = None
        self._is_halted = False
        self._num_claiming = 0  # calls under way that may bring claims
        self._void: set[Key] = set()  # cancelled before the reply with their claim arrived
        self._num_episodes = self._num_tokens = 0
        self._busy = _BusyClock(kit.tracer)

    async def run(self) -> None:
        """Play until `halt`, again after an error other than `EngineDead`.

        Raises errors that are not the failure of one episode: `EngineDead`, after which nothing is sent
        that the dead engine failed, and `UserCodeStuck` when too many calls of user code in this process
        never ended.
        """
        for key, task in list(self._running.items()):  # ones that ignored their cancellation
            self._free(key, task)
        self._is_full.clear()
        duties = [
            asyncio.create_task(self._guard(duty))
            for duty in (self._play_claims, self._listen, self._engine.watch)
        ]
        try:
            await self._ended.wait()
        finally:
            tasks = [*duties, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=END_LIMIT_S)
        failure = self._failure
        if failure is None or (self._is_halted and not isinstance(failure, EngineDead)):
            return
        await self._outbox.flush(END_LIMIT_S)
        if not isinstance(failure, EngineDead):
            self._failure = None
            self._ended.clear()
        raise failure

    def halt(self) -> None:
        """End `run`; running episodes are cancelled and not reported."""
        self._is_halted = True
        self._ended.set()

    async def evaluate(
        self, claims: Sequence[Claim], sampling: Sampling, time_limit_s: float
    ) -> list[Trajectory]:
        """Play these episodes, in parallel to any others; the replay receives none of them.

        Episodes that have not ended at the time limit are aborted, and missing in the result. Raises `EngineDead`, with which all are void.
        """
        slots = asyncio.Semaphore(self._max_concurrent)
        ends_at = asyncio.get_running_loop().time() + time_limit_s

        async def play_one(claim: Claim) -> Episode:
            is_drawn = self._is_seeded and not sampling.is_greedy
            own = replace(sampling, seed=claim.seed) if is_drawn else sampling
            limit = asyncio.timeout_at(ends_at)
            try:
                async with limit, slots:
                    return await play_episode(self._kit, claim, own)
            except TimeoutError:
                if not limit.expired():
                    raise
                return []

        async def play_all() -> list[Episode]:
            try:
                async with asyncio.TaskGroup() as episodes:
                    tasks = [episodes.create_task(play_one(claim)) for claim in claims]
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            return [task.result() for task in tasks]

        playing = asyncio.create_task(play_all())
        self._evaluations.add(playing)
        try:
            return [segment for segments in await playing for segment in segments]
        finally:
            playing.cancel()
            self._evaluations.discard(playing)

    def end_evaluations(self) -> None:
        """Cancel evaluations in flight, which nobody waits for any more."""
        for playing in self._evaluations:
            playing.cancel()

    def drain_activity(self) -> RolloutActivity:
        """Return the activity since the last call."""
        idle_s, wall_s = self._busy.drain()
        activity = RolloutActivity(
            num_episodes=self._num_episodes,
            num_sampled_tokens=self._num_tokens,
            idle_s=idle_s,
            wall_s=wall_s,
        )
        self._num_episodes = self._num_tokens = 0
        return activity

    # -- claims and cancellations --------------------------------------------------------------

    async def _play_claims(self) -> None:
        """Claim samples for free slots and start their episodes."""
        while True:
            host.shared().check()
            free = self._max_concurrent - len(self._running)
            if free == 0:
                self._slot_freed.clear()
                self._is_full.set()
                await self._slot_freed.wait()
                continue
            with self._claiming():
                self._accept(await self._ask(free))

    async def _send(self, episodes: list[Episode]) -> list[str]:
        """Send finished episodes, and play others in their slots: one call does both."""
        version = self._engine.policy_version
        num_slots = 0 if self._ended.is_set() else sum(map(self._has_slot, episodes))
        with self._claiming():
            outcomes, reply = await self._exchange(self.actor_id, version, episodes, num_slots)
            self._accept(reply)
        return outcomes

    @contextmanager
    def _claiming(self) -> Iterator[None]:
        """Remember cancellations that overtake the reply with their claim."""
        self._num_claiming += 1
        try:
            yield
        finally:
            self._num_claiming -= 1
            if self._num_claiming == 0:
                self._void.clear()

    def _accept(self, reply: ClaimReply) -> None:
        """Cancel and start episodes; claims of an ended `run` are void."""
        self._cancel(reply)
        if self._ended.is_set():
            return
        for claim in reply.claims:
            if claim.key not in self._void:
                self._start(claim)

    def _has_slot(self, episode: Episode) -> bool:
        """Whether the task that sends an episode keeps its slot until then."""
        task = self._running.get(episode[0].episode_key)
        return task is not None and not task.cancelling()

    def _start(self, claim: Claim) -> None:
        task = asyncio.create_task(self._guard(partial(self._play, claim)))
        self._running[claim.key] = task
        # One that is cancelled before it begins never runs.
        task.add_done_callback(partial(self._free, claim.key))
        self._busy.set_busy(is_busy=True)

    async def _listen(self) -> None:
        """Receive episodes to cancel while all slots are taken and nothing is claimed."""
        while True:
            await self._is_full.wait()
            host.shared().check()
            self._cancel(await self._ask(0))

    async def _ask(self, max_claims: int) -> ClaimReply:
        """Wait for claims, or for episodes that are no longer wanted."""
        version = self._engine.policy_version
        return await self._claim(self.actor_id, version, max_claims, CLAIM_POLL_S)

    def _cancel(self, reply: ClaimReply) -> None:
        for key in reply.cancelled:
            if task := self._running.get(key):
                task.cancel()
                asyncio.get_running_loop().call_later(CANCEL_LIMIT_S, self._abandon, key, task)
            elif self._num_claiming:
                self._void.add(key)

    def _abandon(self, key: Key, task: asyncio.Task[None]) -> None:
        """Free the slot of a cancelled episode that does not end."""
        if not task.done():
            logger.warning(
                "episode %s did not end within %g s of its cancellation; its slot is reused",
                key,
                CANCEL_LIMIT_S,
            )
            self._free(key, task)

    def _free(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._running.get(key) is not task:
            return
        del self._running[key]
        self._is_full.clear()
        self._slot_freed.set()
        self._busy.set_busy(is_busy=bool(self._running))

    # -- episodes ------------------------------------------------------------------------------

    async def _play(self, claim: Claim) -> None:
        sampling = replace(self._sampling, seed=claim.seed) if self._is_seeded else self._sampling
        if claim.is_greedy:
            sampling = replace(sampling, temperature=0.0)
        with suppress(asyncio.CancelledError):  # no longer wanted, and not reported
            segments = await play_episode(self._kit, claim, sampling)
            if self._ended.is_set() or segments[0].stop_reason is StopReason.ABORTED:
                return
            self._num_episodes += 1
            self._num_tokens += sum(s.num_sampled_tokens for s in segments)
            await self._outbox.send(segments)

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do a part of `run`, which ends with its error."""
        try:
            await work()
        except Exception as error:
            self._fail(error)

    def _die(self, cause: str) -> None:
        self._fail(EngineDead(cause))

    def _fail(self, error: Exception) -> None:
        if not self._ended.is_set():
            self._failure = error
            self._ended.set()


class _BusyClock:
    """Measures the seconds without an episode in flight, and in total, since the last drain;
    records idle periods as spans.
    """

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
