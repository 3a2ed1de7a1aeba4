"""One rank of the learner as a Ray actor.

Consumes batches; produces step outputs, weight updates and checkpoints. Waits for the other ranks in
every collective; `LearnerGroup` ends all ranks when one is gone.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from raylearner import job_variables, stacks
from raylearner.learner.batch.pack import LearnerBatch
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.observability.phases import Phases
from raylearner.observability.spans import Span, Tracer
from raylearner.types import PolicyVersion
from raylearner.weights.transports import WeightGroup
from raylearner.weights.update import WeightUpdate

if TYPE_CHECKING:  # these import torch, which only the actor's own process needs
    from raylearner.learner.learner import Learner
    from raylearner.learner.recording import Meter, StepProfiler
    from raylearner.learner.weight_writer import WeightWriter

log = logging.getLogger(__name__)


@ray.remote(concurrency_groups={"control": 1, "checkpoint": 1})  # pyright: ignore[reportCallIssue]
class LearnerActor:
    """One rank; delegates to `Learner`. The other ranks must be placed before `start` can join them."""

    _learner: "Learner"
    _writer: "WeightWriter"
    _meter: "Meter"
    _profiler: "StepProfiler"

    def __init__(self, spec: LearnerSpec, rank: int) -> None:
        job_variables.take()
        stacks.register()
        self._spec = spec
        self._rank = rank
        self._tracer = Tracer(f"learner-{rank}", is_enabled=spec.observability.trace)
        self._phases = Phases(self._tracer, "starting the process")
        self._free_since_s = time.time()

    def __repr__(self) -> str:
        return f"learner-{self._rank}"

    def load_libraries(self) -> None:
        """Import the learner, which may take longer than loading its model."""
        self._phases.enter("importing libraries")
        for name in ("learner", "recording", "warm_up", "weight_writer"):
            import_module(f"raylearner.learner.{name}")
        self._phases.enter("waiting for the model")

    def rendezvous_address(self) -> tuple[str, int]:
        """Return this node's address and a free port on it."""
        from raylearner.learner.model.mesh import free_port

        return ray.util.get_node_ip_address(), free_port()

    def start(self, world_size: int, address: tuple[str, int]) -> int:
        """Join the other ranks and load the model; return the process id."""
        from raylearner.learner.learner import Learner
        from raylearner.learner.model import mesh
        from raylearner.learner.recording import Meter, StepProfiler
        from raylearner.learner.warm_up import should_warm_up, warm_up
        from raylearner.learner.weight_writer import WeightWriter

        spec = self._spec
        self._phases.enter("joining the other ranks")
        device_mesh = mesh.connect(
            rank=self._rank, world_size=world_size, address=address, device=spec.device
        )
        self._phases.enter("loading the model")
        self._learner = Learner(spec, device_mesh=device_mesh, tracer=self._tracer)
        if should_warm_up(spec.learner):
            self._phases.enter("compiling" if spec.learner.compile is True else "warming up")
            warm_up(
                self._learner.models,
                spec.learner,
                temperature=spec.temperature,
                device=spec.device,
            )
        self._writer = WeightWriter(self._learner.models, spec)
        self._meter = Meter(
            self._learner.models.policy.causal_lm,
            device=spec.device,
            num_ranks=world_size,
            context_size=spec.learner.context_parallel_size,
        )
        folder = (spec.run_dir or Path()) / "profile"
        self._profiler = StepProfiler(spec.observability.profile, folder, rank=self._rank)
        self._phases.end()
        return os.getpid()

    def shares_prefixes(self) -> bool:
        """Return whether batches may be packed with shared prefixes."""
        return self._learner.models.shares_prefixes

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

    def write(self, members: Sequence[str], group: WeightGroup | None) -> WeightUpdate | None:
        with self._tracer.span("write weights"):
            return self._writer.write(self._learner.policy_version, members=members, group=group)

    def send(self, group: WeightGroup) -> dict[str, float] | str:
        with self._tracer.span("send weights"):
            return self._writer.send(group)

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer, also in a step."""

    @ray.method(concurrency_group="control")
    def phase(self) -> str:
        """Return what the rank is doing while it starts."""
        return self._phases.current

    @ray.method(concurrency_group="control")
    def drain(self) -> list[Span]:
        return self._tracer.drain()

    @ray.method(concurrency_group="control")
    def release(self) -> None:
        self._writer.release()

    @ray.method(concurrency_group="control")
    def abandon(self, group: WeightGroup) -> None:
        """End the `send` to this group, whether it hangs or has not begun yet."""
        self._writer.abandon(group)

    def save(self, folder: Path, should_defer: bool) -> str | None:
        """Return why copying or writing failed, or None."""
        return self._try_to_write(lambda: self._learner.save(folder, should_defer=should_defer))

    @ray.method(concurrency_group="checkpoint")
    def finish_save(self) -> str | None:
        """Return why writing failed, or None."""
        return self._try_to_write(self._learner.finish_save)

    def _try_to_write(self, write: Callable[[], None]) -> str | None:
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            write()
        except (Exception, CheckpointException) as error:
            log.exception("a checkpoint was not written")
            return f"learner rank {self._rank}: {type(error).__name__}: {error}"
        return None

    def restore(self, folder: Path) -> PolicyVersion:
        self._learner.restore(folder)
        return self._learner.policy_version
