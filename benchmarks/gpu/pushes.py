"""Weight pushes to running engines, through the publisher that a run uses, at a model's real size.

`--size 2.3B --learners 1 --engines 1` takes as many GPUs as both together (an engine on `--tensor`
GPUs); `--transport ipc` takes one GPU, which one learner rank shares with `--engines`. Learner ranks hold float32
shards and send bfloat16. Each phase makes three pushes: without load, then under 256 requests in flight for each of
`weights.cache`, and with tensors that arrive in the pause (`paused`), as before they were staged.
On the CPU weights travel by shared files instead.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from benchmarks.gpu.common import Result, environment, mean, model_folder, parser
from raylearner.config.schema import LearnerSection, RunSection, VllmEngine, WeightsSection
from raylearner.errors import WeightTransferError
from raylearner.learner.learner_group import LearnerGroup
from raylearner.learner.spec import LearnerSpec
from raylearner.types import Sampling
from raylearner.weights.publisher import Publisher
from raylearner.weights.transports import WeightGroup
from raylearner.weights.update import WeightReceipt, WeightUpdate

PROMPT_TOKENS = 200
PHASES = ("first", "idle", "recompute", "keep", "paused")
NUM_PUSHES = 3


class BareModels:
    """A sharded model with random weights, which change a little with every version."""

    reader = None

    def __init__(self, spec: LearnerSpec, group: Any) -> None:
        import torch

        from raylearner.learner.model.loading import load_sharded
        from raylearner.learner.model.policy import ModelOptions

        self.folder = Path(spec.model_path)
        self.policy_version = 0
        self._device = spec.device
        self.policy = load_sharded(
            spec.model_path,
            group,
            dtype=torch.float32,
            compute_dtype=torch.float32 if spec.device == "cpu" else torch.bfloat16,
            options=ModelOptions(),
            random_seed=0,
        ).requires_grad_(False)

    def change(self) -> int:
        import torch

        from raylearner.learner.optimizer import local

        with torch.no_grad():
            for parameter in self.policy.parameters():
                local(parameter).mul_(1.001)
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.policy_version += 1
        return self.policy_version


@ray.remote(concurrency_groups={"control": 1})
class PushActor:
    """One learner rank that only sends weights."""

    def __init__(self, spec: LearnerSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank

    def rendezvous_address(self) -> tuple[str, int]:
        from raylearner.learner.model.mesh import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, world_size: int, address: tuple[str, int]) -> int:
        from raylearner.learner.model import mesh
        from raylearner.learner.weight_writer import WeightWriter

        group = mesh.connect(
            rank=self._rank, world_size=world_size, address=address, device=self._spec.device
        )
        self._models = BareModels(self._spec, group)
        self._writer = WeightWriter(self._models, self._spec)
        return os.getpid()

    def shares_prefixes(self) -> bool:
        return False

    def load_libraries(self) -> None:
        """Do nothing: `start` imports what it needs."""

    def change(self) -> int:
        return self._models.change()

    def write(self, members: Sequence[str], group: WeightGroup | None) -> WeightUpdate | None:
        return self._writer.write(self._models.policy_version, members=members, group=group)

    def send(self, group: WeightGroup) -> dict[str, float] | str:
        return self._writer.send(group)

    def release(self) -> None:
        self._writer.release()

    @ray.method(concurrency_group="control")
    def abandon(self, group: WeightGroup) -> None:
        self._writer.abandon(group)

    def peak_gib(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


class PushGroup(LearnerGroup):
    actor = PushActor

    async def change(self) -> int:
        versions = await self._call_all("change")
        self._policy_version = versions[0]
        return versions[0]

    async def peak_gib(self) -> float:
        return max(await self._call_all("peak_gib"))


@ray.remote
class EngineActor:
    """One engine and its load."""

    def __init__(self, name: str, model_path: str, section: VllmEngine, transport: str) -> None:
        self._name, self._model_path = name, model_path
        self._section, self._transport = section, transport
        self._load: list[asyncio.Task[Any]] = []
        self._should_recompute = True

    async def start(self) -> None:
        from raylearner.actors.engines.vllm import VllmEngine as Engine

        self._engine = await Engine.start(
            self._section,
            model_path=self._model_path,
            seed=0,
            weight_transport=self._transport,
            actor_id=self._name,
        )

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        return await self._engine.receive(replace(update, should_recompute=self._should_recompute))

    async def prepare(self, phase: str) -> None:
        """Set what becomes of caches, and whether tensors arrive while the engine generates."""
        self._should_recompute = phase != "keep"
        if phase == "paused":

            async def stage(*_: Any) -> bool:
                return False

            self._engine._weights.stage = stage

    async def begin(self, num_requests: int, num_tokens: int) -> None:
        sampling = Sampling(max_tokens=num_tokens)
        prompts = [
            [1 + (7 * i + j) % 1000 for j in range(PROMPT_TOKENS)] for i in range(num_requests)
        ]
        self._begun = time.monotonic()
        self._load = [
            asyncio.create_task(self._engine.generate(prompt, sampling)) for prompt in prompts
        ]

    async def finish(self) -> dict[str, float]:
        """Tokens sampled, and what generation and pushes together took."""
        completions = await asyncio.gather(*self._load)
        return {
            "seconds": time.monotonic() - self._begun,
            "sampled_tokens": sum(len(c.token_ids) for c in completions),
            "requests_of_two_versions": sum(len(set(c.policy_versions)) > 1 for c in completions),
        }

    async def stop(self) -> None:
        await self._engine.close()


async def run(arguments: Any, result: Result) -> None:
    cpu = arguments.cpu
    transport = "shared_files" if cpu else arguments.transport
    is_shared = transport == "ipc"
    dtype = "float32" if cpu else "bfloat16"
    folder = str(model_folder(arguments.out, arguments.size, tokenizer=arguments.model))
    section = VllmEngine(
        kind="vllm",
        dtype=dtype,
        max_model_tokens=256 if cpu else 2048,
        max_sequences=8 if cpu else 256,
        memory_fraction=0.4 / arguments.engines if is_shared else 0.8,
        tensor_parallel_size=arguments.tensor,
        extra_arguments={"load_format": "dummy"},
    )
    weights = WeightsSection(
        transport=transport, deadline_s=120, verify_tolerance=1e-3 if cpu else 2.0
    )
    learner = PushGroup(
        LearnerSpec(
            learner=LearnerSection(
                num_ranks=arguments.learners,
                gpus_per_rank=0 if cpu else 0.5 if is_shared else 1,
                cpus_per_rank=0.5,
            ),
            model_path=folder,
            run=RunSection(name="pushes", num_steps=1),
            weights=weights,
            weights_folder=Path(weights.folder) / f"raylearner-pushes-{os.getpid()}",
            engine_dtype=dtype,
            ranks_per_engine=arguments.tensor,
        )
    )
    gpus_of_engine = 0 if cpu else 0.5 / arguments.engines if is_shared else arguments.tensor
    engines = {
        f"engine-{i}": EngineActor.options(
            num_cpus=0.5, num_gpus=gpus_of_engine, max_concurrency=1000
        ).remote(f"engine-{i}", folder, section, transport)
        for i in range(arguments.engines)
    }
    failed: dict[str, str] = {}
    publisher = Publisher(
        learner,
        on_failed=lambda actor_id, error: failed.update({actor_id: str(error)}),
        deadline_s=weights.deadline_s,
    )
    try:
        started = time.monotonic()
        await asyncio.gather(
            learner.start(), *(_answer(e.start.remote()) for e in engines.values())
        )
        result.add(start_s=time.monotonic() - started)
        for name, engine in engines.items():
            publisher.add(name, _receiver(engine))
        num_requests, num_tokens = (4, 40) if cpu else (256, 512)
        for label in PHASES:
            has_load = label not in ("first", "idle")
            pushes = []
            await asyncio.gather(*(_answer(e.prepare.remote(label)) for e in engines.values()))
            if has_load:
                await asyncio.gather(
                    *(_answer(e.begin.remote(num_requests, num_tokens)) for e in engines.values())
                )
                await asyncio.sleep(1.0)
            for _ in range(1 if label == "first" else NUM_PUSHES):
                version = await learner.change()
                started = time.monotonic()
                try:
                    await publisher.publish(version)
                except WeightTransferError as error:
                    result.add(**{f"{label}_error": str(error), "failed": failed})
                    raise
                whole = time.monotonic() - started
                numbers = dict(publisher.metrics)
                apart = numbers["weights/probe_s"]
                pushes.append(numbers | {"whole_s": whole, "without_probe_s": whole - apart})
                if has_load:
                    await asyncio.sleep(0.7)
            result.add(**{label: pushes, "failed": failed})
            if has_load:
                done = await asyncio.gather(*(_answer(e.finish.remote()) for e in engines.values()))
                result.add(**{f"{label}_load": done})
            for metric in ("pause_s", "stage_s", "recomputed_tokens"):
                numbers = [push[f"weights/{metric}"] for push in pushes]
                result.add(**{f"{label}_{metric}": mean(numbers)})
            result.add(**{f"{label}_longest_pause_s": max(p["weights/pause_s"] for p in pushes)})
        result.add(learner_peak_gib=await learner.peak_gib())
        result.done()
    finally:
        await publisher.close()
        await learner.close()
        await asyncio.gather(
            *(_answer(e.stop.remote()) for e in engines.values()), return_exceptions=True
        )


def _receiver(engine: Any) -> Any:
    async def receive(update: WeightUpdate) -> WeightReceipt:
        return await engine.receive.remote(update)

    return receive


async def _answer(reference: Any) -> Any:
    return await reference


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--size", default="2.3B")
    args.add_argument("--learners", type=int, default=1)
    args.add_argument("--engines", type=int, default=1)
    args.add_argument("--transport", choices=("nccl", "ipc"), default="nccl")
    args.add_argument("--tensor", type=int, default=1)
    arguments = args.parse_args()
    name = f"pushes_{arguments.size}_{arguments.learners}to{arguments.engines}"
    name += f"_tensor{arguments.tensor}" if arguments.tensor > 1 else ""
    name += "_ipc" if arguments.transport == "ipc" else ""
    result = Result(arguments.out, name)
    if arguments.cpu:
        arguments.size = "tiny"
    result.add(size=arguments.size, learners=arguments.learners, engines=arguments.engines)
    # Only what Ray has not read at its import.
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0 if arguments.cpu else None,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _node_ip_address="127.0.0.1",
        log_to_driver=True,
    )
    try:
        asyncio.run(run(arguments, result))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
