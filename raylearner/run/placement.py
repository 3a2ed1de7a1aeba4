"""Where a run's actors live: rollout actors are started, watched and replaced, on GPUs of their own or
beside learner ranks."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylearner.actors.rollout_actor import RolloutActor, RolloutSections
from raylearner.actors.rollout_worker import EvaluateCall, RolloutActivity
from raylearner.config.learner import lora_rank
from raylearner.config.schema import ActorsSection, RunConfig, SamplingSection
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
from raylearner.types import Prompt, Trajectory, WeightReceipt, WeightUpdate

logger = logging.getLogger(__name__)

CALLS_BESIDE_EPISODES = 64
"""Concurrent calls an actor takes for weights, evaluation and reports."""
DRAIN_TIMEOUT_S = 20.0
"""Longest a step's report waits for an actor."""
STOP_TIMEOUT_S = 20.0
"""Longest an actor may take to end its engine before it is killed."""
RESERVE_TIMEOUT_S = 60.0
"""Longest wait for the placement group of learner ranks and engines."""


class Colocation:
    """Owns the placement group; promises that an engine has the GPU of the rank it is dealt to."""

    def __init__(self, config: RunConfig) -> None:
        learner, actors = config.learner, config.actors
        self._name = f"{config.run.name}/colocated"
        self._num_bundles = learner.num_ranks
        self._engines_per_bundle = config.engines_per_rank
        self._bundle = {
            "GPU": 1.0,
            "CPU": learner.cpus_per_rank + self._engines_per_bundle * actors.cpus_per_actor,
        }
        self._group: Any = None
        self._ranks: dict[str, int] = {}

    async def reserve(self) -> None:
        """Raises `ConfigError` where the cluster does not have so many GPUs with CPUs beside them."""
        bundle = {resource: number for resource, number in self._bundle.items() if number}
        self._group = placement_group([bundle] * self._num_bundles, "PACK", name=self._name)
        if not await asyncio.to_thread(self._group.wait, RESERVE_TIMEOUT_S):
            self.release()
            raise ConfigError(
                f"weights.transport: 'ipc' puts a learner rank and {self._engines_per_bundle} engines "
                f"on each of {self._num_bundles} GPUs, and within {RESERVE_TIMEOUT_S:g} s the cluster "
                f"had no {self._num_bundles} x {bundle} to spare on its nodes; lower "
                "actors.num_actors, learner.num_ranks, actors.cpus_per_actor or learner.cpus_per_rank"
            )

    def release(self) -> None:
        """Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def rank_options(self) -> list[Mapping[str, Any]]:
        """Actor options of every learner rank."""
        return [self._options(index) for index in range(self._num_bundles)]

    def engine_options(self, actor_id: str) -> Mapping[str, Any]:
        """Actor options of an engine, in the bundle with the fewest."""
        taken = Counter(self._ranks.values())
        self._ranks[actor_id] = rank = min(range(self._num_bundles), key=lambda i: (taken[i], i))
        return self._options(rank)

    def forget(self, actor_id: str) -> None:
        """An engine that is gone; another may take its place."""
        self._ranks.pop(actor_id, None)

    def rank_of(self, actor_id: str) -> int:
        """The learner rank on the GPU of this engine."""
        return self._ranks[actor_id]

    def _options(self, index: int) -> Mapping[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}


def rollout_sections(config: RunConfig) -> RolloutSections:
    """What of a resolved configuration every rollout actor gets."""
    lora, transport = config.learner.lora, config.weights.transport
    return RolloutSections(
        engine=config.actors.engine,
        environment=config.environment,
        renderer=config.renderer,
        rewards=config.rewards,
        sampling=config.sampling,
        max_concurrent_episodes=config.actors.max_concurrent_episodes,
        run_name=config.run.name,
        weight_transport=transport,
        lora_rank=None if lora is None or transport != "adapter" else lora_rank(lora),
        seed=config.run.seed,
        should_trace=config.observability.trace,
    )


async def answer(reference: Any) -> Any:
    """A Ray reference as a coroutine."""
    return await reference


class RolloutFleet:
    """Owns the rollout actors: starts them, watches their loops, replaces those that die.

    `on_loss(actor_id)` runs before a replacement starts (claims return to pending, the publisher
    forgets the member); `on_join(actor_id, receive)` brings the current weights to the new one
    before its first claim.
    """

    def __init__(
        self,
        *,
        config: ActorsSection,
        sections: RolloutSections,
        model_path: str,
        replay: Any,
        on_loss: Callable[[str], Awaitable[None]],
        on_join: Callable[
            [str, Callable[[WeightUpdate], Awaitable[WeightReceipt]]], Awaitable[None]
        ],
        colocation: Colocation | None = None,
    ) -> None:
        """With `colocation` engines go where it says, otherwise wherever there is room."""
        self._colocation = colocation
        self._config = config
        self._sections = sections
        self._model_path = model_path
        self._replay = replay
        self._on_loss = on_loss
        self._on_join = on_join
        self._num_started = 0
        self.num_restarts = self._num_faults = 0
        self._innocent: set[str] = set()
        self._is_stopping = False
        self.actors: dict[str, Any] = {}

    async def start(self) -> None:
        """Starts all actors at once. Raises `EngineError` with the cause of the first failure."""
        started = await asyncio.gather(
            *(self._launch() for _ in range(self._config.num_actors)), return_exceptions=True
        )
        failures = [s for s in started if isinstance(s, BaseException)]
        if failures:
            raise failures[0]

    def play(self, tasks: asyncio.TaskGroup) -> None:
        """Lets every actor play, watched by `tasks`: what cannot be mended ends the task group."""
        self._tasks = tasks
        for actor_id in list(self.actors):
            tasks.create_task(self._watch(actor_id))

    def condemn(self, actor_id: str, error: BaseException) -> None:
        """Kills an actor whose engine failed a push; its watcher replaces it."""
        logger.warning("%s is condemned and will be replaced: %s", actor_id, error)
        if isinstance(error, PushBroken):
            self._innocent.add(actor_id)
        if actor := self.actors.get(actor_id):
            ray.kill(actor)

    def receiver(self, actor_id: str) -> Callable[[WeightUpdate], Awaitable[WeightReceipt]]:
        actor = self.actors[actor_id]

        async def receive(update: WeightUpdate) -> WeightReceipt:
            return await actor.receive.remote(update)

        return receive

    def evaluators(self) -> dict[str, EvaluateCall]:
        """The evaluate calls of the actors alive now."""

        def call(actor: Any) -> EvaluateCall:
            async def evaluate(
                prompts: list[Prompt], sampling: SamplingSection
            ) -> list[Trajectory]:
                return await actor.evaluate.remote(prompts, sampling)

            return evaluate

        return {actor_id: call(actor) for actor_id, actor in self.actors.items()}

    async def drain(self) -> tuple[list[RolloutActivity], list[Span]]:
        """Activity and spans since the last call, of every actor that answers in time."""
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
        """Puts every engine to sleep until its next weights; what cannot is condemned."""
        actors = dict(self.actors)
        outcomes = await asyncio.gather(
            *(answer(actor.sleep.remote()) for actor in actors.values()), return_exceptions=True
        )
        for actor_id, outcome in zip(actors, outcomes, strict=True):
            # Of an actor that died, its watcher knows already.
            if isinstance(outcome, RayTaskError):
                self.condemn(actor_id, outcome)

    async def abort(self) -> None:
        """Ends every running episode: the ledger that is restored next knows nothing of them."""
        await asyncio.gather(
            *(answer(actor.abort.remote()) for actor in self.actors.values()),
            return_exceptions=True,
        )

    async def stop(self) -> None:
        """Ends every actor with its engine; what does not end in time is killed."""
        self._is_stopping = True
        await asyncio.gather(*(self._stop(actor) for actor in self.actors.values()))
        self.actors.clear()

    async def _stop(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await actor.stop.remote()
        except (RayActorError, RayTaskError, TimeoutError) as error:
            logger.debug("an actor did not stop by itself: %s", error)
        ray.kill(actor)

    async def _launch(self) -> str:
        actor_id = f"rollout-{self._num_started}"
        self._num_started += 1
        options: dict[str, Any] = {
            "name": f"{self._sections.run_name}/{actor_id}",
            "num_cpus": self._config.cpus_per_actor,
            "num_gpus": number(self._config.gpus_per_actor),
            "max_concurrency": 2 * self._config.max_concurrent_episodes + CALLS_BESIDE_EPISODES,
            "scheduling_strategy": "SPREAD",
        }
        if self._colocation is not None:
            options |= self._colocation.engine_options(actor_id)
        rollout_actor: Any = RolloutActor
        actor = rollout_actor.options(**options).remote(
            actor_id, self._sections, self._model_path, self._replay
        )
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                pid, engine = await actor.start.remote()
        except TimeoutError as error:
            ray.kill(actor)
            raise EngineError(
                f"{actor_id}: the engine did not start within"
                f" {self._config.start_timeout_s} s (actors.start_timeout_s)"
            ) from error
        except (RayTaskError, RayActorError) as error:
            ray.kill(actor)
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise EngineError(f"{actor_id}: the engine did not start: {cause}") from error
        logger.info("%s with %s runs as process %d", actor_id, engine, pid)
        self.actors[actor_id] = actor
        return actor_id

    async def _watch(self, actor_id: str) -> None:
        try:
            await self.actors[actor_id].run.remote()
            if self._is_stopping:
                return
            cause: BaseException = RaylearnerError("its loop ended after a failed weight push")
        except (RayActorError, RayTaskError) as error:
            if self._is_stopping:
                return
            cause = error
        await self._replace(actor_id, cause)

    async def _replace(self, actor_id: str, cause: BaseException) -> None:
        """Until one joins; whoever was left hanging by others is not held against the limit."""
        while True:
            self.num_restarts += 1
            self._num_faults += actor_id not in self._innocent
            ray.kill(self.actors.pop(actor_id))
            if self._colocation is not None:
                self._colocation.forget(actor_id)
            await self._on_loss(actor_id)
            if self._num_faults > self._config.max_restarts:
                raise RaylearnerError(
                    f"{actor_id} died and actors.max_restarts={self._config.max_restarts} is used up;"
                    f" last cause: {cause}"
                )
            logger.warning("%s died and is replaced: %s", actor_id, str(cause).splitlines()[0])
            actor_id = await self._launch()
            try:
                await self._on_join(actor_id, self.receiver(actor_id))
            except (WeightTransferError, LearnerDied) as error:
                # Of a learner that died the controller hears by itself, and rolls back meanwhile.
                cause = error
                continue
            break
        self._tasks.create_task(self._watch(actor_id))
