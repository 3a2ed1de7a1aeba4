"""Trajectories per second through put and take, over Ray, with the product's own coalescing.

`python benchmarks/replay.py [--quick]` starts a local Ray on two cores and prints a Markdown table
and one JSON line. Goals: 2,000/s at 1k tokens, 300/s at 8k, cost flat up to 50,000 held.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from raylearner.actors.outbox import Outbox
from raylearner.config.schema import ReplaySection
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import Claim, CompletionStop, Prompt, Trajectory, Turn

GROUP_SIZE = 8
GROUPS_PER_STEP = 16
CONCURRENT_EPISODES = 64
STORE_BYTES = 300_000_000


def make_trajectory(claim: Claim, num_tokens: int) -> Trajectory:
    """Four turns, half of the tokens sampled. No array or turn is shared with another trajectory."""
    mask = np.arange(num_tokens) % 256 >= 128
    turns = tuple(
        Turn(
            start=256 * i + 128,
            end=256 * i + 256,
            reply_end=256 * i + 384,
            text=f"call number {i} of the calculator by sample {claim.key} " * 10,
            reply=f"result number {i} for sample {claim.key} " * 10,
            stop_reason=CompletionStop.END,
            min_policy_version=0,
            max_policy_version=0,
        )
        for i in range(4)
    )
    return Trajectory(
        group_id=claim.group_id,
        sample_index=claim.sample_index,
        attempt=claim.attempt,
        prompt_id=claim.prompt.prompt_id,
        prompt_text=f"question {claim.key} " * 40,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        train_mask=mask.copy(),
        behavior_logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        claim_policy_version=0,
        turns=turns,
        reward=float(claim.sample_index % 2),
        rewards={"exact_answer": 1.0, "format": 0.0},
        metrics={"num_calls": 4.0},
    )


@ray.remote(num_cpus=0)
class ProducerActor:
    """Plays in no time: claims, makes up a trajectory, sends through an outbox."""

    def __init__(self, name: str, replay: "ray.actor.ActorHandle", num_tokens: int) -> None:
        self._name = name
        self._replay = replay
        self._num_tokens = num_tokens
        self._outbox = Outbox(self._put)
        self._num_sent = 0
        self._num_calls = 0

    async def _put(self, episodes: list[list[Trajectory]]) -> list[str]:
        self._num_calls += 1
        return await self._replay.put.remote(episodes)

    async def _play(self, claim: Claim) -> None:
        trajectory = make_trajectory(claim, self._num_tokens)
        outcome = await self._outbox.send([trajectory])
        assert outcome == "accepted", outcome
        self._num_sent += 1

    async def run(self, num_episodes: int) -> tuple[int, int]:
        """Episodes sent so far, and calls that carried them."""
        running: set[asyncio.Task[None]] = set()
        num_claimed = 0
        while num_claimed < num_episodes:
            free = min(CONCURRENT_EPISODES - len(running), num_episodes - num_claimed)
            reply = await self._replay.claim.remote(self._name, 0, free, 1.0)
            num_claimed += len(reply.claims)
            running |= {asyncio.create_task(self._play(claim)) for claim in reply.claims}
            while len(running) == CONCURRENT_EPISODES:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if running:
            await asyncio.wait(running)
        return self._num_sent, self._num_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One row of the table: everything put is taken."""

    num_tokens: int
    num_producers: int
    num_trajectories: int
    per_s: float
    episodes_per_call: float
    cpu_us: float
    """CPU time of all processes together, Ray's own included, per trajectory."""
    max_store_mb: float


def store_mb() -> float:
    """What the object store holds now, in MB."""
    free = ray.available_resources().get("object_store_memory", 0.0)
    return (ray.cluster_resources()["object_store_memory"] - free) / 1e6


