"""Placement of a run's actors: rollout actors are started, watched and replaced."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylearner.actors.rollout_actor import RolloutActor
from raylearner.actors.rollout_worker import EvaluateCall, RolloutActivity
from raylearner.config.learner import lora_rank
from raylearner.config.schema import RunConfig, SamplingSection
from raylearner.config.section import number
from raylearner.errors import (
    ConfigError,
    EngineError,
    LearnerDied,
    PushBroken,
    RaylearnerError,
    WeightTransferError,
)
from raylearner.observability.spans import Span
from raylearner.types import Prompt, Trajectory
from raylearner.weights.update import WeightReceipt, WeightUpdate

logger = logging.getLogger(__name__)

CALLS_BESIDE_EPISODES = 64
"""Concurrent calls of an actor for weights, evaluation and reports."""
DRAIN_TIMEOUT_S = 20.0
"""Maximum wait of a step's report for an actor."""
STOP_TIMEOUT_S = 20.0
"""Maximum time for an actor to end its engine before it is killed."""
RESERVE_TIMEOUT_S = 60.0
"""Maximum wait for the placement group of learner ranks and engines."""


class Colocation:
    """Owns the placement group of learner ranks and engines on shared GPUs: one bundle for each GPU."""

    def __init__(self, config: RunConfig, group: Any) -> None:
        self._num_bundles = config.learner.num_ranks
        self._group: Any = group
        self._ranks: dict[str, int] = {}

    @classmethod
    async def reserve(cls, config: RunConfig) -> "Colocation":
        """Reserve the GPUs of all ranks, with the CPUs of ranks and engines.

        Raises `ConfigError` where the cluster has fewer.
        """
        learner, num_engines = config.learner, config.engines_per_rank
        cpus = learner.cpus_per_rank + num_engines * config.actors.cpus_per_actor
        bundle = {"GPU": 1.0} | ({"CPU": cpus} if cpus else {})
        name = f"{config.run.name}/colocated"
        group = placement_group([bundle] * learner.num_ranks, "PACK", name=name)
        if not await asyncio.to_thread(group.wait, RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            raise ConfigError(
                f"weights.transport: 'ipc' puts a learner rank and {num_engines} engines on each of"
                f" {learner.num_ranks} GPUs, but within {RESERVE_TIMEOUT_S:g} s the cluster had no"
                f" {learner.num_ranks} x {bundle} free on its nodes; lower actors.num_actors,"
                " learner.num_ranks, actors.cpus_per_actor or learner.cpus_per_rank"
            )
        return cls(config, group)

    def release(self) -> None:
        """Remove the placement group. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def rank_options(self) -> list[Mapping[str, Any]]:
        """Return the actor options of every learner rank."""
        return [self._options(index) for index in range(self._num_bundles)]

    def engine_options(self, actor_id: str) -> Mapping[str, Any]:
        """Return the actor options of an engine, in the bundle with the fewest engines."""
        num_engines = Counter(self._ranks.values())
        self._ranks[actor_id] = rank = min(
            range(self._num_bundles), key=lambda i: (num_engines[i], i)
        )
        return self._options(rank)

    def forget(self, actor_id: str) -> None:
        """Free the place of an engine that ended."""
        self._ranks.pop(actor_id, None)

    def rank_of(self, actor_id: str) -> int:
        """Return the learner rank on the GPU of this engine."""
        return self._ranks[actor_id]

    def _options(self, index: int) -> Mapping[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}


def _find_adapter_rank(config: RunConfig) -> int | None:
    """Return the rank of pushed adapters; None where full weights are pushed."""
    lora = config.learner.lora
    return None if lora is None or config.weights.transport != "adapter" else lora_rank(lora)


async def answer(reference: Any) -> Any:
    """Await a Ray reference, as a coroutine."""
    return await reference


class RolloutFleet:
    """Owns the rollout actors: starts them, watches their loops, replaces those that die.

    `on_loss(actor_id)` runs before a replacement starts (claims return to pending, the publisher
    removes the member); `on_join(actor_id, receive)` brings the current weights to the new one
    before its first claim.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        model_path: str,
        replay: Any,
        on_loss: Callable[[str], Awaitable[None]],
        on_join: Callable[
            [str, Callable[[WeightUpdate], Awaitable[WeightReceipt]]], Awaitable[None]
        ],
        colocation: Colocation | None = None,
    ) -> None:
        """With `colocation`, engines share the GPUs of learner ranks."""
        self._colocation = colocation
        self._config = config
        self._adapter_rank = _find_adapter_rank(config)
        self._model_path = model_path
        self._replay = replay
        self._on_loss = on_loss
        self._on_join = on_join
        self._num_started = 0
        self.num_restarts = self._num_failures = 0
        self._not_at_fault: set[str] = set()
        self._is_stopping = False
        self.actors: dict[str, Any] = {}

    async def start(self) -> None:
        """Start all actors at once. Raises `EngineError` with the cause of the first failure."""
        started = await asyncio.gather(
            *(self._launch() for _ in range(self._config.actors.num_actors)), return_exceptions=True
        )
        failures = [s for s in started if isinstance(s, BaseException)]
        if failures:
            raise failures[0]

    def play(self, tasks: asyncio.TaskGroup) -> None:
        """Let every actor play, kept alive by a task; an unrecoverable failure ends the task group."""
        for actor_id in list(self.actors):
            tasks.create_task(self._keep_alive(actor_id))

    def fail_push(self, actor_id: str, error: BaseException) -> None:
        """Kill an actor whose engine failed a push, so that it is replaced."""
        logger.warning("%s failed a weight push and will be replaced: %s", actor_id, error)
        if isinstance(error, PushBroken):
            self._not_at_fault.add(actor_id)
        if actor := self.actors.get(actor_id):
            ray.kill(actor)

    def receiver(self, actor_id: str) -> Callable[[WeightUpdate], Awaitable[WeightReceipt]]:
        actor = self.actors[actor_id]

        async def receive(update: WeightUpdate) -> WeightReceipt:
            return await actor.receive.remote(update)

        return receive

    def evaluators(self) -> dict[str, EvaluateCall]:
        """Return the evaluate calls of the actors that are alive."""

        def call(actor: Any) -> EvaluateCall:
            async def evaluate(
                prompts: list[Prompt], sampling: SamplingSection
            ) -> list[Trajectory]:
                return await actor.evaluate.remote(prompts, sampling)

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
                    "%s did not answer for %g s: its activity and spans of this step are lost",
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
            if isinstance(outcome, RayTaskError):
                self.fail_push(actor_id, outcome)

    async def abort(self) -> None:
        """End every running episode, before a ledger without them is restored."""
        await asyncio.gather(
            *(answer(actor.abort.remote()) for actor in self.actors.values()),
            return_exceptions=True,
        )

    async def stop(self) -> None:
        """End every actor with its engine; those that do not end in time are killed."""
        self._is_stopping = True
        await asyncio.gather(*(self._stop(actor) for actor in self.actors.values()))
        self.actors.clear()

    async def _stop(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await actor.stop.remote()
        except (RayActorError, RayTaskError, TimeoutError) as error:
            logger.debug("an actor did not stop and was killed: %s", error)
        ray.kill(actor)

    async def _launch(self) -> str:
        actors, actor_id = self._config.actors, f"rollout-{self._num_started}"
        self._num_started += 1
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
        actor = rollout_actor.options(**options).remote(
            actor_id, self._config, self._model_path, self._replay, self._adapter_rank
        )
        try:
            async with asyncio.timeout(actors.start_timeout_s):
                pid, engine = await actor.start.remote()
        except TimeoutError as error:
            ray.kill(actor)
            raise EngineError(
                f"{actor_id}: the engine did not start within"
                f" {actors.start_timeout_s} s (actors.start_timeout_s)"
            ) from error
        except (RayTaskError, RayActorError) as error:
            ray.kill(actor)
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise EngineError(f"{actor_id}: the engine did not start: {cause}") from error
        logger.info("%s with %s runs as process %d", actor_id, engine, pid)
        self.actors[actor_id] = actor
        return actor_id

    async def _keep_alive(self, actor_id: str) -> None:
        """Wait for the end of an actor's loop and replace the actor, until the fleet stops."""
        while True:
            try:
                await self.actors[actor_id].run.remote()
                cause: BaseException = RaylearnerError("its loop ended after a failed weight push")
            except (RayActorError, RayTaskError) as error:
                cause = error
            if self._is_stopping:
                return
            actor_id = await self._replace(actor_id, cause)

    async def _replace(self, actor_id: str, cause: BaseException) -> str:
        """Start replacements until one joins, and return its id.

        An actor that was blocked by another engine's failure does not count against the limit.
        """
        while True:
            self.num_restarts += 1
            self._num_failures += actor_id not in self._not_at_fault
            ray.kill(self.actors.pop(actor_id))
            if self._colocation is not None:
                self._colocation.forget(actor_id)
            await self._on_loss(actor_id)
            limit = self._config.actors.max_restarts
            if self._num_failures > limit:
                raise RaylearnerError(
                    f"{actor_id} died and actors.max_restarts={limit} is used up;"
                    f" last cause: {cause}"
                )
            logger.warning("%s died and is replaced: %s", actor_id, str(cause).splitlines()[0])
            actor_id = await self._launch()
            try:
                await self._on_join(actor_id, self.receiver(actor_id))
                return actor_id
            except (WeightTransferError, LearnerDied) as error:
                cause = error  # if the learner died, the controller rolls back meanwhile
