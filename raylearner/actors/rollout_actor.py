"""The Ray actor around a rollout worker and its engine."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any

import ray

from raylearner import leftovers
from raylearner.actors.engines import vllm_process
from raylearner.actors.engines.engine import Engine
from raylearner.actors.episode import EpisodeKit
from raylearner.actors.outbox import Episode
from raylearner.actors.process import prepare_process
from raylearner.actors.proxy.agent import start_agent
from raylearner.actors.reward_actor import model_calls
from raylearner.actors.rollout_worker import RolloutActivity, RolloutWorker
from raylearner.config import schema
from raylearner.config.model_files import local_directory
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.observability.phases import Phases
from raylearner.observability.spans import Span, Tracer
from raylearner.rewards.scorer import Scorer
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Claim, ClaimReply, Sampling, Trajectory
from raylearner.weights.transports import transport_of
from raylearner.weights.update import WeightReceipt, WeightUpdate


def make_sampling(section: schema.SamplingSection, renderer: Renderer) -> Sampling:
    """Return engine sampling parameters from the section and the renderer's special tokens."""
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        max_tokens=section.max_turn_tokens,
        regex=section.regex,
        extra_arguments=section.extra_arguments,
        stop_token_ids=renderer.end_token_ids,
        banned_token_ids=renderer.banned_token_ids,
    )


