"""When a run must be over: the end of an allocation, before which a checkpoint is written."""

import math
from collections.abc import Mapping
from datetime import datetime

from raylearner.config.run import RunSection
from raylearner.errors import ConfigError

VARIABLES = ("RAYLEARNER_DEADLINE", "SLURM_JOB_END_TIME")
"""Looked at in this order where `run.deadline` is not set."""


def stop_time_s(run: RunSection, environment: Mapping[str, str]) -> float | None:
    """Seconds since 1970 at which to begin to stop, `deadline_margin_s` before the end; None for never.

    Raises `ConfigError` naming the key or variable whose value is no time.
    """
    if run.deadline is not None:
        return _seconds(run.deadline, "run.deadline") - run.deadline_margin_s
    for name in VARIABLES:
        if environment.get(name):
            return _seconds(environment[name], name) - run.deadline_margin_s
    return None


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            seconds = math.nan
        else:
            seconds = moment.timestamp()  # local time where it names no offset
    if not math.isfinite(seconds):
        raise ConfigError(
            f"{where}: {text!r} is no time; give ISO 8601 such as 2026-05-01T18:00+02:00, or seconds "
            "since 1970"
        )
    return seconds