def cpu_s() -> float:
    """CPU time so far of this process and all below it: producers, replay, Ray's own."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(used.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


def make_replay(capacity_groups: int) -> "ray.actor.ActorHandle":
    config = ReplaySection(
        groups_per_step=capacity_groups,
        group_size=GROUP_SIZE,
        max_staleness=0,
        group_time_limit_s=1e6,
    )
    prompts = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(1000)]
    return ReplayActor.remote(config, prompts, 0)


async def measure_flow(num_tokens: int, num_producers: int, num_trajectories: int) -> Flow:
    replay = make_replay(4 * GROUPS_PER_STEP)
    producers = [ProducerActor.remote(f"p{i}", replay, num_tokens) for i in range(num_producers)]
    share = num_trajectories // num_producers
    await asyncio.gather(*(producer.run.remote(0) for producer in producers))  # all are up
    started_cpu_s, started_s = cpu_s(), time.perf_counter()
    runs = [producer.run.remote(share) for producer in producers]
    num_taken, max_store_mb, looked_s = 0, 0.0, started_s
    while num_taken < share * num_producers:
        take = await replay.take.remote(GROUPS_PER_STEP, 0, 60.0)
        assert take is not None, await replay.describe.remote()
        num_taken += sum(len(group.trajectories) for group in take.groups)
        assert take.groups[0].trajectories[0].token_ids[-1] == num_tokens - 1
        await replay.commit.remote([group.group_id for group in take.groups], 0)
        if time.perf_counter() - looked_s > 0.1:
            max_store_mb, looked_s = max(max_store_mb, store_mb()), time.perf_counter()
    seconds = time.perf_counter() - started_s
    sent = await asyncio.gather(*runs)
    used_cpu_s = cpu_s() - started_cpu_s
    max_store_mb = max(max_store_mb, store_mb())
    for actor in [replay, *producers]:
        ray.kill(actor)
    return Flow(
        num_tokens=num_tokens,
        num_producers=num_producers,
        num_trajectories=num_taken,
        per_s=num_taken / seconds,
        episodes_per_call=num_taken / sum(calls for _, calls in sent),
        cpu_us=1e6 * used_cpu_s / num_taken,
        max_store_mb=max_store_mb,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Cost at a filling level: of the puts that lead there, and of a take from there."""

    num_held: int
    put_us: float
    take_us: float
    store_mb: float


async def measure_held(num_tokens: int, levels: list[int]) -> list[Held]:
    """Fills up to each level without committing; costs in microseconds per trajectory."""
    per_take = GROUPS_PER_STEP * GROUP_SIZE
    replay = make_replay(levels[-1] // GROUP_SIZE + 2)
    producer = ProducerActor.remote("p", replay, num_tokens)
    await producer.run.remote(GROUP_SIZE)
    num_held, rows = GROUP_SIZE, []
    for level in levels:
        window = min(1000, level - num_held)
        await producer.run.remote(level - window - num_held)
        started_s = time.perf_counter()
        await producer.run.remote(window)
        put_s = time.perf_counter() - started_s
        num_held = level
        take_s = []
        for _ in range(5):
            started_s = time.perf_counter()
            take = await replay.take.remote(GROUPS_PER_STEP, 0, 60.0)
            take_s.append(time.perf_counter() - started_s)
            assert take is not None
            await replay.release.remote()
        rows.append(
            Held(
                num_held=level,
                put_us=1e6 * put_s / window,
                take_us=1e6 * sorted(take_s)[2] / per_take,
                store_mb=store_mb(),
            )
        )
    ray.kill(replay)
    ray.kill(producer)
    return rows


async def measure(*, is_quick: bool) -> tuple[list[Flow], list[Held]]:
    per_take = GROUPS_PER_STEP * GROUP_SIZE
    scale = 1 if is_quick else 6
    flows = [
        await measure_flow(num_tokens, num_producers, scale * num_takes * per_take)
        for num_tokens, num_takes in ((1024, 24), (8192, 8))
        for num_producers in (1, 8)
    ]
    levels = [1000, 4000] if is_quick else [1000, 10_000, 25_000, 50_000]
    return flows, await measure_held(1024, levels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a minute instead of several")
    is_quick = parser.parse_args().quick
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=STORE_BYTES)
    flows, held = asyncio.run(measure(is_quick=is_quick))
    ray.shutdown()
    lines = [
        "| tokens | producers | trajectories | per second | per call | CPU, us each | object store, most |",
        "|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {f.num_tokens} | {f.num_producers} | {f.num_trajectories} | {f.per_s:,.0f} "
            f"| {f.episodes_per_call:.1f} | {f.cpu_us:.0f} | {f.max_store_mb:.0f} MB |"
            for f in flows
        ),
        "",
        "| held | put, us each | take, us each | object store |",
        "|---:|---:|---:|---:|",
        *(
            f"| {h.num_held:,} | {h.put_us:.0f} | {h.take_us:.0f} | {h.store_mb:.0f} MB |"
            for h in held
        ),
        "",
    ]
    result = {
        "flows": [{name: getattr(f, name) for name in Flow.__slots__} for f in flows],
        "held": [{name: getattr(h, name) for name in Held.__slots__} for h in held],
        "store_bytes": STORE_BYTES,
        "driver_max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    sys.stdout.write("\n".join([*lines, json.dumps(result)]) + "\n")


if __name__ == "__main__":
    main()
