"""Importance weights and rejection against loops, and their edge cases."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from raylearner.learner.batch import metric
from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective import corrections

LENGTHS = [4, 0, 6, 2]


def make_batch(scale: float = 0.5) -> tuple[Tensor, Tensor, Rows]:
    """Log-ratios, a mask with holes and a row that does not train."""
    generator = torch.Generator().manual_seed(3)
    rows = Rows.from_lengths(LENGTHS)
    log_ratio = scale * torch.randn(rows.num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
    return log_ratio, mask, rows


def by_row(log_ratio: Tensor, mask: Tensor, rows: Rows) -> list[list[float]]:
    return [log_ratio[(rows.index == row) & mask].tolist() for row in range(rows.num_rows)]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_weights_are_the_loop(level: Any, mode: Any) -> None:
    log_ratio, mask, rows = make_batch()
    wanted: list[float] = []
    for t in range(rows.num_tokens):
        own = by_row(log_ratio, mask, rows)[int(rows.index[t])]
        if level == "token":
            weight = math.exp(float(log_ratio[t]))
        else:
            total = sum(own) / (len(own) or 1 if level == "geometric" else 1)
            weight = math.exp(total)
        inside = 0.8 <= weight <= 1.2
        kept = min(max(weight, 0.8), 1.2) if mode == "truncate" else weight * inside
        wanted.append(kept if mask[t] else 0.0)
    found = corrections.importance_weights(
        log_ratio, mask, rows, level=level, mode=mode, low=0.8, high=1.2
    )
    torch.testing.assert_close(found.weights, torch.tensor(wanted, dtype=torch.float64))
    if mode == "truncate":
        assert torch.equal(found.keep, mask)
    else:
        assert torch.equal(found.keep, found.weights > 0)


def test_importance_weight_metrics_count_trained_tokens_and_rows() -> None:
    log_ratio, mask, rows = make_batch()
    found = corrections.importance_weights(log_ratio, mask, rows, high=1.2)
    measured = metric.values(found.metrics)
    weights, raw = found.weights[mask], log_ratio[mask].exp()
    assert measured["importance_weight/mean"] == pytest.approx(weights.mean().item())
    assert measured["importance_weight/std"] == pytest.approx(weights.std(correction=0).item())
    ess = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert measured["importance_weight/ess"] == pytest.approx(ess.item())
    assert measured["importance_ratio/max"] == pytest.approx(raw.max().item())
    assert measured["importance_ratio/fraction_high"] == pytest.approx(
        (raw > 1.2).double().mean().item()
    )
    assert measured["importance_weight/row_min"] > 0
    counted = corrections.importance_weights(log_ratio, mask, rows, high=1.2, count_empty_rows=True)
    assert metric.values(counted.metrics)["importance_weight/row_min"] == 0


def test_importance_ratio_quantiles_are_close() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.3 * torch.randn(20000, generator=generator, dtype=torch.float64)
    rows = Rows.from_lengths([20000])
    mask = torch.ones(20000, dtype=torch.bool)
    measured = metric.values(corrections.importance_weights(log_ratio, mask, rows).metrics)
    for name, quantile in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        wanted = float(log_ratio.quantile(quantile))
        assert math.log(measured[f"importance_ratio/{name}"]) == pytest.approx(
            wanted, rel=0.02, abs=0.003
        )


@pytest.mark.parametrize("extreme", [100.0, -100.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_extreme_log_ratios_stay_finite(extreme: float, level: Any) -> None:
    _, mask, rows = make_batch()
    log_ratio = torch.full((rows.num_tokens,), extreme)
    found = corrections.importance_weights(log_ratio, mask, rows, level=level, high=None)
    assert found.weights.isfinite().all()
    assert found.weights[mask].log().abs().max() <= 20.001


def test_unknown_behavior_gives_weight_one_and_masked_nan_does_no_harm() -> None:
    rows = Rows.from_lengths([3])
    mask = torch.tensor([True, True, False])
    behavior = torch.tensor([math.nan, -1.0, math.nan])
    log_ratio = corrections.log_ratios(torch.tensor([-2.0, -1.5, -3.0]), behavior, mask)
    assert log_ratio.tolist() == [0.0, -0.5, 0.0]
    weights = corrections.importance_weights(log_ratio, mask, rows).weights
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(-0.5), 0.0]))


def test_normalized_weights_have_mean_one() -> None:
    log_ratio, mask, rows = make_batch()
    found = corrections.importance_weights(log_ratio, mask, rows)
    mean = corrections.weight_mean(found.weights, mask, rows)
    normalized = corrections.normalize_weights(found, mean.value())
    assert normalized.weights[mask].mean().item() == pytest.approx(1)
    untouched = corrections.normalize_weights(found, 0.0)
    assert torch.equal(untouched.weights, found.weights)
    of_rows = corrections.weight_mean(found.weights, mask, rows, level="row").value()
    filled = rows.count(mask) > 0
    assert of_rows == pytest.approx(rows.mean(found.weights, mask)[filled].mean().item())


ESTIMATORS = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: math.exp(x) - 1 - x,
}


LEVELS = ["token", "sequence_sum", "sequence_mean", "sequence_max"]


@pytest.mark.parametrize(
    ("level", "estimator"),
    [(level, "k1") for level in LEVELS[:3]]
    + [(level, estimator) for level in LEVELS for estimator in ("k2", "k3")],
)
def test_rejection_is_the_loop(level: Any, estimator: Any) -> None:
    log_ratio, mask, rows = make_batch()
    low, high = (0.7, 1.2) if estimator == "k1" else (None, 0.1)
    lower = -math.inf if low is None else math.log(low)
    upper = high if low is None else math.log(high)
    wanted: list[bool] = []
    for t in range(rows.num_tokens):
        own = [ESTIMATORS[estimator](x) for x in by_row(log_ratio, mask, rows)[rows.index[t]]]
        statistic = {
            "token": ESTIMATORS[estimator](float(log_ratio[t])),
            "sequence_sum": sum(own),
            "sequence_mean": sum(own) / (len(own) or 1),
            "sequence_max": max(own, default=0.0),
        }[level]
        wanted.append(bool(mask[t]) and lower <= statistic <= upper)
    found = corrections.rejection_mask(
        log_ratio, mask, rows, level=level, estimator=estimator, low=low, high=high
    )
    assert found.keep.tolist() == wanted
    rejected = 1 - sum(wanted) / int(mask.sum())
    name = f"rejection_{level}_{estimator}/rejected_fraction"
    assert found.metrics[name].value() == pytest.approx(rejected)


def test_k1_bounds_are_on_proximal_over_behavior_unless_inverted() -> None:
    rows, mask = Rows.from_lengths([2]), torch.ones(2, dtype=torch.bool)
    log_ratio = torch.tensor([math.log(1.4), math.log(0.8)])
    options: Any = {"low": 0.9, "high": 1.5}
    assert corrections.rejection_mask(log_ratio, mask, rows, **options).keep.tolist() == [
        True,
        False,
    ]
    inverse = corrections.rejection_mask(log_ratio, mask, rows, k1_bounds="inverse", **options)
    assert inverse.keep.tolist() == [False, True]
    alone = corrections.rejection_mask(log_ratio, mask, rows, high=1.2)
    assert alone.keep.tolist() == [False, False]


@pytest.mark.parametrize(
    "options",
    [
        {"level": "sequence_max", "estimator": "k1", "high": 2.0},
        {"high": 0.0},
        {"high": 2.0, "low": -1.0},
        {"high": 2.0, "level": "word"},
    ],
)
def test_rejections_that_make_no_sense_are_refused(options: Any) -> None:
    log_ratio, mask, rows = make_batch()
    with pytest.raises(ValueError, match=r"estimator|low and high|level"):
        corrections.rejection_mask(log_ratio, mask, rows, **options)


def test_combined_corrections_keep_what_all_keep() -> None:
    log_ratio, mask, rows = make_batch()
    weights = corrections.importance_weights(log_ratio, mask, rows)
    of_tokens = corrections.rejection_mask(log_ratio, mask, rows, high=1.3)
    of_rows = corrections.rejection_mask(
        log_ratio, mask, rows, level="sequence_mean", estimator="k3", high=0.2
    )
    found = corrections.combine_corrections([weights, of_tokens, of_rows], mask, rows)
    keep = of_tokens.keep & of_rows.keep
    assert torch.equal(found.keep, keep)
    torch.testing.assert_close(found.weights, torch.where(keep, weights.weights, 0.0))
    assert found.metrics["corrections/rejected_fraction"].value() == pytest.approx(
        1 - keep.sum().item() / mask.sum().item()
    )


def test_opsm_drops_stale_rows_of_negative_advantage() -> None:
    rows = Rows.from_lengths([2, 2, 1, 1])
    mask = torch.tensor([True, True, True, True, True, False])
    log_ratio = torch.tensor([-1.0, -0.2, -1.0, -1.0, 0.9, -9.0])
    advantages = rows.spread(torch.tensor([-1.0, 1.0, -1.0, -1.0]))
    found = corrections.opsm_mask(log_ratio, advantages, mask, rows, threshold=0.5)
    assert found.keep.tolist() == [False, False, True, True, True, False]
    assert found.metrics["opsm/row_rejected_fraction"].value() == pytest.approx(1 / 3)


def test_veto_drops_a_row_for_one_token() -> None:
    rows = Rows.from_lengths([2, 2])
    mask = torch.tensor([True, True, True, False])
    log_ratio = torch.tensor([0.0, -12.0, 0.0, -12.0])
    found = corrections.veto_mask(log_ratio, mask, rows)
    assert found.keep.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="threshold"):
        corrections.veto_mask(log_ratio, mask, rows, threshold=0.0)


def test_high_entropy_mask_keeps_the_most_uncertain() -> None:
    rows, mask = Rows.from_lengths([6]), torch.tensor([True] * 5 + [False])
    entropy = torch.tensor([0.1, 0.9, 0.5, 0.2, 0.7, 99.0])
    kept = corrections.high_entropy_mask(entropy, mask, rows, top_fraction=0.25).keep
    assert kept.tolist() == [False, True, False, False, True, False]
    every = corrections.high_entropy_mask(entropy, mask, rows, top_fraction=1.0).keep
    assert torch.equal(every, mask)


@pytest.mark.parametrize("space", ["log", "probability"])
def test_interpolated_proximal_lies_between_behavior_and_current(space: Any) -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]).requires_grad_()
    behavior = torch.tensor([-3.0, -3.0, -3.0, -3.0, math.nan])
    versions = torch.tensor([10, 9, 8, 6, -1])
    found = corrections.interpolated_proximal(
        current, behavior, versions, policy_version=10, space=space
    )
    assert not found.requires_grad
    if space == "log":
        wanted = [-3.0, -3.0, -2.0, -1.5]
    else:
        mixed = [0.5 * math.exp(-3) + 0.5 * math.exp(-1), 0.25 * math.exp(-3) + 0.75 * math.exp(-1)]
        wanted = [-3.0, -3.0, *(math.log(p) for p in mixed)]
    torch.testing.assert_close(found[:4], torch.tensor(wanted))
    assert found[4].isnan()  # nothing was sampled here: the behavior's value, whatever it is


@pytest.mark.parametrize(
    "options", [{"high": 0.0}, {"low": 3.0}, {"level": "word"}, {"mode": "word"}]
)
def test_weights_that_make_no_sense_are_refused(options: Any) -> None:
    log_ratio, mask, rows = make_batch()
    with pytest.raises(ValueError, match=r"high|level|mode"):
        corrections.importance_weights(log_ratio, mask, rows, **options)


def test_weights_carry_no_gradient() -> None:
    log_ratio, mask, rows = make_batch()
    found = corrections.importance_weights(log_ratio.requires_grad_(), mask, rows)
    assert not found.weights.requires_grad
