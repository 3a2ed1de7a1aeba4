"""The run's metrics as Ray metrics, which Prometheus scrapes together with the cluster's own.

One gauge for each entry of the metric table: `buffer/staleness/mean` is `raylearner_buffer_staleness_mean`
here and `ray_raylearner_buffer_staleness_mean` in Prometheus. A placeholder becomes a tag, so
`rollout/errors/<kind>` is `raylearner_rollout_errors{kind="tool"}`; the tag `run` names the run.
"""

import math
import threading

from ray.util.metrics import Gauge

from raylearner.observability.metrics import METRICS, entry_of, gauge_names, placeholders
from raylearner.observability.sinks.sink import StepRecord

RUN_TAG = "run"
REPEAT_S = 5.0
"""Interval at which values are set again: Ray drops a gauge some 20 s after it was last set."""


class RayMetrics:
    """Gauges with the latest values. Needs a process that is connected to Ray.

    Metrics missing in a step become NaN, a gap in the graph; the others are repeated until the next step.
    """

    def __init__(self, *, run_name: str) -> None:
        self._run = {RUN_TAG: run_name}
        self._gauges: dict[str, Gauge] = {}
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._repeating = threading.Thread(target=self._repeat, name="ray metrics", daemon=True)
        self._repeating.start()

    def write(self, record: StepRecord) -> None:
        values = {"step": float(record.step), **record.scalars}
        with self._lock:
            if record.is_whole:
                for key in self._values.keys() - values.keys():
                    if not key.startswith("evaluation/"):
                        self._set(key, math.nan)
            for key, value in values.items():
                self._set(key, value)

    def rewind(self, step: int) -> None:
        """Do nothing: gauges have no history."""

    def close(self) -> None:
        """Set all gauges to NaN, since the run has ended."""
        self._is_closed.set()
        self._repeating.join()
        for key in self._values:
            self._set(key, math.nan)

    def _repeat(self) -> None:
        while not self._is_closed.wait(REPEAT_S):
            with self._lock:
                for key, value in self._values.items():
                    self._set(key, value)

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
        self._values[key] = value
        self._gauges[entry].set(value, tags={**self._run, **tags})
