"""Input of a learner rank at its start, and its output of each step."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raylearner import leftovers
from raylearner.config.schema import (
    LearnerSection,
    ObservabilitySection,
    RunConfig,
    RunSection,
    WeightsSection,
)
from raylearner.config.section import number
from raylearner.types import PolicyVersion, TrajectoryKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """Everything that a learner rank takes from the run's configuration; the same on every rank."""

    learner: LearnerSection
    model_path: str
    run: RunSection = field(default_factory=RunSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    observability: ObservabilitySection = field(default_factory=ObservabilitySection)
    temperature: float = 1.0
    """Temperature at which episodes are sampled; must be > 0."""
    reward_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each reward function, by name."""
    run_dir: Path | None = None
    """Directory for profiles and for the batches of failed steps; None writes neither."""
    weights_folder: Path = Path("/dev/shm/raylearner")
    """Folder for weights that travel as shared files; the learner group removes it at the end."""
    engine_dtype: str = "float32"
    """Precision of the engines, and so of the weights that are sent to them."""
    ranks_per_engine: int = 1
    """Tensor-parallel size of an engine."""
    should_free_memory: bool = False
    """Whether a push leaves no cached memory on the GPU, which an engine shares."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0 to train, got {self.temperature!r}")

    @classmethod
    def of_run(cls, config: RunConfig, *, model_path: str, run_dir: Path) -> "LearnerSpec":
        """Return the spec of a run whose `auto` values are resolved."""
        engine = config.actors.engine
        return cls(
            learner=config.learner,
            model_path=model_path,
            run=config.run,
            weights=config.weights,
            observability=config.recorded,
            temperature=config.sampling.temperature,
            reward_weights=config.rewards.weights,
            run_dir=run_dir,
            weights_folder=Path(config.weights.folder)
            / f"{leftovers.prefix(config.run.name)}{uuid.uuid4().hex[:12]}",
            engine_dtype=getattr(engine, "dtype", "float32"),
            ranks_per_engine=getattr(engine, "tensor_parallel_size", 1),
            should_free_memory=config.engines_sleep,
        )

    @property
    def device(self) -> str:
        """Type of the device that a rank trains on."""
        return "cuda" if number(self.learner.gpus_per_rank) else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Result of a learner step; the same on every rank, except for what is kept by trajectory."""

    policy_version: PolicyVersion
    """Version after the step: advanced by one, or unchanged when the step was skipped or trained
    only the critic."""
    is_skipped: bool
    metrics: Mapping[str, float]
    advantages: Mapping[TrajectoryKey, float] = field(default_factory=dict[TrajectoryKey, float])
    """Mean advantage of the trained tokens of each of this rank's trajectories."""
    logprobs: Mapping[TrajectoryKey, NDArray[np.float32]] = field(
        default_factory=dict[TrajectoryKey, NDArray[np.float32]]
    )
    """The learner's log-probabilities at the start of the step, `[T]` for each of this rank's
    trajectories."""
