"""Importance weights against a loop, and edge cases of corrections."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objectives import correct, correction_inputs, section_of
from pydantic import ValidationError
from torch import Tensor

from raylearner.learner.batch import metric
from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective import corrections
from raylearner.learner.objective.importance import (
    interpolated_proximal,
    log_ratios,
    normalize_weights,
    weight_mean,
)

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
@pytest.mark.parametrize("kind", ["tis", "icepop", "mis"])
def test_importance_weights_are_the_loop(level: str, kind: str) -> None:
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
        kept = min(max(weight, 0.8), 1.2) if kind == "tis" else weight * inside
        wanted.append(kept if mask[t] else 0.0)
    inputs = correction_inputs(log_ratio, mask, rows)
    found = correct(kind, inputs, level=level, low=0.8, high=1.2)
    torch.testing.assert_close(found.weights, torch.tensor(wanted, dtype=torch.float64))
    if kind == "tis":
        assert torch.equal(found.keep, mask)
    else:
        assert torch.equal(found.keep, found.weights > 0)


def test_kinds_of_importance_weights_have_their_own_defaults() -> None:
    found = {kind: section_of("correction", kind) for kind in ("tis", "icepop", "mis")}
    assert {kind: (s.level, s.low, s.high) for kind, s in found.items()} == {
        "tis": ("token", None, 2.0),
        "icepop": ("token", 0.5, 5.0),
        "mis": ("sequence", None, 2.0),
    }


def test_importance_weight_metrics_count_trained_tokens_and_rows() -> None:
    log_ratio, mask, rows = make_batch()
    found = correct("tis", correction_inputs(log_ratio, mask, rows), high=1.2)
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


def test_importance_ratio_quantiles_are_close() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = 0.3 * torch.randn(20000, generator=generator, dtype=torch.float64)
    rows = Rows.from_lengths([20000])
    mask = torch.ones(20000, dtype=torch.bool)
    measured = metric.values(correct("tis", correction_inputs(log_ratio, mask, rows)).metrics)
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
    found = correct("tis", correction_inputs(log_ratio, mask, rows), level=level, high=None)
    assert found.weights.isfinite().all()
    assert found.weights[mask].log().abs().max() <= 20.001


def test_unknown_behavior_gives_weight_one_and_masked_nan_does_no_harm() -> None:
    rows = Rows.from_lengths([3])
    mask = torch.tensor([True, True, False])
    behavior = torch.tensor([math.nan, -1.0, math.nan])
    log_ratio = log_ratios(torch.tensor([-2.0, -1.5, -3.0]), behavior, mask)
    assert log_ratio.tolist() == [0.0, -0.5, 0.0]
    weights = correct("tis", correction_inputs(log_ratio, mask, rows)).weights
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(-0.5), 0.0]))


def test_normalized_weights_have_mean_one() -> None:
    log_ratio, mask, rows = make_batch()
    inputs = correction_inputs(log_ratio, mask, rows)
    found = correct("tis", inputs)
    mean = weight_mean(found.weights, mask, rows, level="token").value()
    normalized = correct("tis", replace(inputs, batch_value=mean), normalize="token")
    assert normalized.weights[mask].mean().item() == pytest.approx(1)
    untouched = normalize_weights(found, 0.0)
    assert torch.equal(untouched.weights, found.weights)
    of_rows = weight_mean(found.weights, mask, rows, level="row").value()
    filled = rows.count(mask) > 0
    assert of_rows == pytest.approx(rows.mean(found.weights, mask)[filled].mean().item())


def test_k1_bounds_are_on_proximal_over_behavior() -> None:
    rows, mask = Rows.from_lengths([2]), torch.ones(2, dtype=torch.bool)
    inputs = correction_inputs(torch.tensor([math.log(1.4), math.log(0.8)]), mask, rows)
    found = correct("rejection", inputs, low=0.9, high=1.5)
    assert found.keep.tolist() == [True, False]
    assert found.metrics["rejection_token_k1/rejected_fraction"].value() == 0.5
    assert correct("rejection", inputs, high=1.2).keep.tolist() == [False, False]
    assert correct("geometric", inputs, high=1.2).keep.tolist() == [True, True]
    assert correct("geometric", inputs, high=1.05).keep.tolist() == [False, False]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("rejection", {"high": 0.0}),
        ("rejection", {"low": -1.0}),
        ("rejection", {"level": "word"}),
        ("tis", {"high": 0.0}),
        ("mis", {"level": "word"}),
        ("veto", {"threshold": 0.0}),
    ],
)
def test_invalid_keys_are_refused(kind: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(keys))):
        section_of("correction", kind, **keys)


def test_combined_corrections_keep_what_all_keep() -> None:
    log_ratio, mask, rows = make_batch()
    inputs = correction_inputs(log_ratio, mask, rows)
    sections = [
        section_of("correction", "tis"),
        section_of("correction", "rejection", high=1.3),
        section_of("correction", "rejection", level="sequence_mean", estimator="k3", high=0.2),
    ]
    found = corrections.correct(sections, inputs, [None] * 3)
    assert found is not None
    weights, by_token, by_row = (
        corrections.CORRECTIONS[section.kind](inputs, section) for section in sections
    )
    keep = by_token.keep & by_row.keep
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
    inputs = correction_inputs(log_ratio, mask, rows, advantages=advantages)
    found = correct("opsm", inputs)
    assert found.keep.tolist() == [False, False, True, True, True, False]
    assert found.metrics["opsm/row_rejected_fraction"].value() == pytest.approx(1 / 3)


def test_interpolated_proximal_lies_between_behavior_and_current() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]).requires_grad_()
    behavior = torch.tensor([-3.0, -3.0, -3.0, -3.0, math.nan])
    versions = torch.tensor([10, 9, 8, 6, -1])
    found = interpolated_proximal(current, behavior, versions, policy_version=10)
    assert not found.requires_grad
    torch.testing.assert_close(found[:4], torch.tensor([-3.0, -3.0, -2.0, -1.5]))
    assert found[4].isnan()  # nothing was sampled here: the behavior's value, whatever it is


def test_weights_carry_no_gradient() -> None:
    log_ratio, mask, rows = make_batch()
    found = correct("tis", correction_inputs(log_ratio.requires_grad_(), mask, rows))
    assert not found.weights.requires_grad
