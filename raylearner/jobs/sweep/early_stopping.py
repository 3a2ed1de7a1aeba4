"""Early stopping of trials, decided by Ray Tune's scheduler."""

from dataclasses import dataclass
from typing import Any

from raylearner.errors import ConfigError
from raylearner.jobs.sweep.section import AshaSection, SweepMetric


@dataclass(frozen=True, slots=True)
class _TuneTrial:
    """The only attribute of a trial that the scheduler reads."""

    trial_id: str


class Asha:
    """Decides at every new value of a trial whether it continues."""

    def __init__(self, config: AshaSection, metric: SweepMetric, *, max_steps: int) -> None:
        """Raises `ConfigError` if Ray Tune is not installed."""
        try:
            from ray.tune.schedulers import ASHAScheduler
        except ImportError as error:
            raise ConfigError(
                "early_stopping: Ray Tune is not installed; `pip install 'ray[tune]'`"
            ) from error
        self._scheduler: Any = ASHAScheduler(
            time_attr="step",
            metric="value",
            mode=metric.goal,
            max_t=max_steps,
            grace_period=config.grace_steps,
            reduction_factor=config.reduction_factor,
        )
        self._max_steps = max_steps
        self._last_steps: dict[int, int] = {}

    def should_stop(self, number: int, curve: list[tuple[int, float]]) -> bool:
        """Report all new values of trial `number` to the scheduler, which compares other trials with them."""
        trial = _TuneTrial(str(number))
        if number not in self._last_steps:
            self._scheduler.on_trial_add(None, trial)
            self._last_steps[number] = 0
        should_stop = False
        for step, value in curve:
            if step <= self._last_steps[number]:
                continue
            self._last_steps[number] = step
            result = {"step": step, "value": value}
            if self._scheduler.on_trial_result(None, trial, result) == "STOP":
                should_stop |= step < self._max_steps
        return should_stop
