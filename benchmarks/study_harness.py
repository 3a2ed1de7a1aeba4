"""One training run in one process: learner, replay and episodes of the product, no Ray.

The sampler is a transformers engine that holds, at every step, exactly the weights of `lag` policy
versions ago, verified as in production; with `cache`, the later versions reach it while it samples. Runs are
seeded: the same seed gives the same run.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from raylearner.actors.engines.transformers import TransformersEngine
from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.actors.rollout_actor import make_sampling
from raylearner.config import schema
from raylearner.config.loader import load
from raylearner.data import load_prompts
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.learner.batch.pack import pack
from raylearner.learner.learner import Learner
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.learner.weight_writer import probe_logprobs, read_vocabulary
from raylearner.observability.spans import Tracer
from raylearner.replay.buffer import ReplayBuffer
from raylearner.rewards.scorer import Scorer
from raylearner.tiny.demonstrations import prepare_tiny_model
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Claim, Prompt, Trajectory, TrajectoryGroup
from raylearner.weights.probe import probe_tokens
from raylearner.weights.transports import discard_files
from raylearner.weights.transports.shared_files import write_weights
from raylearner.weights.update import Probe, WeightUpdate

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"

HARNESS = (
    "actors.engine={kind: transformers, max_model_tokens: 256, max_sequences: 64}",
    "learner.max_tokens_per_micro_batch=8192",
)
"""What every run changes in the quickstart."""

VERIFY_TOLERANCE = 1e-4
"""Largest difference between learner and sampler in the log-probability of a probe token."""

EVALUATE_EVERY, NUM_LATE = 10, 3
"""The last three evaluations, ten steps apart, tell a policy that swings from one that holds."""

DECODES_BETWEEN_PUSHES = 6
"""Number of tokens that running requests sample between two pushes that land in them."""

SAMPLER = "sampler"
"""Name of the only actor."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: the quickstart with overrides, sampled `lag` versions behind."""

    study: str
    name: str
    overrides: tuple[str, ...]
    lag: int = 0
    seed: int = 0
    cache: Literal["recompute", "keep"] | None = None
    """What becomes of the sampler's caches; None: it holds one version while it samples."""

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.name, self.lag, self.seed)

    def config(self) -> schema.RunConfig:
        own = (f"run.seed={self.seed}", f"replay.max_staleness={self.lag}")
        return load([str(QUICKSTART)], [*HARNESS, *self.overrides, *own])


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one learner step trained on, and what it did."""

    groups: list[TrajectoryGroup]
    output: StepOutput

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def reward(self) -> float:
        return statistics.fmean(t.reward or 0.0 for t in self.trajectories)


class Harness:
    """Owns a learner, its replay and a sampler. `step` trains once, `evaluate` is greedy."""

    def __init__(
        self,
        config: schema.RunConfig,
        *,
        lag: int,
        model_path: Path,
        cache: Literal["recompute", "keep"] | None = None,
    ) -> None:
        torch.set_num_threads(1)
        assert isinstance(config.actors.engine, schema.TransformersEngine)
        self._config = config
        self._stack = AsyncExitStack()
        self.learner = Learner(
            LearnerSpec(
                learner=config.learner,
                model_path=str(model_path),
                run=config.run,
                temperature=config.sampling.temperature,
            )
        )
        self._model_path = str(model_path)
        self._renderer = Renderer.from_pretrained(str(model_path), config.renderer)
        self._buffer = ReplayBuffer(config.replay, load_prompts(config.data.train), config.run.seed)
        self._snapshots: deque[WeightUpdate] = deque()
        self._num_snapshots = lag + 1
        self._cache = cache
        self._decoded = asyncio.Event()
        self.num_recomputed = 0
        """Tokens that were computed again because of pushes, over the whole run."""

    async def __aenter__(self) -> "Harness":
        folder = tempfile.TemporaryDirectory(dir=self._config.weights.folder)
        self._folder = self._stack.enter_context(folder)
        config = self._config
        self.engine = await TransformersEngine.start(
            config.actors.engine, model_path=self._model_path, seed=config.run.seed
        )
        self._stack.push_async_callback(self.engine.close)
        self._count_decodes()
        self._kit = EpisodeKit(
            engine=self.engine,
            renderer=self._renderer,
            scorer=Scorer(config.rewards),
            make_environment=EnvironmentFactory(config.environment).make,
            tracer=Tracer(track=SAMPLER, is_enabled=False),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def step(self) -> Step:
        """Samples with the weights of `lag` versions ago, or the first while there are fewer."""
        self._snapshot()
        await self._hold(self._snapshots[0])
        section, version = self._config.replay, self.learner.policy_version
        while (take := self._buffer.take(section.groups_per_step, version)) is None:
            wanted = section.groups_per_step * (section.group_size + section.extra)
            reply = self._buffer.claim(SAMPLER, self.engine.policy_version, wanted)
            assert reply.claims, self._buffer.describe()
            sampling = make_sampling(self._config.sampling, self._renderer)
            pushing = asyncio.create_task(self._push_meanwhile())
            for segments in await asyncio.gather(
                *(
                    play_episode(self._kit, claim, replace(sampling, seed=claim.seed))
                    for claim in reply.claims
                )
            ):
                self._buffer.put(segments)
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            if not pushing.cancelled():
                pushing.result()
        (batch,) = pack(
            take.groups,
            policy_version=version,
            num_ranks=1,
            max_tokens_per_micro_batch=self._config.learner.token_budget,
            num_mini_batches=self._config.learner.num_mini_batches,
        )
        output = self.learner.step(batch)
        self._buffer.commit([group.group_id for group in take.groups], output.policy_version)
        return Step(groups=take.groups, output=output)

    async def evaluate(self, prompts: Sequence[Prompt]) -> float:
        """Mean reward of the newest policy, as the configuration evaluates."""
        self._snapshot()
        await self._hold(self._snapshots[-1])
        assert self._config.evaluation is not None, "studies evaluate"
        sampling = make_sampling(self._config.evaluation.sampling, self._renderer)
        version = self.learner.policy_version
        claims = [
            Claim(
                group_id=index,
                sample_index=0,
                attempt=0,
                prompt=prompt,
                policy_version=version,
                seed=index,
            )
            for index, prompt in enumerate(prompts)
        ]
        episodes = await asyncio.gather(*(play_episode(self._kit, c, sampling) for c in claims))
        played = [trajectory for segments in episodes for trajectory in segments]
        assert {t.min_policy_version for t in played} == {version}
        return statistics.fmean(trajectory.reward or 0.0 for trajectory in played)

    def _snapshot(self) -> None:
        """The learner's weights join the ring, if they are new; the oldest leaves a full one."""
        version = self.learner.policy_version
        if self._snapshots and self._snapshots[-1].policy_version == version:
            return
        vocab_size, special = read_vocabulary(self.learner.models.folder)
        token_ids = probe_tokens(
            seed=self._config.run.seed,
            policy_version=version,
            vocab_size=vocab_size,
            special_token_ids=special,
            num_tokens=self._config.weights.num_probe_tokens,
        )
        weights = self.learner.models.policy.named_weights(torch.float32)
        update = WeightUpdate(
            policy_version=version,
            transport="shared_files",
            payload=write_weights(weights, self._folder, version, torch.float32),
            probe=Probe(
                token_ids=token_ids,
                logprobs=tuple(map(tuple, probe_logprobs(self.learner.models.policy, token_ids))),
                tolerance=VERIFY_TOLERANCE,
            ),
        )
        self._snapshots.append(update)
        if len(self._snapshots) > self._num_snapshots:
            discard_files(self._snapshots.popleft().payload)

    async def _push_meanwhile(self) -> None:
        """Push the later versions, one after another, into requests that run."""
        if self._cache is None:
            return
        for update in [*self._snapshots][1:]:
            self._decoded.clear()
            await self._decoded.wait()
            keeping = replace(update, should_recompute=self._cache == "recompute")
            # A push that has begun ends, also after the last request.
            receipt = await asyncio.shield(self.engine.receive(keeping))
            self.num_recomputed += receipt.num_recomputed

    def _count_decodes(self) -> None:
        """Set the event after every few steps of the engine, in time for the next one to wait for a push."""
        model, loop = self.engine._model, asyncio.get_running_loop()
        step, numbers = model.step, itertools.count(1)

        def counted(rows: Any) -> Any:
            if next(numbers) % DECODES_BETWEEN_PUSHES == 0:
                loop.call_soon_threadsafe(self._decoded.set)
            return step(rows)

        model.step = counted

    async def _hold(self, update: WeightUpdate) -> None:
        if self.engine.policy_version != update.policy_version:
            await self.engine.receive(update)


