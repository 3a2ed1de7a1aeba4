"""The real replay actor, ledger and publisher under up to 1,000 simulated rollout actors.

`python benchmarks/scale.py --out FILE.jsonl [--sizes 10,100,300,1000] [--profiles text,images]` starts a
local Ray on two cores. Each cell is one line of the file, written when it ends. `--quick` runs two
small cells.

A simulated actor is a `RolloutWorker` whose episodes sleep instead of sampling: claims, cancellations,
puts and reports of new weights are the product's own. Many share a process, since one
process each would not fit on two cores. `paced` offers a fixed rate for each actor; `full` plays in no
time, so that the rate is the replay actor's own limit or that of the clients, whichever is smaller.
"""

import argparse
import asyncio
import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from scale_actors import PROFILES, HostActor, make_update
from scale_cells import Cell, busy_s, cpu_s, percentile, rss_mb, store_mb, table

from raylearner.config.schema import ReplaySection
from raylearner.replay.replay_actor import ReplayActor
from raylearner.types import Prompt
from raylearner.weights.publisher import Publisher
from raylearner.weights.update import WeightReceipt, WeightUpdate

STORE_BYTES = 600_000_000
GROUP_SIZE = 8
MAX_STALENESS = 15
SLOTS = 4
"""Episodes of one simulated actor at once; a real one plays 32 or more, which would not fit on two cores."""
EPISODES_PER_ACTOR_S = 0.2
"""Rate that one actor offers in a paced cell by default."""
NUM_HOSTS = 2
"""Processes of simulated actors."""
PROBE_S = 0.1
"""Interval of the calls that measure the delay of the replay actor's event loop."""
TAKE_POLL_S = 5.0


