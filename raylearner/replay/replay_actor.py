"""The Ray actor around the replay buffer.

Consumes claims and episodes of rollout actors; produces takes for the controller. `claim` waits for
a free slot (unblocked by commit, drops, failures and weights landing), `take` for complete groups
(unblocked by put and by time limits).
"""

import asyncio
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raylearner import stacks
from raylearner.config.data import SamplerSection, Shuffle
from raylearner.config.schema import ReplaySection
from raylearner.deaths import is_death
from raylearner.errors import RewardError
from raylearner.replay import snapshot, stats
from raylearner.replay.buffer import ReplayBuffer, Take
from raylearner.replay.closing import ScoreRequest
from raylearner.replay.journal import Journal
from raylearner.replay.sampler import make_sampler
from raylearner.replay.waiting import WaitingClaims
from raylearner.types import ClaimReply, EpisodeScore, Prompt, Trajectory

SCORE_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between calls of a reward actor that died, while Ray restarts it."""
logger = logging.getLogger(__name__)

MIN_WAIT_S = 0.001
"""Minimum wait, so that rounding never makes a busy loop."""


@ray.remote(num_cpus=0)
class ReplayActor:
    """Owns the one `ReplayBuffer` of a run. Only one call at a time uses it; waiting calls do not."""

    def __init__(
        self,
        config: ReplaySection,
        prompts: list[Prompt],
        seed: int,
        *,
        sampler: SamplerSection | None = None,
        weights: dict[str, float] | None = None,
        group_rewards: Any = None,
        journal: str | None = None,
    ) -> None:
        """`weights` are those of the prompts' sources; `group_rewards` is an actor that scores
        complete groups, if there are group reward functions; `journal` is the folder of the journal.
        """
        stacks.register()
        self._buffer = ReplayBuffer(
            config,
            prompts,
            seed,
            sampler=make_sampler(
                sampler or Shuffle(kind="shuffle"), prompts, seed=seed, weights=weights or {}
            ),
            should_score_groups=group_rewards is not None,
            clock=time.monotonic,
        )
        self._group_rewards = group_rewards
        self._scoring: set[asyncio.Task[None]] = set()
        self._claims = WaitingClaims(self._buffer)
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._dead: set[str] = set()  # no id is used twice
        self._engine_versions: dict[str, int] = {}
        self._cut: snapshot.Snapshot | None = None
        self._journal = None if journal is None else Journal(Path(journal))
        self._saving = asyncio.Lock()
        self._initial = snapshot.take_snapshot(self._buffer)

    def __repr__(self) -> str:
        return "replay"

    async def ping(self) -> None:
        """Answer."""

    async def claim(
        self, actor_id: str, engine_version: int, max_claims: int, timeout_s: float
    ) -> ClaimReply:
        """Wait for samples to play or claims to stop; the reply is empty after `timeout_s`.

        A call whose actor died gets nothing, even where it arrives after the death was reported.
        """
        if actor_id in self._dead:
            version = self._buffer.policy_version
            return ClaimReply(claims=[], cancelled=[], policy_version=version)
        version = max(engine_version, self._engine_versions.get(actor_id, 0))
        reply = self._buffer.claim(actor_id, version, max_claims)
        self._start_scoring()
        self._watch_time_limits()
        if reply.claims or reply.cancelled or timeout_s <= 0:
            return reply
        return await self._claims.wait(actor_id, version, max_claims, timeout_s)

    async def advance_engine(self, actor_id: str, engine_version: int) -> None:
        """Continue a waiting claim of `actor_id` with the version that landed there."""
        self._engine_versions[actor_id] = engine_version
        self._claims.advance(actor_id, engine_version)
        self._start_scoring()
        self._watch_time_limits()

    async def put(self, episodes: list[list[Trajectory]]) -> list[str]:
        """Store episodes and return the outcome of each; see `ReplayBuffer.put`."""
        outcomes = [self._buffer.put(episode) for episode in episodes]
        if self._journal is not None:
            for episode, outcome in zip(episodes, outcomes, strict=True):
                if outcome == "accepted":
                    self._journal.add(episode)
        self._wake()
        return outcomes

    async def exchange(
        self, actor_id: str, engine_version: int, episodes: list[list[Trajectory]], max_claims: int
    ) -> tuple[list[str], ClaimReply]:
        """Store episodes, and claim the samples that are there for their slots without a wait.

        One call instead of two, since calls are most of what an episode costs this process.
        """
        outcomes = await self.put(episodes)
        return outcomes, await self.claim(actor_id, engine_version, max_claims, 0.0)

    async def take(self, num_groups: int, policy_version: int, timeout_s: float) -> Take | None:
        """Lease complete groups until `commit`; return None after `timeout_s`, so that callers can check
        progress and call again. Raises `TooManyFailures` when the run should end."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            size = self._buffer.ledger.size
            take = self._buffer.take(num_groups, policy_version)
            self._start_scoring()
            if take is not None:
                return take
            if self._buffer.ledger.size < size:  # dropped groups freed slots
                self._claims.serve()
            if time.monotonic() >= deadline_s:
                return None
            await self._wait(deadline_s)

    async def commit(self, group_ids: list[int], policy_version: int) -> None:
        self._buffer.commit(group_ids, policy_version)
        self._wake()

    async def release(self) -> None:
        self._buffer.release()
        self._wake()

    async def fail_actor(self, actor_id: str, *, is_failure: bool = True) -> int:
        """Return the running samples of an actor that is gone to pending; return their number."""
        self._dead.add(actor_id)
        self._claims.dismiss(actor_id)
        num_samples = self._buffer.fail_actor(actor_id, is_failure=is_failure)
        self._wake()
        return num_samples

    async def metrics(self) -> dict[str, float]:
        return self._buffer.metrics()

    async def describe(self) -> list[str]:
        return self._buffer.describe()

    async def progress(self) -> int:
        """Return the number of claims, puts, takes and commits."""
        return self._buffer.num_changes

    async def batch_progress(self, num_groups: int) -> int:
        """Return the number of episodes of the next take that have finished."""
        group_size = self._buffer.config.group_size
        return stats.batch_progress(self._buffer.ledger, num_groups, group_size)

    async def failures(self) -> list[str]:
        """Return the first failed episode of each kind since the last call, with its cause."""
        return self._buffer.counters.drain_failures()

    async def cut(self) -> None:
        """Keep the state of this moment for the next `save`."""
        self._cut = snapshot.take_snapshot(self._buffer)
        if self._journal is not None:
            self._journal.cut(self._buffer)

    async def save(self, folder: str) -> None:
        """Write the kept state, or that of this moment; later calls are not part of it.

        A save that was given up by its caller ends before the next one begins.
        """
        cut, self._cut = self._cut or snapshot.take_snapshot(self._buffer), None
        async with self._saving:
            await asyncio.to_thread(cut.save, Path(folder))

    async def load(self, folder: str | None, num_lost: int = 0) -> None:
        """Replace the state by a saved one, or by the initial one; running episodes become late.

        Episodes that the journal has since, and that are valid in this state, are put back.

        `num_lost` is the number of replay actors of this run that died.
        """
        self._engine_versions.clear()
        self._cut = None
        if folder is None:
            metadata, arrays = self._initial.state()
            state = json.loads(json.dumps(metadata)), arrays, self._initial.images()
        else:
            state = await asyncio.to_thread(snapshot.read, Path(folder))
        episodes = [] if self._journal is None else await self._journal.read()
        snapshot.restore(self._buffer, *state, num_lost=num_lost)
        if self._journal is not None:
            num_kept = self._journal.put_back(self._buffer, episodes)
            logger.info(
                "restored %d episodes finished since the checkpoint from the replay journal",
                num_kept,
            )
        self._claims.reconsider()
        self._wake()

    def _wake(self) -> None:
        """Serve the claims that a change concerns, and let a waiting take look again."""
        self._claims.serve()
        self._start_scoring()
        self._watch_time_limits()
        self._changed.set()
        self._changed = asyncio.Event()

    def _start_scoring(self) -> None:
        """Score groups that became complete, as at their time limit."""
        for request in self._buffer.score_requests():
            task = asyncio.get_running_loop().create_task(self._score(request))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)

    async def _score(self, request: ScoreRequest) -> None:
        """Score one group. If its functions fail, or the reward actor keeps dying, its episodes fail."""
        try:
            scores = await self._call_rewards(request)
        except RayError as error:
            cause = RewardError(f"the group's rewards: {str(error).splitlines()[-1]}")
            failed = {t.sample_index for t in request.trajectories}
            scores = {index: EpisodeScore(error=cause) for index in failed}
        self._buffer.put_scores(request, scores)
        self._wake()

    async def _call_rewards(self, request: ScoreRequest) -> dict[int, EpisodeScore]:
        """Call the reward actor, which Ray restarts, again after it died."""
        for pause_s in SCORE_PAUSES_S:
            try:
                return await self._group_rewards.score.remote(request.prompt, request.trajectories)
            except RayError as error:
                if not is_death(error):
                    raise
            await asyncio.sleep(pause_s)
        return await self._group_rewards.score.remote(request.prompt, request.trajectories)

    async def _wait(self, deadline_s: float) -> None:
        """Wait until something changes, or until `deadline_s`."""
        self._watch_time_limits()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(deadline_s - time.monotonic(), MIN_WAIT_S)):
                await self._changed.wait()

    def _watch_time_limits(self) -> None:
        """Close the groups that reach their time limit, also while nothing else happens.

        Limits only move later, so that a timer never fires too late.
        """
        next_s = self._buffer.next_deadline_s()
        if next_s is not None and self._timer is None:
            wait_s = max(next_s - time.monotonic(), MIN_WAIT_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._close_expired)

    def _close_expired(self) -> None:
        self._timer = None
        self._buffer.close_expired()
        self._wake()
