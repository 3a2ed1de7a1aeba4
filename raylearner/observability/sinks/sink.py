"""The protocol of sinks, which receive a step's metrics in addition to the run's JSON lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from numpy.typing import NDArray

from raylearner.config.schema import ObservabilitySection


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A record of one step, or a part of it. All values are finite; others are left out."""

    step: int
    scalars: Mapping[str, float]
    is_whole: bool = False
    """Whether the scalars are all metrics of the step, apart from evaluations."""
    samples: Mapping[str, NDArray] = field(default_factory=dict[str, NDArray])
    """Values of a distribution, by key."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Markdown, by key."""


class Sink(Protocol):
    """A destination of metrics, called by one thread at a time, but not always the same.

    Steps arrive in order, in one or more records; only evaluations may arrive after later steps.
    """

    def write(self, record: StepRecord) -> None: ...

    def rewind(self, step: int) -> None:
        """Remove records of later steps, if the destination can."""
        ...

    def close(self) -> None: ...


def make_sinks(
    config: ObservabilitySection,
    folder: Path,
    *,
    run_name: str,
    hparams: Mapping[str, bool | int | float | str],
) -> list[Sink]:
    """Return the configured sinks; only their libraries are imported."""
    sinks: list[Sink] = []
    if config.tensorboard:
        from raylearner.observability.sinks.tensorboard import TensorBoardFile

        sinks.append(TensorBoardFile(folder / "tensorboard", hparams=hparams))
    if config.ray_metrics:
        from raylearner.observability.sinks.ray_metrics import RayMetrics

        sinks.append(RayMetrics(run_name=run_name))
    if config.wandb is not None:
        from raylearner.observability.sinks.wandb import WandbRun

        sinks.append(WandbRun(config.wandb, folder, hparams=hparams))
    return sinks


def finite_scalars(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    return {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}


def flatten(tree: object, prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return a nested configuration by dotted key; lists in brackets, None as `null`."""
    if isinstance(tree, Mapping):
        flat: dict[str, bool | int | float | str] = {}
        for key, value in tree.items():
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if isinstance(tree, bool | int | float | str):
        return {prefix: tree}
    if isinstance(tree, Sequence) and tree and all(isinstance(item, Mapping) for item in tree):
        flat = {}
        for index, item in enumerate(tree):
            flat |= flatten(item, f"{prefix}.{index}")
        return flat
    return {prefix: "null" if tree is None else str(tree)}
