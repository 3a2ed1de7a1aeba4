"""Diagnostics against plain formulas, and metrics that combine over any split."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from raylearner.learner.batch import metric
from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective import diagnostics

LENGTHS = [4, 3, 0, 5, 2]


def make_batch() -> tuple[Rows, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = Rows.from_lengths(LENGTHS)
    behavior = -torch.rand(rows.num_tokens, generator=generator, dtype=torch.float64) * 2
    proximal = behavior + 0.2 * torch.randn(rows.num_tokens, generator=generator)
    mask = torch.rand(rows.num_tokens, generator=generator) < 0.7
    mask[rows.index == 4] = False
    return rows, mask, proximal, behavior


def test_logprob_gap_is_of_log_probabilities_and_of_probabilities() -> None:
    _, mask, proximal, behavior = make_batch()
    measured = metric.values(diagnostics.logprob_gap(proximal, behavior, mask))
    p, q = proximal[mask].numpy(), behavior[mask].numpy()
    gap, difference = np.abs(p - q), np.abs(np.exp(p) - np.exp(q))
    assert measured == pytest.approx(
        {
            "logprob_gap/mean": gap.mean(),
            "logprob_gap/max": gap.max(),
            "logprob_gap/std": gap.std(ddof=1),
            "probability_gap/mean": difference.mean(),
            "probability_gap/max": difference.max(),
            "probability_gap/std": difference.std(ddof=1),
            "probability_gap/correlation": np.corrcoef(np.exp(p), np.exp(q))[0, 1],
            "behavior_unknown_fraction": 0.0,
        }
    )


def test_unknown_behavior_is_left_out_and_counted() -> None:
    mask = torch.tensor([True, True, True, False])
    proximal = torch.tensor([-1.0, -1.0, -2.0, math.nan])
    behavior = torch.tensor([-1.5, math.nan, -2.0, math.nan])
    measured = metric.values(diagnostics.logprob_gap(proximal, behavior, mask))
    assert measured["logprob_gap/mean"] == pytest.approx(0.25)
    assert measured["behavior_unknown_fraction"] == pytest.approx(1 / 3)


def test_off_policy_measures_rows_that_train() -> None:
    rows, mask, proximal, behavior = make_batch()
    measured = metric.values(diagnostics.off_policy(proximal, behavior, mask, rows))
    means_p, means_q, sums = [], [], []
    for row in range(rows.num_rows):
        own = (rows.index == row) & mask
        if own.any():
            means_p.append(float(proximal[own].mean()))
            means_q.append(float(behavior[own].mean()))
            sums.append(float((proximal - behavior)[own].sum()))
    gaps = np.array(means_q) - np.array(means_p)
    ratio = (proximal - behavior)[mask]
    wanted = {
        "perplexity/proximal": np.exp(-np.array(means_p)).mean(),
        "perplexity/behavior": np.exp(-np.array(means_q)).mean(),
        "log_perplexity/proximal": -np.mean(means_p),
        "log_perplexity/behavior": -np.mean(means_q),
        "perplexity_gap/mean": gaps.mean(),
        "perplexity_gap/abs_mean": np.abs(gaps).mean(),
        "perplexity_gap/max": gaps.max(),
        "perplexity_gap/min": gaps.min(),
        "perplexity_gap/ratio": np.exp(gaps).mean(),
        "off_policy_kl": -float(ratio.mean()),
        "off_policy_kl_k3": float((ratio.exp() - 1 - ratio).mean()),
        "chi2/token": float((2 * ratio).exp().mean()) - 1,
        "chi2/row": np.exp(2 * np.array(sums)).mean() - 1,
    }
    assert measured == pytest.approx(wanted)


@pytest.mark.parametrize("extreme", [100.0, -100.0])
def test_off_policy_stays_finite(extreme: float) -> None:
    rows, mask, _, behavior = make_batch()
    measured = diagnostics.off_policy((behavior + extreme).float(), behavior.float(), mask, rows)
    for name, value in metric.values(measured).items():
        assert math.isfinite(value), name


def test_staleness_is_a_histogram_of_ages() -> None:
    rows = Rows.from_lengths([3, 2])
    versions = torch.tensor([5, 4, -1, 1, 5])
    mask = torch.tensor([True, True, False, True, True])
    measured = metric.values(
        diagnostics.staleness(versions, mask, rows, policy_version=5, num_bins=3)
    )
    assert measured == {
        "token_staleness/mean": 1.25,
        "token_staleness/max": 4.0,
        "token_staleness/min": 0.0,
        "staleness_fraction/0": 0.5,
        "staleness_fraction/1": 0.25,
        "staleness_fraction/2+": 0.25,
        "version_span/mean": 3.5,
        "version_span/max": 5.0,
        "version_span/min": 2.0,
    }


def test_groups_of_equal_rewards_are_counted_once_each() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, math.nan, 2.0])
    ids = torch.tensor([9, 9, 4, 4, 4, 7])
    measured = metric.values(diagnostics.groups(rewards, ids))
    assert measured["zero_variance_fraction"] == pytest.approx(2 / 3)
    assert measured["single_group_fraction"] == pytest.approx(1 / 3)
    assert measured["unscorable_fraction"] == pytest.approx(1 / 6)
    assert measured["reward/mean"] == 1.0


def test_gradient_power_is_the_squared_score_of_the_logits() -> None:
    logits = torch.tensor([[0.2, -1.0, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    chosen = torch.tensor([2, 0])
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)[torch.arange(2), chosen]
    (score,) = torch.autograd.grad(logprobs.sum(), leaf)
    measured = metric.values(
        diagnostics.gradient_power(
            torch.full((2,), 3.0, dtype=torch.float64),
            logprobs,
            logits.softmax(-1).square().sum(-1),
            torch.ones(2, dtype=torch.bool),
            Rows.from_lengths([2]),
        )
    )
    assert measured["gradient_power/total"] == pytest.approx(9 * float(score.square().sum()))
    noise = diagnostics.gradient_noise(10.0, 2.0, 4)
    assert noise == {"gradient_power/signal": 4.0, "gradient_power/noise": 2.0}
    assert diagnostics.gradient_noise(1.0, 2.0, 4)["gradient_power/noise"] == 0.0


def split_by_row(rows: Rows, chosen: list[int]) -> tuple[Tensor, Rows]:
    tokens = torch.isin(rows.index, torch.tensor(chosen))
    return tokens, Rows.from_lengths([LENGTHS[row] for row in chosen])


def test_metrics_combine_over_micro_batches_and_ranks() -> None:
    rows, mask, proximal, behavior = make_batch()
    whole = diagnostics.off_policy(proximal, behavior, mask, rows)
    whole.update(diagnostics.logprob_gap(proximal, behavior, mask))
    parts: list[metric.Metrics] = []
    for chosen in ([0, 2], [1], [3, 4]):
        tokens, own = split_by_row(rows, chosen)
        part = diagnostics.off_policy(proximal[tokens], behavior[tokens], mask[tokens], own)
        part.update(diagnostics.logprob_gap(proximal[tokens], behavior[tokens], mask[tokens]))
        parts.append(part)
    assert metric.values(metric.combine(parts)) == pytest.approx(metric.values(whole))

    sums, maxima = zip(*(metric.flatten(part) for part in parts), strict=True)
    reduced = metric.unflatten(
        parts[0], torch.stack(sums).sum(0), torch.stack(maxima).max(0).values
    )
    assert metric.values(reduced) == pytest.approx(metric.values(whole))


def test_metrics_of_nothing_are_nan_and_do_not_disturb() -> None:
    empty, none = torch.zeros(0), torch.zeros(3, dtype=torch.bool)
    values = torch.tensor([1.0, math.nan, 3.0])
    some = torch.tensor([True, False, True])
    for kind in (metric.Mean, metric.Std, metric.Max, metric.Min, metric.EffectiveFraction):
        assert math.isnan(kind.of(empty).value())
        assert math.isnan(kind.of(values, none).value())
        known = kind.of(values, some)
        assert known.combine(kind.of(values, none)).value() == known.value()
    assert metric.Max.of(values, some).value() == 3.0
    assert metric.Min.of(values, some).value() == 1.0
    assert metric.flatten({})[0].numel() == 0


def test_explained_variance_and_correlation_of_constants_are_defined() -> None:
    ones, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    assert metric.ExplainedVariance.of(ones, ones, mask).value() == pytest.approx(1.0)
    assert math.isnan(metric.Correlation.of(ones, ones, mask).value())