def prepare_model(config: schema.RunConfig, cache: Path) -> Path:
    """The warm-started model of a configuration, made once; runs of all seeds share it."""
    assert isinstance(config.model, schema.TinyModel)
    parts = (config.model, config.renderer, config.environment, *config.data.train)
    text = json.dumps([part.model_dump(mode="json") for part in parts], sort_keys=True)
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        prompts = load_prompts(config.data.train)
        for report in prepare_tiny_model(
            config.model, config.renderer, config.environment, prompts, str(folder), 0
        ):
            log.info("%s: %s", folder.name, report)
    return folder


async def train(
    run: Run, *, cache: Path, on_step: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """Plays a whole run; returns its record."""
    config = run.config()
    assert config.data.evaluation is not None
    model_path = await asyncio.to_thread(
        prepare_model, config, cache
    )  # which runs a loop of its own
    held_out = load_prompts(config.data.evaluation)[: config.evaluation.num_prompts]
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    rewards: list[float] = []
    entropies: list[float] = []
    gaps: list[float] = []
    versions: list[float] = []
    evaluations: dict[int, float] = {}
    async with Harness(config, lag=run.lag, model_path=model_path, cache=run.cache) as harness:
        evaluations[0] = round(await harness.evaluate(held_out), 4)
        for number in range(1, config.run.num_steps + 1):
            step = await harness.step()
            on_step(step)
            rewards.append(round(step.reward, 4))
            entropies.append(round(step.output.metrics.get("learner/entropy", float("nan")), 4))
            gaps.append(step.output.metrics.get("learner/on_policy_gap/mean", float("nan")))
            versions.append(statistics.fmean(map(_num_versions, step.trajectories)))
            left = config.run.num_steps - number
            if left % EVALUATE_EVERY == 0 and left < NUM_LATE * EVALUATE_EVERY:
                evaluations[number] = round(await harness.evaluate(held_out), 4)
    caches = {
        "cache": run.cache,
        "gap": [float(f"{gap:.3g}") for gap in gaps],
        "versions": round(statistics.fmean(versions), 2),
        "recomputed_tokens": harness.num_recomputed,
    }
    return {
        "study": run.study,
        "name": run.name,
        "lag": run.lag,
        "seed": run.seed,
        "initial_accuracy": evaluations[0],
        "accuracy": evaluations[config.run.num_steps],
        "late_accuracy": round(statistics.fmean(list(evaluations.values())[1:]), 4),
        "num_steps": config.run.num_steps,
        "seconds": round(time.monotonic() - started_s, 1),
        "cpu_s": round(time.process_time() - started_cpu_s, 1),
        "reward": rewards,
        "entropy": entropies,
        "overrides": list(run.overrides),
        **(caches if run.cache is not None else {}),
    }


def _num_versions(trajectory: Trajectory) -> int:
    """Number of policy versions that sampled a trajectory."""
    return len(set(trajectory.policy_versions[trajectory.loss_mask].tolist()))
