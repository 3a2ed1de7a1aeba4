"""Takes the groups of a step from the replay actor, and watches that episodes make progress.

Waits for complete groups (unblocked by rollout actors). Without progress for `run.watchdog_s`, actors
that do not answer are ended, to be replaced; if all answer, the run ends, and the message names what
waits for what.
"""

import asyncio
import time
from pathlib import Path

from raylearner.config.schema import RunConfig
from raylearner.errors import ReplayDied, TooManyFailures
from raylearner.observability.display import Stage
from raylearner.observability.recorder import Recorder
from raylearner.observability.spans import Tracer
from raylearner.replay.buffer import Take
from raylearner.run.replay_process import asked
from raylearner.run.roles import Roles
from raylearner.run.run_actors import RunActors
from raylearner.run.watchdog import Watchdog, describe_stall, unless_set

TAKE_POLL_S = 5.0
"""Maximum wait of one take call before the watchdog checks progress."""
PROGRESS_POLL_S = 1.0
"""Interval between looks at the episodes of a batch."""


class Taker:
    """Takes groups until a stop is requested."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        *,
        actors: RunActors,
        roles: Roles,
        watchdog: Watchdog,
        tracer: Tracer,
        stop: asyncio.Event,
    ) -> None:
        """`folder` is the run directory."""
        self._config = config
        self._folder = folder
        self._recorder = recorder
        self._actors = actors
        self._roles = roles
        self._watchdog = watchdog
        self._tracer = tracer
        self._stop = stop
        self._has_taken = False

    async def take(self, step: int) -> Take | None:
        """Return the groups of a step, or None after a requested stop.

        Raises `TooManyFailures`, `StalledError`, the deaths of actors that do not answer, and what ended
        a push in the background.
        """
        recorder = self._recorder
        with (
            recorder.waiting(f"batch of step {step}")
            if self._has_taken
            else recorder.stage("first batch") as stage
        ):
            following = asyncio.create_task(self._follow(stage), name="batch progress")
            try:
                take = await self._take_or_explain(step)
            finally:
                following.cancel()
        self._has_taken = take is not None
        return take

    async def _follow(self, stage: Stage) -> None:
        """Report how many episodes of the batch have finished, until cancelled."""
        num_groups, group_size = self._config.replay.groups_per_step, self._config.replay.group_size
        while True:
            await asyncio.sleep(PROGRESS_POLL_S)
            try:
                num_done = await asked(self._actors.replay.batch_progress.remote(num_groups))
            except ReplayDied:  # raised by the take
                return
            stage.wait_for([f"{stage.name} {num_done}/{num_groups * group_size} episodes"])

    async def _take_or_explain(self, step: int) -> Take | None:
        try:
            with self._tracer.span("take"):
                return await self._take(step)
        except TooManyFailures:
            failures = await self._watchdog.wait(
                "the replay actor's report of failures",
                asked(self._actors.replay.failures.remote()),
                roles=[self._roles.replay],
            )
            self._recorder.failures(step, failures)
            raise

    async def _take(self, step: int) -> Take | None:
        limit_s, num_groups = self._watchdog.limit_s, self._config.replay.groups_per_step
        progress, changed_at = -1, time.monotonic()
        while True:
            taking = asked(
                self._actors.replay.take.remote(
                    num_groups, self._actors.learner.policy_version, TAKE_POLL_S
                )
            )
            # A take without groups returns after its own timeout.
            take = await self._watchdog.wait(
                "the replay actor's take",
                unless_set(self._stop, taking),
                roles=[self._roles.replay],
                limit_s=limit_s + TAKE_POLL_S,
            )
            if take is not None or self._stop.is_set():
                return take
            self._actors.check()  # without weights engines may have nothing to play
            current = await self._watchdog.wait(
                "the replay actor's report of progress",
                asked(self._actors.replay.progress.remote()),
                roles=[self._roles.replay],
            )
            now = time.monotonic()
            if current != progress:
                progress, changed_at = current, now
            elif self._actors.fleet.waits_for_resources:
                changed_at = now
            elif now - changed_at > limit_s:
                await self._recover(idle_s=now - changed_at, step=step)
                changed_at = time.monotonic()

    async def _recover(self, *, idle_s: float, step: int) -> None:
        """End actors that do not answer. Raises `StalledError` where all answer."""
        text = f"no progress for {idle_s:.0f} s before step {step} (run.watchdog_s)"
        roles = self._roles
        error = await self._watchdog.find_silent(text, [roles.replay, roles.learner])
        if error is not None:
            raise error
        if not await self._watchdog.end_silent(roles.rollout.actors()):
            raise await describe_stall(self._actors.replay, self._folder / "stalled", text=text)
