"""The run's metrics as Ray metrics, which Prometheus scrapes together with the cluster's own.

One gauge for each entry of the metric table: `buffer/staleness/mean` is `raylearner_buffer_staleness_mean`
here and `ray_raylearner_buffer_staleness_mean` in Prometheus. A placeholder becomes a tag, so
`rollout/errors/<kind>` is `raylearner_rollout_errors{kind="tool"}`; the tag `run` names the run.
"""

import math

from ray.util.metrics import Gauge

from raylearner.observability.metrics import METRICS, entry_of, gauge_names, placeholders
from raylearner.observability.sinks.sink import StepRecord

RUN_TAG = "run"


class RayMetrics:
    """Gauges with the latest values. Needs a process that is connected to Ray.

    Metrics missing in a step become NaN, a gap in the graph; a gauge would repeat its last value forever.
    """

    def __init__(self, *, run_name: str) -> None:
        self._run = {RUN_TAG: run_name}
        self._gauges: dict[str, Gauge] = {}
        self._written: set[str] = set()

    def write(self, record: StepRecord) -> None:
        values = {"step": float(record.step), **record.scalars}
        if record.is_whole:
            for key in self._written - set(values):
                if not key.startswith("evaluation/"):
                    self._set(key, math.nan)
        for key, value in values.items():
            self._set(key, value)
        self._written |= set(values)

    def rewind(self, step: int) -> None:
        """Do nothing: gauges have no history."""

    def close(self) -> None:
        """Set all gauges to NaN, since the run has ended."""
        for key in self._written:
            self._set(key, math.nan)

    def _set(self, key: str, value: float) -> None:
        found = entry_of(key)
        if found is None:
            return
        entry, tags = found
        if entry not in self._gauges:
            spec = METRICS[entry]
            self._gauges[entry] = Gauge(
                gauge_names()[entry],
                description=f"{spec.description} [{spec.unit}]" if spec.unit else spec.description,
                tag_keys=(RUN_TAG, *placeholders(entry)),
            )
        self._gauges[entry].set(value, tags={**self._run, **tags})
