"""Start of one rollout actor: its place in the cluster, then its engine."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylearner.actors.rollout_actor import RolloutActor
from raylearner.config.learner import lora_rank
from raylearner.config.schema import RunConfig
from raylearner.config.section import number
from raylearner.deaths import is_death
from raylearner.errors import EngineError, EngineLost, summary
from raylearner.run.model import RunModel
from raylearner.run.placement import Colocation, answer
from raylearner.run.watchdog import Role, Watchdog

logger = logging.getLogger(__name__)

CALLS_BESIDE_EPISODES = 64
"""Concurrent calls of an actor for weights, evaluation and reports."""
PHASE_TIMEOUT_S = 1.0
"""Maximum wait for an actor to report what it is doing while it starts."""
CONNECT_TIMEOUT_S = 20.0
"""Maximum wait for an actor to be connected to another replay actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A rollout actor whose engine runs."""

    actor: Any
    pid: int
    engine: str
    """Class of the engine."""


class ActorLauncher:
    """Starts rollout actors, whose engines load the model once it is on their node."""

    def __init__(
        self, config: RunConfig, *, model: RunModel, replay: Any, colocation: Colocation | None
    ) -> None:
        """With `colocation`, engines share the GPUs of learner ranks."""
        self._config = config
        self._model = model
        self.replay = replay
        """Replay actor of the next actor."""
        self._colocation = colocation
        self._adapter_rank = _find_adapter_rank(config)
        self._starting: dict[str, Any] = {}
        self._watchdog = Watchdog(config.run.watchdog_s)

    @property
    def resources(self) -> str:
        """The resources of one actor, in words."""
        actors = self._config.actors
        amounts = (("CPU", actors.cpus_per_actor), ("GPU", number(actors.gpus_per_actor)))
        return " and ".join(f"{amount:g} {name}" for name, amount in amounts if amount) or "a node"

    async def launch(
        self, actor_id: str, *, on_placed: Callable[[str], None], has_to_wait: bool
    ) -> Launched:
        """Start an actor and its engine; call `on_placed` with its node once it has one.

        Its engine has `actors.start_timeout_s`; the wait for the model does not count, and with
        `has_to_wait` neither does that for a node. One that is placed must answer within `run.watchdog_s`.
        Raises `EngineError` where the engine did not start,
        `EngineLost` where its process died, and the error of a model that could not be made. A failed
        actor is killed.
        """
        actors = self._config.actors
        actor = self._starting[actor_id] = self._create(actor_id)
        limit = asyncio.timeout(None if has_to_wait else actors.start_timeout_s)
        role, watching = Role(actor_id, lambda: {actor_id: actor}, EngineLost), None
        try:
            async with limit:
                node = await answer(actor.node.remote())
                on_placed(node)
                watching = asyncio.create_task(self._watchdog.watch(role), name="watchdog")
                actor.load_libraries.remote()  # `start` raises what fails in it
                if has_to_wait or not self._model.is_ready(node):
                    has_to_wait = True
                    limit.reschedule(None)
                    await self._model.ready(node)
                    now = asyncio.get_running_loop().time()
                    limit.reschedule(now + actors.start_timeout_s)
                pid, engine = await actor.start.remote()
        except Exception as error:
            ray.kill(actor)
            if limit.expired():
                waited = "" if has_to_wait else f", including the wait for {self.resources}"
                raise EngineError(
                    f"{actor_id}: the engine did not start within"
                    f" {actors.start_timeout_s:g} s (actors.start_timeout_s){waited}"
                ) from error
            if self._model.failed_with(error):
                raise
            if is_own_failure(error):
                cause = error.cause if isinstance(error, RayTaskError) else error
                raise EngineError(f"{actor_id}: the engine did not start: {cause}") from error
            if is_death(error):
                text = f"{actor_id}: the process died while the engine started: {summary(error)}"
                raise EngineLost(text) from error
            raise
        except BaseException:
            ray.kill(actor)
            raise
        finally:
            if watching is not None:
                watching.cancel()
            del self._starting[actor_id]
        return Launched(actor=actor, pid=pid, engine=engine)

    async def phase(self, actor_id: str) -> str:
        """Return what an actor is doing while it starts."""
        actor = self._starting.get(actor_id)
        if actor is None:
            return "receiving weights"
        try:
            return await asyncio.wait_for(answer(actor.phase.remote()), PHASE_TIMEOUT_S)
        except Exception as error:
            if not is_end(error) and not isinstance(error, TimeoutError):
                raise
            return "starting the process"

    async def connect(self, actor: Any) -> None:
        """Connect an actor to the current replay actor, which may have died since the launch.

        An actor that is dead or stuck is left to its own watch.
        """
        try:
            await asyncio.wait_for(answer(actor.use_replay.remote(self.replay)), CONNECT_TIMEOUT_S)
        except Exception as error:
            if not is_end(error) and not isinstance(error, TimeoutError):
                raise
            logger.debug("an actor was not connected to the new replay actor: %s", error)

    def _create(self, actor_id: str) -> Any:
        actors = self._config.actors
        options: dict[str, Any] = {
            "name": f"{self._config.run.name}/{actor_id}",
            "num_cpus": actors.cpus_per_actor,
            "num_gpus": number(actors.gpus_per_actor),
            "max_concurrency": 2 * actors.max_concurrent_episodes + CALLS_BESIDE_EPISODES,
            "scheduling_strategy": "SPREAD",
        }
        if self._colocation is not None:
            options |= self._colocation.engine_options(actor_id)
        rollout_actor: Any = RolloutActor
        return rollout_actor.options(**options).remote(
            actor_id, self._config, self._model.path, self.replay, self._adapter_rank
        )


def is_own_failure(error: BaseException) -> bool:
    """Return whether the code of an actor failed, which another try would repeat."""
    if isinstance(error, RayActorError):
        return error.actor_init_failed
    return isinstance(error, RayTaskError) and not is_death(error)


def is_end(error: BaseException) -> bool:
    """Return whether a call failed with the actor, or in its code."""
    return isinstance(error, RayTaskError) or is_death(error)


def lost_nodes() -> set[str]:
    """Return the ids of nodes that left the cluster."""
    nodes: list[Mapping[str, Any]] = ray.nodes()
    return {node["NodeID"] for node in nodes if not node["Alive"]}


def _find_adapter_rank(config: RunConfig) -> int | None:
    """Return the rank of pushed adapters; None where full weights are pushed."""
    lora = config.learner.lora
    return None if lora is None or config.weights.transport != "adapter" else lora_rank(lora)
