"""CPU time of the replay actor's own code: of a call by the number of claims that wait, and of an episode.

`python benchmarks/scale_costs.py [--out FILE.jsonl] [--sizes 10,100,300,1000]` needs no Ray: the class of the
actor runs in this process, so that the figures hardly depend on what else the machine does.
"""

import argparse
import asyncio
import json
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from scale_actors import PROFILES, Variant, make_trajectory, make_variants

from raylearner.codec import EpisodeBatch
from raylearner.config.schema import ReplaySection
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import Prompt

GROUP_SIZE = 8
NUM_GROUPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU time in microseconds, the woken claims included."""

    num_waiting: int
    put_us: float
    """Of a put with one episode of 1k to 8k tokens."""
    commit_us: float
    """Of a commit that frees the slot of one group, per sample given out."""
    version_us: float
    """Of one engine's report of new weights. A push makes one for each engine."""

    @property
    def push_s(self) -> float:
        """CPU time of the reports of one push to as many engines as claims wait."""
        return self.version_us * self.num_waiting / 1e6


async def measure(num_waiting: int) -> Cost:
    """Return the costs with a full replay, for whose slots the claims wait."""
    config = ReplaySection(
        groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE, max_staleness=0, group_time_limit_s=1e6
    )
    own: Any = ReplayActor
    prompts = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(100)]
    replay = own.__ray_metadata__.modified_class(config, prompts, 0)
    variants = make_variants(PROFILES["text"], 0)
    claims = (await replay.claim("full", 0, 10**6, 0.0)).claims
    waiting = [
        asyncio.create_task(replay.claim(str(index), 0, 1, 1e6)) for index in range(num_waiting)
    ]
    await _settle()

    async def put(index: int) -> None:
        episode = [make_trajectory(variants[index % len(variants)], claims[index])]
        assert await replay.put([episode]) == ["accepted"]

    async def advance(index: int) -> None:
        await replay.advance_engine(str(index % num_waiting), 0)

    version_us = await _cpu_us(advance, 100)
    put_us = await _cpu_us(put, len(claims))
    take = await replay.take(NUM_GROUPS, 0, 0.0)

    async def commit(index: int) -> None:
        await replay.commit([take.groups[index].group_id], 0)

    num_commits = min(NUM_GROUPS, num_waiting // GROUP_SIZE)
    commit_us = await _cpu_us(commit, num_commits) / GROUP_SIZE
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return Cost(num_waiting=num_waiting, put_us=put_us, commit_us=commit_us, version_us=version_us)


async def _cpu_us(call: Callable[[int], Awaitable[None]], count: int) -> float:
    started_s = time.process_time()
    for index in range(count):
        await call(index)
        await _settle()
    return 1e6 * (time.process_time() - started_s) / max(count, 1)


async def _settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """CPU time of one episode in microseconds, from the bytes that arrive to those that leave."""

    profile: str
    unpack_us: float
    put_us: float
    take_us: float
    pack_us: float
    commit_us: float

    @property
    def total_us(self) -> float:
        return self.unpack_us + self.put_us + self.take_us + self.pack_us + self.commit_us


def measure_episode(profile: str, *, num_rounds: int = 5) -> Episode:
    """Return the lowest costs over several rounds of 256 episodes, 8 to a put."""
    config = ReplaySection(
        groups_per_step=NUM_GROUPS, group_size=GROUP_SIZE, max_staleness=0, group_time_limit_s=1e6
    )
    prompts = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(100)]
    buffer = ReplayBuffer(config, prompts, 0)
    variants = make_variants(PROFILES[profile], 0)
    rounds = [_round(buffer, variants) for _ in range(num_rounds)]
    lowest = [1e6 * min(times) / (NUM_GROUPS * GROUP_SIZE) for times in zip(*rounds, strict=True)]
    unpack_us, put_us, take_us, pack_us, commit_us = lowest
    return Episode(
        profile=profile,
        unpack_us=unpack_us,
        put_us=put_us,
        take_us=take_us,
        pack_us=pack_us,
        commit_us=commit_us,
    )


def _round(buffer: ReplayBuffer, variants: list[Variant]) -> list[float]:
    """Return the CPU time of unpacking, puts, take, packing and commit of a full buffer."""
    calls: list[tuple[bytes, list[bytes]]] = []
    for _ in range(NUM_GROUPS):
        claims = buffer.claim("a", 0, GROUP_SIZE).claims
        episodes = [[make_trajectory(variants[c.group_id % len(variants)], c)] for c in claims]
        calls.append(_pickled(EpisodeBatch(episodes)))
    marks = [time.process_time()]
    received = [pickle.loads(data, buffers=parts) for data, parts in calls]
    marks.append(time.process_time())
    for batch in received:
        assert [buffer.put(episode) for episode in batch] == ["accepted"] * GROUP_SIZE
    marks.append(time.process_time())
    take = buffer.take(NUM_GROUPS, 0)
    assert take is not None
    marks.append(time.process_time())
    pickle.dumps(take, protocol=5, buffer_callback=lambda _: None)
    marks.append(time.process_time())
    buffer.commit([group.group_id for group in take.groups], 0)
    marks.append(time.process_time())
    return [end - start for start, end in pairwise(marks)]


def _pickled(value: object) -> tuple[bytes, list[bytes]]:
    """Return the pickle and its buffers, which Ray sends apart from it."""
    parts: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=parts.append)
    return data, [bytes(part.raw()) for part in parts]


def table(costs: Sequence[Cost]) -> list[str]:
    return [
        "| claims that wait | put, us | commit, us per sample | new weights of one engine, us | of all, s |",
        "|---:|---:|---:|---:|---:|",
        *(
            f"| {c.num_waiting:,} | {c.put_us:,.0f} | {c.commit_us:,.0f} | {c.version_us:,.0f} "
            f"| {c.push_s:,.3f} |"
            for c in costs
        ),
    ]


def episode_table(costs: Sequence[Episode]) -> list[str]:
    return [
        "| episodes | unpack | put | take | pack | commit | total, us | episodes/s of a core |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {c.profile} | {c.unpack_us:.0f} | {c.put_us:.0f} | {c.take_us:.0f} | {c.pack_us:.0f} "
            f"| {c.commit_us:.0f} | {c.total_us:.0f} | {1e6 / c.total_us:,.0f} |"
            for c in costs
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10,100,300,1000")
    parser.add_argument("--out", type=Path, help="file of JSON lines, appended to")
    parser.add_argument("--commit", default="", help="commit that is measured")
    arguments = parser.parse_args()
    costs = [asyncio.run(measure(int(size))) for size in arguments.sizes.split(",")]
    episodes = [measure_episode(profile) for profile in PROFILES]
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            for cost in (*costs, *episodes):
                file.write(json.dumps({"commit": arguments.commit, **asdict(cost)}) + "\n")
    sys.stdout.write("\n".join([*table(costs), "", *episode_table(episodes)]) + "\n")


if __name__ == "__main__":
    main()
