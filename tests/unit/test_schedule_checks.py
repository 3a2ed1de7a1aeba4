"""Warm-ups that take the whole run, or more."""

from typing import Any

import pytest

from raylearner.config.checks import check, notes
from raylearner.config.schema import RunConfig
from raylearner.learner.optimizer import learning_rate_at


def config(num_steps: int, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"num_steps": num_steps},
            "model": {"kind": "tiny"},
            "data": {"train": {"kind": "calculator"}},
            "environment": {"kind": "single_turn"},
            "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
            "learner": {"compute_dtype": "float32", **learner},
        }
    )


def keys(*, of: RunConfig) -> list[str]:
    return [finding.key for finding in check(of)]


def told(*, of: RunConfig) -> bool:
    return any(note.startswith("learner.warmup_steps") for note in notes(of))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_beyond_the_run_is_refused_and_an_equal_one_is_noted(schedule: str) -> None:
    given: dict[str, Any] = {"schedule": schedule, "num_mini_batches": 2, "num_epochs": 3}
    longer = config(5, warmup_steps=31, **given)
    assert keys(of=longer) == ["learner.warmup_steps"]
    equal = config(5, warmup_steps=30, **given)
    assert keys(of=equal) == []
    assert told(of=equal)
    shorter = config(5, warmup_steps=29, **given)
    assert keys(of=shorter) == []
    assert not told(of=shorter)


def test_steps_that_train_the_critic_alone_warm_nothing_up() -> None:
    given: dict[str, Any] = {"advantage": {"kind": "gae"}, "critic": {"warmup_steps": 4}}
    assert "learner.warmup_steps" in keys(of=config(6, warmup_steps=3, **given))
    assert "learner.warmup_steps" not in keys(of=config(6, warmup_steps=2, **given))


def test_a_frozen_policy_has_no_warm_up() -> None:
    assert keys(of=config(2, warmup_steps=9, learning_rate=0)) == []


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("num_updates", "warmup"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5)])
def test_every_update_of_a_run_trains(schedule: Any, num_updates: int, warmup: int) -> None:
    rates = [
        learning_rate_at(u, peak=1.0, schedule=schedule, warmup=warmup, num_updates=num_updates)
        for u in range(num_updates)
    ]
    assert min(rates) > 0
    assert max(rates) == 1.0