@ray.remote
class RolloutActor:
    """One engine and its episodes.

    The fleet calls `start`, then `run`, which plays until `stop`.
    """

    def __init__(
        self,
        actor_id: str,
        config: schema.RunConfig,
        model_path: str,
        replay: Any,
        adapter_rank: int | None,
    ) -> None:
        """`replay` is the handle of the replay actor; None for an actor that only evaluates.

        `adapter_rank` is the rank of pushed adapters; None where full weights are pushed.
        """
        prepare_process()
        self._actor_id = actor_id
        self._config = config
        self._model_path = model_path
        self._replay = replay
        self._adapter_rank = adapter_rank
        self._tracer = Tracer(track=actor_id, is_enabled=config.recorded.trace)
        self._phases = Phases(self._tracer, "starting the process")
        self._importing, self._has_libraries = asyncio.Lock(), False

    def __repr__(self) -> str:
        return self._actor_id

    async def node(self) -> str:
        """Return the id of this process's node, where resources are reserved for it."""
        return ray.get_runtime_context().get_node_id()

    async def load_libraries(self) -> None:
        """Import the libraries of renderer and engine, which may take longer than loading the model."""
        async with self._importing:  # not in two threads: modules import each other in circles
            if not self._has_libraries:
                self._phases.enter("importing libraries")
                await asyncio.to_thread(_import_libraries, self._config)
                self._phases.enter("waiting for the model")
            self._has_libraries = True

    async def start(self) -> tuple[int, str]:
        """Start the engine; return this process's id and the engine's class.

        Raises `EngineError` with the cause.
        """
        config = self._config
        await self.load_libraries()
        self._phases.enter("loading the tokenizer")
        async with AsyncExitStack() as resources:
            folder = await asyncio.to_thread(local_directory, self._model_path)
            self._renderer = await asyncio.to_thread(
                Renderer.from_pretrained, str(folder), config.renderer
            )
            # An actor that was killed on this node left its engine's memory.
            await asyncio.to_thread(leftovers.sweep, config.weights.folder)
            self._phases.enter("loading the model")
            self._engine = await self._start_engine(str(folder))
            resources.push_async_callback(self._engine.close)
            scorer = Scorer(config.rewards, models=model_calls(config.run.name, config.rewards))
            resources.push_async_callback(scorer.close)
            self._environments = EnvironmentFactory(
                config.environment,
                check_image=self._renderer.check_image,
                reasoning_tags=config.renderer.reasoning_tags,
            )
            resources.push_async_callback(self._environments.close)
            agent = await start_agent(config.environment)
            if agent is not None:
                resources.push_async_callback(agent.close)
            kit = EpisodeKit(
                engine=self._engine,
                renderer=self._renderer,
                scorer=scorer,
                make_environment=self._environments.make,
                tracer=self._tracer,
                agent=agent,
            )
            self._worker = RolloutWorker(
                actor_id=self._actor_id,
                kit=kit,
                sampling=make_sampling(config.sampling, self._renderer),
                max_concurrent_episodes=config.actors.max_concurrent_episodes,
                claim=self._claim,
                exchange=self._exchange,
                is_seeded=isinstance(config.actors.engine, schema.ScriptedEngine),
            )
            resources.callback(self._worker.halt)
            self._resources = resources.pop_all()
        self._phases.end()
        return os.getpid(), type(self._engine).__name__

    async def run(self) -> None:
        await self._worker.run()

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        try:
            with self._tracer.span("receive", version=update.policy_version):
                receipt = await self._engine.receive(update)
        except BaseException:
            self._worker.halt()
            raise
        if self._replay is not None:  # not awaited: the engine has its weights
            self._replay.advance_engine.remote(self._actor_id, receipt.policy_version)
        return receipt

    async def use_replay(self, replay: Any) -> None:
        """Claim from this replay actor from now on, since the one before died."""
        self._replay = replay

    async def sleep(self) -> None:
        """Sleep until the next `receive`. Raises `EngineError`; the engine has then failed."""
        try:
            with self._tracer.span("sleep"):
                await self._engine.sleep()
        except BaseException:
            self._worker.halt()
            raise

    async def evaluate(
        self, claims: Sequence[Claim], section: schema.SamplingSection, time_limit_s: float
    ) -> list[Trajectory]:
        with self._tracer.span("evaluate"):
            return await self._worker.evaluate(
                claims, make_sampling(section, self._renderer), time_limit_s
            )

    async def phase(self) -> str:
        """Return what the actor is doing while it starts."""
        return self._phases.current

    async def ping(self) -> None:
        """Answer."""

    async def drain(self) -> tuple[RolloutActivity, list[Span]]:
        """Return activity and spans since the last call."""
        activity = replace(self._worker.drain_activity(), tools=self._environments.drain_metrics())
        return activity, self._tracer.drain()

    async def abort(self) -> None:
        """End running episodes and evaluations; their claims are void, so they are not reported."""
        self._worker.end_evaluations()
        await self._engine.abort()

    async def halt(self) -> None:
        """End `run`, which claims nothing more; running episodes are cancelled and not reported."""
        self._worker.halt()

    async def stop(self) -> None:
        """End `run` and the engine with its child processes."""
        await self._resources.aclose()

    async def _start_engine(self, folder: str) -> Engine:
        config, renderer = self._config, self._renderer
        match config.actors.engine:
            case schema.VllmEngine() as section:
                from raylearner.actors.engines.vllm import VllmEngine

                return await VllmEngine.start(
                    section,
                    model_path=folder,
                    seed=config.run.seed,
                    weight_transport=config.weights.transport,
                    actor_id=self._actor_id,
                    lora_rank=self._adapter_rank,
                    max_images=config.renderer.images.max_images,
                    num_banned=len(renderer.banned_token_ids),
                    report=self._phases.enter,
                )
            case schema.TransformersEngine() as section:
                from raylearner.actors.engines.transformers import TransformersEngine

                return await TransformersEngine.start(
                    section,
                    model_path=folder,
                    seed=config.run.seed,
                    weight_transport=config.weights.transport,
                )
            case schema.ScriptedEngine() as section:
                from raylearner.actors.engines.scripted import ScriptedEngine, load_script

                return ScriptedEngine(load_script(section), end_token_ids=renderer.end_token_ids)

    async def _claim(
        self, actor_id: str, engine_version: int, max_claims: int, timeout_s: float
    ) -> ClaimReply:
        return await self._replay.claim.remote(actor_id, engine_version, max_claims, timeout_s)

    async def _exchange(
        self, actor_id: str, engine_version: int, episodes: list[Episode], max_claims: int
    ) -> tuple[list[str], ClaimReply]:
        return await self._replay.exchange.remote(actor_id, engine_version, episodes, max_claims)


def _import_libraries(config: schema.RunConfig) -> None:
    """Import what the start of the engine needs."""
    match config.actors.engine:
        case schema.VllmEngine() as section:
            shares_memory = transport_of(config.weights.transport).shares_memory
            vllm_process.load_libraries(section, shares_memory=shares_memory)
        case schema.TransformersEngine():
            import_module("raylearner.actors.engines.transformers_model")
        case schema.ScriptedEngine():
            pass
