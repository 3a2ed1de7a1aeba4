"""The Ray shell around a rollout worker and its engine."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from raylearner.actors.engines.engine import Engine
from raylearner.actors.episode import EpisodeKit
from raylearner.actors.outbox import Outbox
from raylearner.actors.process import prepare
from raylearner.actors.proxy.agent import start_agent
from raylearner.actors.reward_actor import model_calls
from raylearner.actors.rollout_worker import RolloutActivity, RolloutWorker
from raylearner.cleanup import clean_up
from raylearner.config import schema
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.observability.spans import Span, Tracer
from raylearner.rewards.scorer import Scorer
from raylearner.tokenization.renderer import Renderer
from raylearner.types import (
    ClaimReply,
    Prompt,
    Sampling,
    Trajectory,
    WeightReceipt,
    WeightUpdate,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSections:
    """The parts of the configuration that a rollout actor needs."""

    engine: schema.EngineSection
    environment: schema.EnvironmentSection
    renderer: schema.RendererSection
    rewards: schema.RewardSection
    sampling: schema.SamplingSection
    max_concurrent_episodes: int
    run_name: str
    weight_transport: str
    seed: int
    should_trace: bool
    lora_rank: int | None = None
    """Of adapters that come by themselves."""


def sampling_from(section: schema.SamplingSection, renderer: Renderer) -> Sampling:
    """Sampling as engines take it: the section's numbers and the renderer's special tokens."""
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
    """One engine and its episodes. `start`, then `run` until `stop`; weights land by `receive`."""

    def __init__(
        self,
        actor_id: str,
        sections: RolloutSections,
        model_path: str,
        replay: Any,
    ) -> None:
        """`replay` is the handle of the replay actor, or None where nothing is kept."""
        prepare()
        self._actor_id = actor_id
        self._sections = sections
        self._model_path = model_path
        self._replay = replay
        self._tracer = Tracer(track=actor_id, is_enabled=sections.should_trace)
        self._engine: Engine | None = None
        self._worker: RolloutWorker | None = None

    def __repr__(self) -> str:
        return self._actor_id

    async def start(self) -> tuple[int, str]:
        """Starts the engine; returns this process's id and the engine's class.

        Raises `EngineError` with the cause.
        """
        sections = self._sections
        renderer = Renderer.from_pretrained(self._model_path, sections.renderer)
        self._renderer = renderer
        self._engine = self._make_engine(renderer)
        await self._engine.start()
        self._environments = EnvironmentFactory(
            sections.environment,
            check_image=renderer.check_image,
            reasoning_tags=sections.renderer.reasoning_tags,
        )
        self._agent = await start_agent(sections.environment)
        self._scorer = Scorer(
            sections.rewards, models=model_calls(sections.run_name, sections.rewards)
        )
        kit = EpisodeKit(
            engine=self._engine,
            renderer=renderer,
            scorer=self._scorer,
            make_environment=self._environments.make,
            tracer=self._tracer,
            agent=self._agent,
        )
        self._worker = RolloutWorker(
            actor_id=self._actor_id,
            kit=kit,
            sampling=sampling_from(sections.sampling, renderer),
            max_concurrent_episodes=sections.max_concurrent_episodes,
            claim=self._claim,
            outbox=Outbox(self._put),
            is_seeded=isinstance(sections.engine, schema.ScriptedEngine),
        )
        return os.getpid(), type(self._engine).__name__

    async def run(self) -> None:
        assert self._worker is not None, "start comes first"
        await self._worker.run()

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        assert self._engine is not None, "start comes first"
        assert self._worker is not None, "start comes first"
        try:
            with self._tracer.span("receive", version=update.policy_version):
                receipt = await self._engine.receive(update)
        except BaseException:
            self._worker.halt()
            raise
        if self._replay is not None:
            await self._replay.advance_engine.remote(self._actor_id, receipt.policy_version)
        return receipt

    async def sleep(self) -> None:
        """Until the next `receive`. Raises `EngineError`; the engine is of no use then."""
        assert self._engine is not None, "start comes first"
        assert self._worker is not None, "start comes first"
        try:
            with self._tracer.span("fall asleep"):
                await self._engine.sleep()
        except BaseException:
            self._worker.halt()
            raise

    async def evaluate(
        self, prompts: Sequence[Prompt], section: schema.SamplingSection
    ) -> list[Trajectory]:
        assert self._worker is not None, "start comes first"
        with self._tracer.span("evaluate"):
            return await self._worker.evaluate(prompts, sampling_from(section, self._renderer))

    async def drain(self) -> tuple[RolloutActivity, list[Span]]:
        """Activity and spans since the last call."""
        assert self._worker is not None, "start comes first"
        activity = replace(self._worker.drain_activity(), tools=self._environments.drain_metrics())
        return activity, self._tracer.drain()

    async def abort(self) -> None:
        """Ends running episodes; their claims are void, so nothing of them is reported."""
        assert self._engine is not None, "start comes first"
        await self._engine.abort()

    async def stop(self) -> None:
        """Ends `run` and the engine with its child processes."""
        steps: list[Callable[[], Awaitable[None]]] = []
        if self._worker is not None:
            self._worker.halt()
            if self._agent is not None:
                steps.append(self._agent.server.close)
            steps += [self._environments.close, self._scorer.close]
        if self._engine is not None:
            steps.append(self._engine.close)
        await clean_up(None, *steps)

    def _make_engine(self, renderer: Renderer) -> Engine:
        match self._sections.engine:
            case schema.VllmEngine() as config:
                from raylearner.actors.engines.vllm import VllmEngine

                return VllmEngine(
                    config,
                    model_path=self._model_path,
                    seed=self._sections.seed,
                    weight_transport=self._sections.weight_transport,
                    actor_id=self._actor_id,
                    lora_rank=self._sections.lora_rank,
                    max_images=self._sections.renderer.images.max_images,
                    num_banned=len(renderer.banned_token_ids),
                )
            case schema.TransformersEngine() as config:
                from raylearner.actors.engines.transformers import TransformersEngine

                return TransformersEngine(
                    config,
                    model_path=self._model_path,
                    seed=self._sections.seed,
                    weight_transport=self._sections.weight_transport,
                )
            case schema.ScriptedEngine() as config:
                from raylearner.actors.engines.scripted import ScriptedEngine

                return ScriptedEngine(config, end_token_ids=renderer.end_token_ids)

    async def _claim(
        self, actor_id: str, engine_version: int, max_claims: int, timeout_s: float
    ) -> ClaimReply:
        assert self._replay is not None, "an actor without replay only evaluates"
        return await self._replay.claim.remote(actor_id, engine_version, max_claims, timeout_s)

    async def _put(self, episodes: list[list[Trajectory]]) -> list[str]:
        assert self._replay is not None, "an actor without replay only evaluates"
        return await self._replay.put.remote(episodes)
