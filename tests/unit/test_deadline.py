"""When a run begins to stop, from the configuration or the scheduler's environment."""

import pytest

from raylearner.config.run import RunSection
from raylearner.errors import ConfigError
from raylearner.run.deadline import stop_time_s


@pytest.mark.parametrize(
    ("deadline", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"SLURM_JOB_END_TIME": "1000000"}, 1000000 - 300),
        (None, {"SLURM_JOB_END_TIME": "1", "RAYLEARNER_DEADLINE": "2000000"}, 2000000 - 300),
        ("1970-01-12T15:46:40+02:00", {"RAYLEARNER_DEADLINE": "5"}, 1000000 - 300),
        ("1970-01-12T13:46:40Z", {}, 1000000 - 300),
        (None, {"RAYLEARNER_DEADLINE": ""}, None),
    ],
)
def test_the_first_time_given_counts(
    deadline: str | None, environment: dict[str, str], expected: float | None
) -> None:
    assert stop_time_s(RunSection(deadline=deadline), environment) == expected


def test_the_margin_is_configured() -> None:
    run = RunSection(deadline="1000", deadline_margin_s=60)
    assert stop_time_s(run, {}) == 940


@pytest.mark.parametrize("text", ["tomorrow", "nan", "18:00"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"run.deadline: '{text}' is no time"):
        stop_time_s(RunSection(deadline=text), {})
    with pytest.raises(ConfigError, match="RAYLEARNER_DEADLINE: "):
        stop_time_s(RunSection(), {"RAYLEARNER_DEADLINE": text})
