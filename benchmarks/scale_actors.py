"""Simulated rollout actors, many in a process: real workers and outboxes, episodes that sleep."""

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from raylearner.actors.episode import EpisodeKit
from raylearner.actors.outbox import Episode
from raylearner.actors.rollout_worker import RolloutWorker
from raylearner.observability.spans import Tracer
from raylearner.types import (
    Claim,
    ClaimReply,
    CompletionStop,
    Sampling,
    StopReason,
    Trajectory,
    Turn,
)
from raylearner.weights.update import Probe, WeightReceipt, WeightUpdate

NUM_VARIANTS = 64
"""Different episodes of a process, drawn once: a simulated episode must cost less than storing it."""
NUM_TENSORS = 291
"""Tensors of Llama-3.1-8B, each with a checksum in an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Distribution of episodes."""

    min_tokens: int = 1024
    max_tokens: int = 8192
    """Lengths are log-uniform between the two, prompt and observations included; half are sampled."""
    num_turns: int = 4
    token_s: float = 0.008
    """Time of a sampled token: 31,000 tokens/s at 256 requests (2.3 B, CUDA graphs, one H200)."""
    tool_s: float = 0.36
    """Median time of a tool call, that of the sandbox in docs/benchmarks.md; log-normal, sigma 1."""
    num_images: int = 0
    image_bytes: int = 150_000
    num_distinct_images: int = 200


PROFILES = {
    "text": Profile(),
    "short": Profile(min_tokens=64, max_tokens=1024, num_turns=1),
    "images": Profile(num_images=2),
}


@dataclass(slots=True, kw_only=True)
class Drained:
    """Counts and latencies since the last drain."""

    num_stored: int = 0
    num_tokens: int = 0
    num_claim_calls: int = 0
    put_s: list[float] = field(default_factory=list[float])
    claim_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The body of one episode without its claim, and its relative duration."""

    arrays: dict[str, Any]
    turns: tuple[Turn, ...]
    images: tuple[bytes, ...]
    seconds: float


def make_variants(profile: Profile, seed: int) -> list[Variant]:
    """Draw episodes. The text of turns has four characters per token."""
    rng = np.random.default_rng(seed)
    images = [
        b"\x89PNG\r\n\x1a\n" + rng.bytes(profile.image_bytes)
        for _ in range(profile.num_distinct_images)
    ]
    return [_make_variant(profile, images, rng) for _ in range(NUM_VARIANTS)]


def _make_variant(profile: Profile, images: list[bytes], rng: np.random.Generator) -> Variant:
    bounds = np.log([profile.min_tokens, profile.max_tokens])
    num_tokens = int(np.exp(rng.uniform(*bounds)))
    per_turn = num_tokens // (2 * profile.num_turns)
    mask = np.arange(num_tokens) // per_turn % 2 == 1
    turns = tuple(
        Turn(
            start=(2 * i + 1) * per_turn,
            end=(2 * i + 2) * per_turn,
            reply_end=min((2 * i + 3) * per_turn, num_tokens),
            text="word" * per_turn,
            reply="word" * per_turn,
            stop_reason=CompletionStop.END,
            min_policy_version=0,
            max_policy_version=0,
            number=i,
        )
        for i in range(profile.num_turns)
    )
    token_ids = rng.integers(10, 30_000, num_tokens).astype(np.int32)
    shown = tuple(images[i] for i in rng.choice(len(images), profile.num_images, replace=False))
    for i in range(profile.num_images):  # one placeholder each, among the prompt's tokens
        token_ids[2 * i + 1] = 0
    tools_s = profile.tool_s * rng.lognormal(0.0, 1.0, profile.num_turns - 1)
    return Variant(
        arrays={
            "token_ids": token_ids,
            "loss_mask": mask,
            "train_mask": mask,
            "behavior_logprobs": np.where(mask, -1.0, np.nan).astype(np.float32),
        },
        turns=turns,
        images=shown,
        seconds=profile.token_s * float(mask.sum()) + float(tools_s.sum()),
    )


def make_update(policy_version: int) -> WeightUpdate:
    """Return an update of the size of a real one: checksums and a probe, without weights."""
    return WeightUpdate(
        policy_version=policy_version,
        transport="stand_in",
        payload={
            "path": "/dev/shm/policy.safetensors",
            "checksums": {f"model.layers.{i}.weight": (i, 2 * i) for i in range(NUM_TENSORS)},
        },
        probe=Probe(
            token_ids=tuple(tuple(range(32)) for _ in range(8)),
            logprobs=tuple(tuple(-1.0 for _ in range(31)) for _ in range(8)),
            tolerance=0.1,
        ),
    )


class SimulatedEngine:
    """An engine that only holds a version."""

    def __init__(self) -> None:
        self.policy_version = 0

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""


class SimulatedWorker(RolloutWorker):
    """A rollout worker whose episodes sleep for a drawn time; everything else is the product's."""

    def __init__(
        self, host: "Host", actor_id: str, engine: SimulatedEngine, num_slots: int
    ) -> None:
        stub: Any = engine
        kit = EpisodeKit(
            engine=stub,
            renderer=stub,
            scorer=stub,
            make_environment=stub,
            tracer=Tracer(actor_id, is_enabled=False),
        )
        super().__init__(
            actor_id=actor_id,
            kit=kit,
            sampling=Sampling(),
            max_concurrent_episodes=num_slots,
            claim=host.claim,
            exchange=host.exchange,
        )
        self._host = host

    async def _play(self, claim: Claim) -> None:
        variant = self._host.draw()
        await asyncio.sleep(variant.seconds * self._host.pace)
        outcome = await self._outbox.send([make_trajectory(variant, claim)])
        if outcome == "accepted":
            self._host.drained.num_stored += 1
            self._host.drained.num_tokens += len(variant.arrays["token_ids"])