class MeasuredReplay(ReplayActor.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """The replay actor, which also returns its process id."""

    async def pid(self) -> int:
        return os.getpid()


class Local:
    """An actor in this process, called like one of Ray, by values: to profile, and without a cluster."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)

        async def call(*arguments: Any) -> Any:
            return _copied(await method(*_copied(arguments)))

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(call(*arguments)))


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, protocol=5))


class StandIn:
    """A transport without weights: the publisher's calls and the updates' sizes are real."""

    is_stepping = False

    async def write(self, policy_version: int, members: Sequence[str]) -> WeightUpdate:
        return make_update(policy_version)

    async def send(self, update: WeightUpdate) -> dict[str, float]:
        return {}

    async def abandon(self, update: WeightUpdate) -> None: ...

    async def discard(self, update: WeightUpdate) -> None: ...


class Simulation:
    """Owns the actors of one cell: the replay, the hosts of simulated actors, the publisher."""

    def __init__(
        self, num_actors: int, *, mode: str, profile: str, rate: float, is_local: bool
    ) -> None:
        in_flight = num_actors * SLOTS
        self.groups_per_step = max(2, in_flight // GROUP_SIZE // 4)
        config = ReplaySection(
            groups_per_step=self.groups_per_step,
            group_size=GROUP_SIZE,
            max_staleness=MAX_STALENESS,
            group_time_limit_s=1e6,
        )
        prompts = [
            Prompt(prompt_id=f"prompt-{i}", messages=(), answer="x" * 50) for i in range(1000)
        ]
        arguments = (config, prompts, 0)
        self._is_local = is_local
        self.replay: Any
        if is_local:
            self.replay = Local(MeasuredReplay(*arguments))
        else:
            remote: Any = ray.remote(MeasuredReplay)
            self.replay = remote.options(num_cpus=0, max_concurrency=10_000).remote(*arguments)
        names = [f"rollout-{i}" for i in range(num_actors)]
        mean_s = 0.0 if mode == "full" else SLOTS / rate
        self.hosts = [
            self._host(self.replay, names[i::NUM_HOSTS], PROFILES[profile], SLOTS, mean_s, i)
            for i in range(NUM_HOSTS)
        ]
        self.owner = {name: self.hosts[i % NUM_HOSTS] for i, name in enumerate(names)}
        self.publisher = Publisher(StandIn(), on_failed=lambda *_: None, deadline_s=120.0)
        for name in names:
            self.publisher.add(name, self._receiver(name))
        self.taken = 0
        self.take_s: list[float] = []
        self.push_s: list[float] = []
        self.probe_s: list[float] = []

    def _host(self, *arguments: Any) -> Any:
        kind: Any = HostActor
        if self._is_local:
            return Local(kind.__ray_metadata__.modified_class(*arguments))
        return kind.remote(*arguments)

    def _receiver(self, name: str) -> Any:
        async def receive(update: WeightUpdate) -> WeightReceipt:
            return await self.owner[name].receive.remote(name, update)

        return receive

    async def learn(self) -> None:
        """Take, commit and publish like the controller, with a learner that takes no time."""
        version = 0
        while True:
            started_s = time.perf_counter()
            take = await self.replay.take.remote(self.groups_per_step, version, TAKE_POLL_S)
            if take is None:
                continue
            self.take_s.append(time.perf_counter() - started_s)
            self.taken += sum(len(group.trajectories) for group in take.groups)
            version += 1
            await self.replay.commit.remote([g.group_id for g in take.groups], version)
            if not self.publisher.is_publishing:
                self.publisher.start(version)

    async def time_pushes(self) -> None:
        last: Any = None
        while True:
            if self.publisher.metrics and self.publisher.metrics is not last:
                last = self.publisher.metrics
                self.push_s.append(last["weights/publish_s"])
            await asyncio.sleep(0.02)

    async def probe(self) -> None:
        while True:
            started_s = time.perf_counter()
            await self.replay.progress.remote()
            self.probe_s.append(time.perf_counter() - started_s)
            await asyncio.sleep(PROBE_S)

    def reset(self) -> None:
        self.taken = 0
        self.take_s, self.push_s, self.probe_s = [], [], []

    def close(self) -> None:
        if not self._is_local:
            for actor in [self.replay, *self.hosts]:
                ray.kill(actor)


async def measure(
    num_actors: int,
    *,
    mode: str,
    profile: str,
    warm_s: float,
    window_s: float,
    rate: float = EPISODES_PER_ACTOR_S,
    is_local: bool = False,
) -> Cell:
    simulation = Simulation(num_actors, mode=mode, profile=profile, rate=rate, is_local=is_local)
    pids = await asyncio.gather(*(host.pid.remote() for host in simulation.hosts))
    replay_pid = await simulation.replay.pid.remote()
    runs = [host.run.remote() for host in simulation.hosts]
    duties = [
        asyncio.create_task(duty())
        for duty in (simulation.learn, simulation.probe, simulation.time_pushes)
    ]
    watched = [replay_pid, os.getpid(), *pids]
    try:
        await asyncio.sleep(warm_s)
        await asyncio.gather(*(host.drain.remote() for host in simulation.hosts))
        simulation.reset()
        started_s = time.perf_counter()
        before, busy_before = [cpu_s(pid) for pid in watched], busy_s()
        await asyncio.sleep(window_s)
        max_store_mb = 0.0 if is_local else store_mb()
        used = [cpu_s(pid) - old for pid, old in zip(watched, before, strict=True)]
        busy = busy_s() - busy_before
        seconds = time.perf_counter() - started_s
        drained = await asyncio.gather(*(host.drain.remote() for host in simulation.hosts))
        rss = rss_mb(replay_pid)
        for duty in duties:
            if duty.done():
                duty.result()
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
        with suppress(Exception):
            await simulation.publisher.close()
        simulation.close()
        for run in runs if is_local else []:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    stored = sum(d.num_stored for d in drained)
    put_ms = [1e3 * s for d in drained for s in d.put_s]
    claim_ms = [1e3 * s for d in drained for s in d.claim_s]
    probe_ms = [1e3 * s for s in simulation.probe_s]
    take_ms = [1e3 * s for s in simulation.take_s]
    return Cell(
        mode=mode,
        profile=profile,
        num_actors=num_actors,
        window_s=seconds,
        trajectories_per_s=stored / seconds,
        taken_per_s=simulation.taken / seconds,
        tokens_per_s=sum(d.num_tokens for d in drained) / seconds,
        claim_calls_per_s=sum(d.num_claim_calls for d in drained) / seconds,
        put_calls_per_s=len(put_ms) / seconds,
        put_p50_ms=percentile(put_ms, 50),
        put_p99_ms=percentile(put_ms, 99),
        claim_p50_ms=percentile(claim_ms, 50),
        claim_p99_ms=percentile(claim_ms, 99),
        probe_p50_ms=percentile(probe_ms, 50),
        probe_p99_ms=percentile(probe_ms, 99),
        take_p50_ms=percentile(take_ms, 50),
        take_max_ms=max(take_ms, default=0.0),
        push_p50_s=percentile(simulation.push_s, 50),
        push_max_s=max(simulation.push_s, default=0.0),
        replay_cpu=used[0] / seconds,
        replay_cpu_us=1e6 * used[0] / max(stored, 1),
        clients_cpu=sum(used[2:]) / seconds,
        driver_cpu=used[1] / seconds,
        machine_cpu=busy / seconds,
        replay_rss_mb=rss,
        store_mb=max_store_mb,
        num_pushes=len(simulation.push_s),
        num_reached=int(simulation.publisher.metrics.get("weights/num_engines", 0)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, appended to")
    parser.add_argument("--sizes", default="10,100,300,1000")
    parser.add_argument("--modes", default="paced,full")
    parser.add_argument("--profiles", default="text")
    parser.add_argument("--rate", type=float, default=EPISODES_PER_ACTOR_S, help="of one actor")
    parser.add_argument("--commit", default="", help="commit that is measured")
    parser.add_argument("--window", type=float, default=30.0, help="measured seconds of a cell")
    parser.add_argument("--local", action="store_true", help="all in one process, without Ray")
    parser.add_argument("--quick", action="store_true", help="two small cells")
    arguments = parser.parse_args()
    sizes = [10] if arguments.quick else [int(size) for size in arguments.sizes.split(",")]
    window_s = 2.0 if arguments.quick else arguments.window
    sys.path.insert(0, str(Path(__file__).parent))
    if not arguments.local:
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default gives way to all others
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
            log_to_driver=False,
        )
    cells: list[Cell] = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for profile in arguments.profiles.split(","):
        for mode in arguments.modes.split(","):
            for size in sizes:
                is_paced = mode == "paced"
                cell = asyncio.run(
                    measure(
                        size,
                        mode=mode,
                        profile=profile,
                        warm_s=2.0
                        if arguments.quick
                        else 1.2 * SLOTS * is_paced / arguments.rate + 5.0,
                        window_s=window_s,
                        rate=4.0 if arguments.quick else arguments.rate,
                        is_local=arguments.local,
                    )
                )
                cells.append(cell)
                with arguments.out.open("a") as file:
                    file.write(
                        json.dumps(
                            {
                                "commit": arguments.commit,
                                "is_local": arguments.local,
                                **asdict(cell),
                            }
                        )
                        + "\n"
                    )
    if not arguments.local:
        ray.shutdown()
    sys.stdout.write("\n".join(table(cells)) + "\n")


if __name__ == "__main__":
    main()
