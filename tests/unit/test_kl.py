"""Properties of KL estimators, penalties and controllers; the oracle has their values."""

import math
from typing import Any

import pytest
import torch

from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective.kl import (
    AdaptiveCoefficient,
    KlController,
    KlSection,
    kl_estimate,
    kl_in_reward,
    kl_loss,
)

POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
EXACT = float((POLICY * (POLICY / REFERENCE).log()).sum())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimators_are_unbiased(kind: Any) -> None:
    values = kl_estimate(POLICY.log(), REFERENCE.log(), KlSection(estimator=kind))
    assert float((POLICY * values).sum()) == pytest.approx(EXACT)


def test_straight_through_gradient_is_that_of_the_kl() -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64).requires_grad_()
    exact = (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE.log())).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    logprobs = logits.log_softmax(0)
    values = kl_estimate(
        logprobs, REFERENCE.log(), KlSection(estimator="k3", straight_through=True)
    )
    (actual,) = torch.autograd.grad((logits.softmax(0).detach() * values).sum(), logits)
    torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("extreme", [100.0, -100.0])
@pytest.mark.parametrize("limit", [10.0, None])
def test_extreme_differences_stay_finite(kind: Any, extreme: float, limit: float | None) -> None:
    logprobs = torch.tensor([extreme]).requires_grad_()
    config = KlSection(estimator=kind, value_limit=limit)
    values = kl_estimate(logprobs, torch.zeros(1), config)
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    assert values.isfinite().all()
    assert gradient.isfinite().all()
    if kind == "k3" and extreme < 0:
        assert (values.max() == 10) == (limit == 10)


def test_kl_loss_ignores_masked_tokens_and_may_weigh_by_the_ratio() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -2.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([-1.5, 0.0, math.inf], dtype=torch.float64)
    mask = torch.tensor([True, False, False])
    proximal = torch.tensor([-1.25, 0.0, 0.0], dtype=torch.float64)
    values, metrics = kl_loss(
        logprobs, reference, mask, KlSection(estimator="k1"), proximal_logprobs=proximal
    )
    assert values.tolist() == [0.5, 0.0, 0.0]
    assert metrics["kl"].value() == 0.5
    config = KlSection(estimator="k1", weighted=True)
    weighted, _ = kl_loss(logprobs, reference, mask, config, proximal_logprobs=proximal)
    assert weighted[0].item() == pytest.approx(0.5 * math.exp(0.25))
    (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
    torch.testing.assert_close(
        gradient, torch.tensor([1.5 * math.exp(0.25), 0, 0], dtype=torch.float64)
    )


def test_the_gradient_of_the_kl_loss_is_that_of_its_value() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference, proximal = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    for kind in ("k1", "k2", "k3"):
        config = KlSection(estimator=kind, weighted=True)
        assert torch.autograd.gradcheck(
            lambda x, config=config: kl_loss(
                x, reference, mask, config, proximal_logprobs=proximal
            )[0],
            (logprobs.clone().requires_grad_(),),
        )


def test_kl_in_reward_is_that_of_the_mask() -> None:
    rows = Rows.from_lengths([3, 1])
    mask = torch.tensor([True, False, True, False])
    proximal = torch.tensor([-1.0, math.nan, -1.0, -1.0])
    reference = torch.tensor([-2.0, -1.0, -4.0, -9.0])
    found, metrics = kl_in_reward(proximal, reference, mask, rows, KlSection(estimator="k1"))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 3.0, 0.0]))
    assert metrics["reward_kl"].value() == 2.0


def test_an_adaptive_coefficient_moves_by_a_bounded_step() -> None:
    adaptive = AdaptiveCoefficient(kind="adaptive", target=0.1, horizon=100)
    controller = KlController(KlSection(coefficient=0.1, controller=adaptive))
    controller.update(0.11, 10)
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    controller.update(50.0, 10)
    assert controller.coefficient == pytest.approx(0.101 * 1.02)
    controller.update(0.0, 10)
    assert controller.coefficient == pytest.approx(0.101 * 1.02 * 0.98)


def test_a_fixed_coefficient_stays() -> None:
    controller = KlController(KlSection(coefficient=0.3))
    controller.update(100.0, 5)
    assert controller.coefficient == 0.3
    assert KlController(None).coefficient == 0.0
