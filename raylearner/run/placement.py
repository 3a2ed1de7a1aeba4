"""Where a run's actors live: joins or starts Ray, checks supply, starts and replaces rollout actors."""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylearner import job_variables
from raylearner.actors.process import prepare, reach_nodes_directly
from raylearner.actors.rollout_actor import RolloutActor, RolloutSections
from raylearner.actors.rollout_worker import EvaluateCall, RolloutActivity
from raylearner.cleanup import clean_up_now
from raylearner.config import resources, variables
from raylearner.config.checks import notes
from raylearner.config.lora import lora_rank
from raylearner.config.schema import ActorsSection, ClusterSection, RunConfig, SamplingSection
from raylearner.config.section import number
from raylearner.errors import (
    ConfigError,
    EngineError,
    LearnerDied,
    PushBroken,
    RaylearnerError,
    StartError,
    WeightTransferError,
    summary,
)
from raylearner.network import check_reachable, refuse_bad_authentication
from raylearner.observability.spans import Span
from raylearner.run import machine
from raylearner.run.colocation import Colocation
from raylearner.types import Prompt, Trajectory, WeightReceipt, WeightUpdate

logger = logging.getLogger(__name__)

CALLS_BESIDE_EPISODES = 64
"""Concurrent calls an actor takes for weights, evaluation and reports."""
DRAIN_TIMEOUT_S = 20.0
"""Longest a step's report waits for an actor."""
STOP_TIMEOUT_S = 20.0
"""Longest an actor may take to end its engine before it is killed."""


def connect(config: ClusterSection) -> str:
    """Joins the cluster of `RAY_ADDRESS` or `cluster.address`, or starts a local one.

    Returns the `host:port` of its dashboard, empty where it has none. Raises `ConfigError` when the cluster cannot be reached.
    """
    refuse_bad_authentication()
    address = os.environ.get("RAY_ADDRESS") or config.address
    # What actors print stays in Ray's log files; what matters of it comes back as errors and metrics.
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if address:
        try:
            check_reachable(address)
            url = ray.init(address=address, **common).dashboard_url or ""
        except Exception as error:  # of many kinds, and all of them end here
            key = "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "cluster.address"
            raise ConfigError(
                f"{key} {address!r} cannot be joined: {summary(error)}; start it with"
                " `ray start --head`, set RAY_AUTH_MODE=token where it asks for a token (the default),"
                " or leave the address out for a local cluster"
            ) from None
        reach_nodes_directly()
        return url
    try:
        context = ray.init(
            address="local",
            num_cpus=config.num_cpus,
            object_store_memory=config.object_store_bytes,
            include_dashboard=config.dashboard,
            dashboard_host="127.0.0.1",
            _node_ip_address="127.0.0.1",
            **common,
        )
    except Exception as error:  # of many kinds, and all of them end here
        variable, folder = machine.ray_folder()
        raise StartError(
            f"Ray did not start: {summary(error)}; its logs are in"
            f" {folder}/ray/session_latest/logs ({variable}); `python -m raylearner doctor` looks at"
            " the machine"
        ) from None
    return context.dashboard_url or ""


def disconnect() -> None:
    """Leaves the cluster, and ends a local one. What fails here replaces no other failure."""
    clean_up_now(sys.exception(), ray.shutdown)


def resolve(config: RunConfig) -> RunConfig:
    """Every `auto` as what this cluster makes of it, said once in the log."""
    resolved = resources.resolve(config, num_gpus=ray.cluster_resources().get("GPU", 0.0))
    for decision in resolved.decisions:
        logger.info("%s", decision)
    for note in notes(resolved.config):
        logger.warning("%s", note)
    return resolved.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a run reserves, and the keys that say so."""

    cpus: float
    gpus: float
    num_actors: int
    num_ranks: int


def size(config: RunConfig, *, num_gpus: float, least_cpus: float = 0.0) -> Size:
    """Of a run alone on a cluster with so many GPUs."""
    config = resources.resolve(config, num_gpus=num_gpus).config
    return Size(
        cpus=max(config.cpus_needed, least_cpus),
        gpus=config.gpus_needed,
        num_actors=config.actors.num_actors,
        num_ranks=config.learner.num_ranks,
    )


def check_supply(config: RunConfig) -> None:
    """Raises `ConfigError` with demand and supply when the cluster cannot hold the run."""
    refuse_too_large(size(config, num_gpus=ray.cluster_resources().get("GPU", 0.0)))


def check_variables(config: RunConfig) -> None:
    """Raises `ConfigError` where machines of a cluster that was joined lack a variable that is named.

    A local cluster has those of this process.
    """
    named = dict(variables.named_variables(config))
    if not named or not (os.environ.get("RAY_ADDRESS") or config.cluster.address):
        return
    look: Any = _unset
    unset = set(ray.get(look.remote(list(named.values()))))
    problems = [
        f"{key}: the environment variable {name} is not set on the cluster's machines; submit the run"
        f" with {job_variables.OPTION} {name}, or set it where `ray start` runs"
        for key, name in named.items()
        if name in unset
    ]
    if problems:
        raise ConfigError("\n".join([*problems, "nothing was started."]))


@ray.remote(num_cpus=0)
def _unset(names: list[str]) -> list[str]:
    """Those that a worker's process does not have."""
    prepare()
    return [name for name in names if not os.environ.get(name)]


def refuse_too_large(size: Size, *, what: str = "") -> None:
    """Raises `ConfigError` where the whole cluster has less; `what` names the run."""
    supply = ray.cluster_resources()
    problems: list[str] = []
    for resource, needed, keys in (
        ("CPU", size.cpus, "actors.cpus_per_actor, learner.cpus_per_rank, reward models' cpus"),
        ("GPU", size.gpus, "actors.gpus_per_actor, learner.gpus_per_rank, reward models' gpus"),
    ):
        has = supply.get(resource, 0.0)
        if needed > has:
            problems.append(
                f"{what + ': ' if what else ''}{needed:g} {resource}s are needed"
                f" ({size.num_actors} rollout actors and {size.num_ranks} learner ranks), the"
                f" cluster has {has:g}; lower actors.num_actors, learner.num_ranks, {keys}, or add"
                " nodes"
            )
    if problems:
        raise ConfigError("\n".join([*problems, "nothing was started."]))


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
