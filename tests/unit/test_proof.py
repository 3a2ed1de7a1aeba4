"""The proof: probes that no cache has seen, and a gap that nothing slips through."""

import math
import pickle
from dataclasses import replace

import pytest

from raylearner.errors import WeightTransferError
from raylearner.types import Probe
from raylearner.weights.proof import check, gap, probe_tokens


def make_probe(logprobs: list[list[float]], tolerance: float = 1e-3) -> Probe:
    return Probe(
        token_ids=tuple(tuple(range(len(row) + 1)) for row in logprobs),
        logprobs=tuple(tuple(row) for row in logprobs),
        tolerance=tolerance,
    )


def draw(
    policy_version: int, *, seed: int = 0, num_tokens: int = 16
) -> tuple[tuple[int, ...], ...]:
    return probe_tokens(
        seed=seed,
        policy_version=policy_version,
        vocab_size=50,
        special_token_ids=[0, 1, 49],
        num_tokens=num_tokens,
    )


def test_probes_differ_between_versions_and_are_the_same_for_one() -> None:
    assert draw(3) == draw(3)
    sequences = [sequence for version in range(50) for sequence in draw(version)]
    assert len(set(sequences)) == len(sequences)
    assert draw(3) != draw(3, seed=1)


def test_probes_hold_ordinary_tokens_only() -> None:
    seen = {token for version in range(50) for row in draw(version) for token in row}
    assert seen == set(range(2, 49))


@pytest.mark.parametrize(("num_tokens", "special"), [(1, [0]), (4, range(50))])
def test_a_probe_that_cannot_be_drawn_is_refused(num_tokens: int, special: list[int]) -> None:
    with pytest.raises(ValueError, match="probe"):
        probe_tokens(
            seed=0,
            policy_version=0,
            vocab_size=50,
            special_token_ids=special,
            num_tokens=num_tokens,
        )


def test_gap_is_the_largest_difference() -> None:
    probe = make_probe([[-1.0, -2.0], [-3.0, -4.0]])
    assert gap([[-1.0, -2.25], [-3.5, -4.0]], probe) == 0.5


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_is_an_infinite_gap(value: float) -> None:
    assert gap([[value]], make_probe([[-1.0]])) == math.inf
    with pytest.raises(WeightTransferError):
        check([[value]], make_probe([[-1.0]], tolerance=1e9), policy_version=1)


@pytest.mark.parametrize("answer", [[], [[-1.0]], [[-1.0, -2.0, -3.0]]])
def test_an_answer_of_another_shape_is_no_proof(answer: list[list[float]]) -> None:
    with pytest.raises(WeightTransferError, match="probe prompt"):
        gap(answer, make_probe([[-1.0, -2.0]]))


def test_check_returns_a_small_gap_and_raises_a_large_one_with_the_numbers() -> None:
    probe = make_probe([[-1.0]], tolerance=0.25)
    assert check([[-1.25]], probe, policy_version=7) == 0.25
    with pytest.raises(
        WeightTransferError, match=r"version 7 .* 0\.5 \(max\), allowed are 0\.25"
    ) as caught:
        check([[-1.5]], probe, policy_version=7)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_mean_forgives_one_token_and_not_all_of_them() -> None:
    probe = replace(make_probe([[-1.0] * 10], tolerance=0.25), statistic="mean")
    assert check([[-1.0] * 9 + [-3.0]], probe, policy_version=1) == pytest.approx(0.2)
    with pytest.raises(WeightTransferError, match=r"\(mean\)"):
        check([[-1.5] * 10], probe, policy_version=1)
