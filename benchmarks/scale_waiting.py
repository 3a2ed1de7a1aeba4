"""CPU time of the replay actor's code for one call, by the number of claims that wait meanwhile.

`python benchmarks/scale_waiting.py [--out FILE.jsonl] [--sizes 10,100,300,1000]` needs no Ray: the class of
the actor runs in this process, so that the figures do not depend on what else the machine does.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_actors import PROFILES, make_trajectory, make_variants

from raylearner.config.schema import ReplaySection
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10,100,300,1000")
    parser.add_argument("--out", type=Path, help="file of JSON lines, appended to")
    parser.add_argument("--commit", default="", help="commit that is measured")
    arguments = parser.parse_args()
    costs = [asyncio.run(measure(int(size))) for size in arguments.sizes.split(",")]
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            for cost in costs:
                file.write(json.dumps({"commit": arguments.commit, **asdict(cost)}) + "\n")
    sys.stdout.write("\n".join(table(costs)) + "\n")


if __name__ == "__main__":
    main()
