"""What one learner step trains on, and how it crosses processes."""

from dataclasses import dataclass, field, replace
from typing import Any

from raylearner.codec import Shipment
from raylearner.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """What one learner step trains on. Leased until `commit`."""

    groups: list[TrajectoryGroup]
    metrics: dict[str, float]
    staleness_histogram: list[int]
    """Trained tokens by staleness in versions."""
    failures: list[str] = field(default_factory=list[str])
    """The first failed episode of each kind since the last take, with its cause."""

    def __reduce__(self) -> tuple[Any, ...]:
        bare = [replace(group, trajectories=()) for group in self.groups]
        shipment = Shipment(list(group.trajectories) for group in self.groups)
        return (
            _arrived_take,
            (bare, shipment, self.metrics, self.staleness_histogram, self.failures),
        )


def _arrived_take(
    bare: list[TrajectoryGroup],
    shipment: list[list[Trajectory]],
    metrics: dict[str, float],
    staleness_histogram: list[int],
    failures: list[str],
) -> Take:
    groups = [
        replace(group, trajectories=tuple(trajectories))
        for group, trajectories in zip(bare, shipment, strict=True)
    ]
    return Take(
        groups=groups,
        metrics=metrics,
        staleness_histogram=staleness_histogram,
        failures=failures,
    )
