"""What one learner step trains on, and how it crosses processes."""

from dataclasses import dataclass, replace
from typing import Any

from raylearner.shipment import Shipment
from raylearner.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """What one learner step trains on. Leased until `commit`."""

    groups: list[TrajectoryGroup]
    metrics: dict[str, float]
    staleness_histogram: list[int]
    """Trained tokens by staleness in versions."""

    def __reduce__(self) -> tuple[Any, ...]:
        bare = [replace(group, trajectories=()) for group in self.groups]
        shipment = Shipment(list(group.trajectories) for group in self.groups)
        return _arrived_take, (bare, shipment, self.metrics, self.staleness_histogram)


def _arrived_take(
    bare: list[TrajectoryGroup],
    shipment: list[list[Trajectory]],
    metrics: dict[str, float],
    staleness_histogram: list[int],
) -> Take:
    groups = [
        replace(group, trajectories=tuple(trajectories))
        for group, trajectories in zip(bare, shipment, strict=True)
    ]
    return Take(groups=groups, metrics=metrics, staleness_histogram=staleness_histogram)
