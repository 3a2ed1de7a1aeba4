"""Where a step's numbers go besides the run's JSON lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from numpy.typing import NDArray

from raylearner.config.schema import ObservabilitySection


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What sinks are given of one step. Everything in it is finite: the rest was counted and left out."""

    step: int
    scalars: Mapping[str, float]
    is_whole: bool = False
    """Whether the scalars are all that was measured of the step, evaluations aside."""
    samples: Mapping[str, NDArray] = field(default_factory=dict[str, NDArray])
    """Values behind a distribution, by key."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Markdown, by key."""


class Sink(Protocol):
    """One place that numbers go to. Called by one thread at a time, not always by the same.

    Steps come in order, each in one record or more; only an evaluation may come after later steps,
    since it is made beside them.
    """

    def write(self, record: StepRecord) -> None: ...

    def rewind(self, step: int) -> None:
        """Forget what was written of later steps, where the place can."""
        ...

    def close(self) -> None: ...


def make_sinks(
    config: ObservabilitySection,
    folder: Path,
    *,
    run_name: str,
    hparams: Mapping[str, bool | int | float | str],
) -> list[Sink]:
    """Those that a configuration asks for; each brings its library only then."""
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
    """What a sink may be given: numbers that are there and finite."""
    return {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}


def flattened(tree: object, prefix: str = "") -> dict[str, bool | int | float | str]:
    """A nested configuration by dotted key; lists in brackets, None as `null`."""
    if isinstance(tree, Mapping):
        flat: dict[str, bool | int | float | str] = {}
        for key, value in tree.items():
            flat |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    if isinstance(tree, bool | int | float | str):
        return {prefix: tree}
    if isinstance(tree, Sequence) and tree and all(isinstance(item, Mapping) for item in tree):
        flat = {}
        for index, item in enumerate(tree):
            flat |= flattened(item, f"{prefix}.{index}")
        return flat
    return {prefix: "null" if tree is None else str(tree)}
