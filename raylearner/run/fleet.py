"""The rollout actors of a run: as many as are asked for, replaced when they die, called together."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from raylearner.actors.rollout_worker import EvaluateCall, RolloutActivity
from raylearner.config.schema import RunConfig, SamplingSection
from raylearner.deaths import is_death
from raylearner.errors import ConfigError, PushBroken
from raylearner.observability.spans import Span
from raylearner.run import scaling
from raylearner.run.launching import ActorLauncher
from raylearner.run.model import RunModel
from raylearner.run.placement import Colocation, answer
from raylearner.run.slot import Stage
from raylearner.run.slots import OnJoin, OnLoss, Slots, receiver
from raylearner.types import Claim, Trajectory
from raylearner.weights.push import Receive

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 20.0
"""Maximum wait of a step's report, or of a rollback, for an actor."""


class RolloutFleet:
    """Owns the rollout actors of a run.

    `on_loss(actor_id, is_failure=..)` runs before a replacement starts (claims return to pending, the
    publisher removes the member); `on_join(actor_id, receive)` brings the current weights to a new one
    before its first claim.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        model: RunModel,
        replay: Any,
        on_loss: OnLoss,
        on_join: OnJoin,
        colocation: Colocation | None = None,
        folder: Path | None = None,
    ) -> None:
        """With `colocation`, engines share the GPUs of learner ranks; requests to scale are in `folder`."""
        self._section = config.actors
        self._colocation = colocation
        self._folder = folder
        launcher = ActorLauncher(config, model=model, replay=replay, colocation=colocation)
        self._slots = Slots(
            config, launcher, on_loss=on_loss, on_join=on_join, colocation=colocation
        )

    async def start(self) -> None:
        """Start `actors.num_actors` actors, or its `min`, at once; return when they have joined.

        Raises `EngineError` with the first cause where an engine refuses to start or takes too long.
        """
        await self._slots.start(self._section.min_actors)

    def play(self, tasks: asyncio.TaskGroup) -> None:
        """Let every actor play, and others join, up to `actors.num_actors.max`.

        An unrecoverable failure ends the task group.
        """
        self._slots.add(self._section.max_actors - self._section.min_actors)
        tasks.create_task(self._play())

    async def _play(self) -> None:
        """Play, and follow requests to scale, until the fleet stops."""
        following = asyncio.ensure_future(self._follow_requests())
        try:
            await self._slots.play()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow_requests(self) -> None:
        if self._folder is not None:
            await scaling.follow(self._folder, self.resize)

    async def phases(self) -> list[str]:
        """Return what is awaited for each actor that has not joined yet."""
        return await self._slots.phases()

    async def stop(self) -> None:
        """End every actor with its engine; those that do not end in time are killed."""
        await self._slots.stop()

    @property
    def actors(self) -> dict[str, Any]:
        """Handles of the actors that joined, oldest first."""
        return self._slots.actors

    @property
    def num_restarts(self) -> int:
        return self._slots.num_restarts

    # -- the number of actors ------------------------------------------------------------------

    @property
    def waits_for_resources(self) -> bool:
        """Whether no actor is left and the run may wait for nodes."""
        is_unplaced = any(slot.stage is Stage.UNPLACED for slot in self._slots.kept)
        return self._section.is_elastic and not self.actors and is_unplaced

    def resize(self, num_actors: int) -> str:
        """Add slots, or release the newest, whose samples return to pending; return what is done.

        Raises `ConfigError` outside of the limits.
        """
        least, most = self._limits()
        if num_actors < least or (most is not None and num_actors > most):
            limits = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ConfigError(
                f"actors={num_actors}: must be {limits} in this run (actors.num_actors, weights.transport)"
            )
        num_before = len(self._slots.kept)
        self._slots.add(num_actors - num_before)
        self._slots.release(num_before - num_actors)
        return f"changing from {num_before} to {num_actors} rollout actors; {len(self.actors)} are playing now"

    def _limits(self) -> tuple[int, int | None]:
        """Return the least and the largest number of actors; None for no limit but the resources."""
        actors = self._section
        if actors.is_elastic:
            return actors.min_actors, actors.max_actors
        return 1, None if self._colocation is None else actors.max_actors

    # -- calls of all actors -------------------------------------------------------------------

    def fail_push(self, actor_id: str, error: BaseException) -> None:
        """Kill an actor whose engine failed a push, so that it is replaced."""
        actor = self.actors.get(actor_id)
        if actor is None:
            logger.debug("%s failed a weight push after its end: %s", actor_id, error)
            return
        logger.warning(
            "the weight push to %s failed, and the actor is replaced: %s", actor_id, error
        )
        if isinstance(error, PushBroken):
            self._slots.excuse(actor_id)
        ray.kill(actor)

    def receiver(self, actor_id: str) -> Receive:
        return receiver(self.actors[actor_id])

    def evaluators(self) -> dict[str, EvaluateCall]:
        """Return the evaluate calls of the actors that are alive."""

        def call(actor: Any) -> EvaluateCall:
            async def evaluate(
                claims: list[Claim], sampling: SamplingSection, time_limit_s: float
            ) -> list[Trajectory]:
                return await actor.evaluate.remote(claims, sampling, time_limit_s)

            return evaluate

        return {actor_id: call(actor) for actor_id, actor in self.actors.items()}

    async def drain(self) -> tuple[list[RolloutActivity], list[Span]]:
        """Return activity and spans since the last call, of every actor that answers in time."""
        actors = dict(self.actors)
        calls = (answer(actor.drain.remote()) for actor in actors.values())
        reports = await asyncio.gather(
            *(asyncio.wait_for(call, DRAIN_TIMEOUT_S) for call in calls), return_exceptions=True
        )
        for actor_id, outcome in zip(actors, reports, strict=True):
            if isinstance(outcome, TimeoutError):
                logger.warning(
                    "%s did not respond within %g s; its activity and spans of this step are missing",
                    actor_id,
                    DRAIN_TIMEOUT_S,
                )
        alive = [r for r in reports if not isinstance(r, BaseException)]
        return [a for a, _ in alive], [span for _, spans in alive for span in spans]

    async def sleep(self) -> None:
        """Put every engine to sleep until its next weights; one that fails is replaced."""
        actors = dict(self.actors)
        outcomes = await asyncio.gather(
            *(answer(actor.sleep.remote()) for actor in actors.values()), return_exceptions=True
        )
        for actor_id, outcome in zip(actors, outcomes, strict=True):
            # An actor that died is replaced anyway.
            if isinstance(outcome, RayTaskError) and not is_death(outcome):
                self.fail_push(actor_id, outcome)

    async def use_replay(self, replay: Any) -> None:
        """Let every actor claim from this replay actor, since the one before died."""
        await self._slots.use_replay(replay)

    async def abort(self) -> None:
        """End every running episode, before a ledger without them is restored.

        Episodes of an actor that does not answer in time are void all the same.
        """
        calls = (answer(actor.abort.remote()) for actor in self.actors.values())
        await asyncio.gather(
            *(asyncio.wait_for(call, DRAIN_TIMEOUT_S) for call in calls), return_exceptions=True
        )
