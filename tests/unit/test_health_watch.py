"""Warnings about a run that does not learn or wastes its hardware: when, once, and which keys they name."""

import logging
from typing import Any

import pytest
from minimal import QUICKSTART

from raylearner.config.loader import load
from raylearner.observability.health_watch import WINDOW_STEPS, HealthWatch

HEALTHY = {
    "rollout/reward/mean": 0.4,
    "learner/zero_variance_fraction": 0.3,
    "learner/importance_weight/ess": 0.95,
    "learner/on_policy_gap/mean": 0.01,
    "learner/logprob_gap/mean": 0.05,
    "learner/idle_fraction": 0.2,
    "rollout/idle_fraction": 0.1,
}


def make_watch(*overrides: str) -> HealthWatch:
    config = load([QUICKSTART], list(overrides))
    return HealthWatch(config.replay, config.weights)


def play(*rows: dict[str, Any], num_steps: int = 2 * WINDOW_STEPS + 2, **keys: Any) -> None:
    """Look at `num_steps` healthy steps with the changes of `rows`, the last one repeated."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    watch = make_watch(*overrides)
    for step in range(1, num_steps + 1):
        watch.look({**HEALTHY, "step": float(step), **rows[min(step, len(rows)) - 1]})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"learner/zero_variance_fraction": 0.95},
            ("learner/zero_variance_fraction", "sampling.temperature", "replay.group_size"),
        ),
        (
            {"learner/importance_weight/ess": 0.3},
            ("learner/importance_weight/ess", "replay.max_staleness", "30%"),
        ),
        (
            {"learner/on_policy_gap/mean": 0.2},
            ("learner/on_policy_gap/mean", "actors.engine.dtype"),
        ),
        ({"learner/logprob_gap/mean": 0.5}, ("learner/logprob_gap/mean", "learner.learning_rate")),
        ({"learner/idle_fraction": 0.8}, ("learner/idle_fraction", "actors.num_actors")),
        ({"rollout/idle_fraction": 0.8}, ("rollout/idle_fraction", "replay.max_staleness")),
    ],
)
def test_each_problem_is_reported_once_with_its_metric_and_keys(
    warnings: pytest.LogCaptureFixture, change: dict[str, float], named: tuple[str, ...]
) -> None:
    play(change)
    [message] = warnings.messages
    assert all(name in message for name in named)


def test_a_healthy_run_and_a_short_disturbance_are_silent(
    warnings: pytest.LogCaptureFixture,
) -> None:
    play({})
    play(*[{"learner/idle_fraction": 0.9}] * 3, {})
    play({"learner/importance_weight/ess": float("nan")})
    assert not warnings.messages


def test_a_metric_that_is_missing_is_not_judged(warnings: pytest.LogCaptureFixture) -> None:
    watch = make_watch()
    for step in range(3 * WINDOW_STEPS):
        watch.look({"step": float(step)})
    assert not warnings.messages


def test_sides_of_a_synchronous_run_wait_by_design(warnings: pytest.LogCaptureFixture) -> None:
    idle = {"learner/idle_fraction": 0.8, "rollout/idle_fraction": 0.8}
    play(idle, replay__max_staleness=0)
    assert not warnings.messages


def test_the_data_source_that_fails_is_named(warnings: pytest.LogCaptureFixture) -> None:
    rows = [
        {
            f"rollout/source/{source}/{what}": count * step
            for source, failed in (("good", 1), ("bad\x1b[2J", 7))
            for what, count in (("episodes", 8), ("errors", failed))
        }
        for step in range(2 * WINDOW_STEPS)
    ]
    play(*rows)
    [message] = warnings.messages
    assert "70 of the last 80 episodes of the data source bad" in message
    assert "failures.jsonl" in message


def test_a_rollback_forgets_the_steps_that_were_lost(warnings: pytest.LogCaptureFixture) -> None:
    watch = make_watch()
    for step in [*range(1, WINDOW_STEPS), *range(1, WINDOW_STEPS)]:
        watch.look({**HEALTHY, "step": float(step), "learner/idle_fraction": 0.9})
    assert not warnings.messages