def make_trajectory(variant: Variant, claim: Claim) -> Trajectory:
    mask = variant.arrays["loss_mask"]
    return Trajectory(
        group_id=claim.group_id,
        sample_index=claim.sample_index,
        attempt=claim.attempt,
        prompt_id=claim.prompt.prompt_id,
        prompt_text="word" * 200,
        answer=claim.prompt.answer,
        **variant.arrays,
        policy_versions=np.where(mask, claim.policy_version, -1).astype(np.int32),
        claim_policy_version=claim.policy_version,
        claim_step=claim.step,
        turns=variant.turns,
        images=variant.images,
        image_token_id=0 if variant.images else None,
        response_text="word" * int(mask.sum()),
        reward=float(claim.sample_index % 2),
        rewards={"exact_answer": 1.0, "format": 0.0},
        stop_reason=StopReason.END,
        metrics={"num_calls": 3.0},
    )


class Host:
    """Owns the simulated actors of one process, and the counts of their calls."""

    def __init__(
        self,
        replay: Any,
        names: list[str],
        profile: Profile,
        num_slots: int,
        mean_s: float,
        seed: int,
    ) -> None:
        """`mean_s` is the mean duration of an episode; 0 plays in no time."""
        self._replay = replay
        self._rng = np.random.default_rng(seed)
        self._variants = make_variants(profile, seed)
        self.pace = mean_s / float(np.mean([v.seconds for v in self._variants]))
        self.drained = Drained()
        self.engines = {name: SimulatedEngine() for name in names}
        self.workers = [
            SimulatedWorker(self, name, engine, num_slots) for name, engine in self.engines.items()
        ]

    def draw(self) -> Variant:
        return self._variants[self._rng.integers(len(self._variants))]

    async def claim(self, name: str, version: int, max_claims: int, wait_s: float) -> ClaimReply:
        started_s = time.perf_counter()
        reply = await self._replay.claim.remote(name, version, max_claims, wait_s)
        seconds = time.perf_counter() - started_s
        self.drained.num_claim_calls += 1
        if reply.claims:
            self.drained.claim_s.append(seconds)
        return reply

    async def exchange(
        self, name: str, version: int, episodes: list[Episode], max_claims: int
    ) -> tuple[list[str], ClaimReply]:
        started_s = time.perf_counter()
        reply = await self._replay.exchange.remote(name, version, episodes, max_claims)
        self.drained.put_s.append(time.perf_counter() - started_s)
        return reply

    async def run(self) -> None:
        await asyncio.gather(*(worker.run() for worker in self.workers))

    def receive(self, name: str, update: WeightUpdate) -> WeightReceipt:
        self.engines[name].policy_version = update.policy_version
        self._replay.advance_engine.remote(name, update.policy_version)
        return WeightReceipt(
            policy_version=update.policy_version,
            logprob_error=0.0,
            pause_s=0.0,
            update_s=0.0,
            probe_s=0.0,
        )


@ray.remote(num_cpus=0, max_concurrency=10_000)
class HostActor:
    """The Ray actor around a host."""

    def __init__(self, *arguments: Any) -> None:
        self._host = Host(*arguments)

    async def pid(self) -> int:
        return os.getpid()

    async def run(self) -> None:
        await self._host.run()

    async def receive(self, name: str, update: WeightUpdate) -> WeightReceipt:
        return self._host.receive(name, update)

    async def drain(self) -> Drained:
        drained, self._host.drained = self._host.drained, Drained()
        return drained
