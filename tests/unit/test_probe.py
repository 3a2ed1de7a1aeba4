"""The probe of a push: prompts that no cache holds, and the largest log-probability error."""

import math
import pickle
from dataclasses import replace

import pytest

from raylearner.errors import WeightTransferError
from raylearner.weights.probe import logprob_error, probe_tokens, verify_logprobs
from raylearner.weights.update import Probe


def make_probe(logprobs: list[list[float]], tolerance: float = 1e-3) -> Probe:
    return Probe(
        token_ids=tuple(tuple(range(len(row) + 1)) for row in logprobs),
        logprobs=tuple(tuple(row) for row in logprobs),
        tolerance=tolerance,
    )


def draw(policy_version: int, **changes: object) -> tuple[tuple[int, ...], ...]:
    defaults = {"seed": 0, "vocab_size": 50, "special_token_ids": [0, 1, 49], "num_tokens": 16}
    return probe_tokens(policy_version=policy_version, **(defaults | changes))  # type: ignore[arg-type]


def test_probes_differ_between_versions_and_hold_ordinary_tokens_only() -> None:
    assert draw(3) == draw(3)
    assert draw(3) != draw(3, seed=1)
    sequences = [sequence for version in range(50) for sequence in draw(version)]
    assert len(set(sequences)) == len(sequences)
    assert {token for sequence in sequences for token in sequence} == set(range(2, 49))


@pytest.mark.parametrize("changes", [{"num_tokens": 1}, {"special_token_ids": range(50)}])
def test_a_probe_that_cannot_be_drawn_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="probe"):
        draw(0, **changes)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_an_infinite_error(value: float) -> None:
    assert logprob_error([[value]], make_probe([[-1.0]])) == math.inf
    with pytest.raises(WeightTransferError):
        verify_logprobs([[value]], make_probe([[-1.0]], tolerance=1e9), policy_version=1)


@pytest.mark.parametrize("answer", [[], [[-1.0]], [[-1.0, -2.0, -3.0]]])
def test_an_answer_of_another_shape_is_refused(answer: list[list[float]]) -> None:
    with pytest.raises(WeightTransferError):
        logprob_error(answer, make_probe([[-1.0, -2.0]]))


def test_the_largest_error_counts_and_beyond_the_tolerance_it_is_raised() -> None:
    probe = make_probe([[-1.0, -2.0], [-3.0, -4.0]], tolerance=0.5)
    assert verify_logprobs([[-1.0, -2.25], [-3.5, -4.0]], probe, policy_version=7) == 0.5
    with pytest.raises(WeightTransferError, match=r"version 7 .*0\.75") as caught:
        verify_logprobs([[-1.0, -2.25], [-3.75, -4.0]], probe, policy_version=7)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_mean_averages_over_all_tokens() -> None:
    probe = replace(make_probe([[-1.0] * 10], tolerance=0.25), statistic="mean")
    assert verify_logprobs([[-1.0] * 9 + [-3.0]], probe, policy_version=1) == pytest.approx(0.2)
    with pytest.raises(WeightTransferError, match="mean"):
        verify_logprobs([[-1.5] * 10], probe, policy_version=1)
