"""One rank of the learner as a Ray actor.

Consumes batches; produces step outputs, weight updates and checkpoints. Waits for the other ranks in
every collective; `LearnerGroup` ends all when one is gone.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from raylearner import job_variables
from raylearner.config.schema import LearnerSection, ProfileSection
from raylearner.config.section import number
from raylearner.learner.batch.layout import LearnerBatch, StepOutput
from raylearner.observability.spans import Span, Tracer
from raylearner.types import PolicyVersion, WeightUpdate
from raylearner.weights.group import WeightGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a rank records of itself."""

    should_trace: bool = False
    profile: ProfileSection | None = None
    profile_folder: Path = Path("profile")


@ray.remote(concurrency_groups={"control": 1, "checkpoint": 1})
class LearnerActor:
    """One rank; delegates to `Learner`. Imports torch in its own process only."""

    def __init__(self, rank: int) -> None:
        job_variables.take()
        self._rank = rank
        self._learner: Any = None
        self._writer: Any = None
        self._meter: Any = None
        self._profiler: Any = None
        self._tracer = Tracer(f"learner-{rank}", is_enabled=False)
        self._free_since_s = time.time()

    def __repr__(self) -> str:
        return f"learner-{self._rank}"

    def meeting_point(self) -> tuple[str, int]:
        """This node's address and a port free on it, for rank 0."""
        from raylearner.learner.model.mesh import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(
        self,
        config: LearnerSection,
        weights: Mapping[str, Any],
        world_size: int,
        address: str,
        port: int,
        recording: Recording,
        **arguments: Any,
    ) -> PolicyVersion:
        """Join the other ranks and load the model; `arguments` are the `Learner`'s, `weights` the
        `WeightWriter`'s."""
        from raylearner.learner.learner import Learner
        from raylearner.learner.model import mesh
        from raylearner.learner.profiler import StepProfiler
        from raylearner.learner.throughput import Meter
        from raylearner.learner.weight_source import WeightWriter

        device = "cuda" if number(config.gpus_per_rank) else "cpu"
        device_mesh = mesh.connect(
            rank=self._rank, world_size=world_size, address=address, port=port, device=device
        )
        self._tracer.is_enabled = recording.should_trace
        self._profiler = StepProfiler(recording.profile, recording.profile_folder, rank=self._rank)
        self._learner = Learner(
            config, device=device, device_mesh=device_mesh, tracer=self._tracer, **arguments
        )
        self._writer = WeightWriter(self._learner, **weights)
        self._meter = Meter(
            self._learner.causal_lm,
            device=device,
            num_ranks=world_size,
            context_size=config.context_parallel_size,
        )
        return self._learner.policy_version

    def pid(self) -> int:
        return os.getpid()

    def step(self, batch: LearnerBatch) -> StepOutput:
        step = self._learner.num_steps + 1
        self._tracer.since("wait for batch", self._free_since_s)
        with self._tracer.span("step", step=step), self._profiler.step(step):
            output = self._learner.step(batch)
        self._free_since_s = time.time()
        metrics = dict(output.metrics) | self._meter.measure(
            batch, step_s=output.metrics["learner/step_s"]
        )
        return replace(output, metrics=metrics)

    def free_port(self) -> int:
        from raylearner.learner.model.mesh import free_port

        return free_port()

    def write(self, members: Sequence[str], group: WeightGroup | None) -> WeightUpdate | None:
        with self._tracer.span("write weights"):
            return self._writer.write(members=members, group=group)

    def send(self, group: WeightGroup) -> dict[str, float] | str:
        with self._tracer.span("send weights"):
            return self._writer.send(group)

    @ray.method(concurrency_group="control")
    def drain(self) -> list[Span]:
        return self._tracer.drain()

    @ray.method(concurrency_group="control")
    def release(self) -> None:
        self._writer.release()

    @ray.method(concurrency_group="control")
    def abandon(self, group: WeightGroup) -> None:
        """Beside the `send` that hangs, or before it."""
        self._writer.abandon(group)

    def save(self, folder: str, should_defer: bool) -> None:
        self._learner.save(Path(folder), should_defer=should_defer)

    @ray.method(concurrency_group="checkpoint")
    def finish_save(self) -> str | None:
        """What failed, in words."""
        try:
            self._learner.finish_save()
        except Exception as error:
            log.exception("a checkpoint was not written")
            return f"learner rank {self._rank}: {type(error).__name__}: {error}"
        return None

    def restore(self, folder: str) -> PolicyVersion:
        self._learner.restore(Path(folder))
        return self._learner.policy_version
