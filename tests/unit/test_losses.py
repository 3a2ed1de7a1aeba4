"""Properties of policy and value losses: gradients, extremes, packing and micro-batches."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objectives import aggregate_output, loss_of, section_of
from pydantic import ValidationError
from torch import Tensor

from raylearner.learner.batch import metric
from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective.loss import LossInputs
from raylearner.learner.objective.losses import POLICY_LOSSES, entropy_bonus
from raylearner.learner.objective.value_loss import CriticSection, value_loss

LENGTHS = [5, 3, 0, 7, 1, 4]
KINDS = sorted(set(POLICY_LOSSES) - {"custom"})
OPTIONS: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "luspo": {"clip_low": 0.05, "clip_high": 0.05},
    "kl_cov": {"top_ratio": 0.2},
    "clip_cov": {"drop_ratio": 1.0, "covariance_low": 0.01},
}
OTHER_FORMS = [
    ("gspo", {"form": "sequence", "clip_low": 0.05, "clip_high": 0.05}),
    ("dro", {"form": "sequence"}),
    ("topr", {"level": "token"}),
    ("reinforce", {"level": "sequence"}),
    ("decoupled_ppo", {"behavior_level": "geometric", "behavior_mode": "cap"}),
    ("ppo", {"dual_clip": None, "delta": 1.3}),
]
ALL_FORMS = [(kind, OPTIONS.get(kind, {})) for kind in KINDS] + OTHER_FORMS


def make_inputs(seed: int = 0, *, spread: float = 0.3, lengths: list[int] = LENGTHS) -> LossInputs:
    """Float64 inputs with holes in the mask; advantages are constant in a row."""
    generator = torch.Generator().manual_seed(seed)
    rows = Rows.from_lengths(lengths)

    def draw(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    behavior = -draw(rows.num_tokens).abs() - 0.05
    proximal = behavior + spread * draw(rows.num_tokens)
    logprobs = (proximal + spread * draw(rows.num_tokens)).requires_grad_()
    advantages = draw(rows.num_rows)
    return LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=rows.spread(advantages),
        rewards=advantages,
        mask=torch.rand(rows.num_tokens, generator=generator) < 0.7,
        rows=rows,
    )


def whole_loss(
    inputs: LossInputs, kind: str, options: dict[str, Any], **counts: Any
) -> tuple[Tensor, Tensor]:
    """The loss with GRPO's aggregation and its gradient by log-probabilities."""
    output = loss_of(inputs, kind, **options)
    defaults: dict[str, Any] = {
        "mode": "sequence_mean_of_means",
        "num_tokens": int(inputs.mask.sum()),
        "num_rows": 6,
    }
    loss = aggregate_output(output, inputs, **{**defaults, **counts})
    return loss.detach(), torch.autograd.grad(loss, inputs.logprobs)[0]


@pytest.mark.parametrize(("kind", "options"), ALL_FORMS)
def test_masked_tokens_never_reach_loss_gradient_or_metrics(
    kind: str, options: dict[str, Any]
) -> None:
    inputs = make_inputs()
    poisoned = replace(
        inputs,
        logprobs=torch.where(inputs.mask, inputs.logprobs, math.nan).detach().requires_grad_(),
        proximal_logprobs=torch.where(inputs.mask, inputs.proximal_logprobs, -math.inf),
        behavior_logprobs=torch.where(inputs.mask, inputs.behavior_logprobs, math.nan),
        advantages=torch.where(inputs.mask, inputs.advantages, math.inf),
        weights=torch.where(inputs.mask, 1.0, math.nan).double(),
    )
    clean = replace(inputs, weights=torch.ones_like(inputs.advantages))
    torch.testing.assert_close(
        whole_loss(poisoned, kind, options), whole_loss(clean, kind, options)
    )
    found = metric.values(loss_of(poisoned, kind, **options).metrics)
    wanted = metric.values(loss_of(clean, kind, **options).metrics)
    assert found == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize(("kind", "options"), ALL_FORMS)
def test_packed_equals_padded(kind: str, options: dict[str, Any]) -> None:
    inputs = make_inputs()
    width = max(LENGTHS) + 2
    places = torch.cat([torch.arange(length) + width * i for i, length in enumerate(LENGTHS)])

    def pad(values: Tensor) -> Tensor:
        return values.new_zeros(width * len(LENGTHS)).index_put((places,), values)

    padded = LossInputs(
        logprobs=pad(inputs.logprobs.detach()).requires_grad_(),
        proximal_logprobs=pad(inputs.proximal_logprobs),
        behavior_logprobs=pad(inputs.behavior_logprobs),
        advantages=pad(inputs.advantages),
        rewards=inputs.rewards,
        mask=pad(inputs.mask),
        rows=Rows.from_lengths([width] * len(LENGTHS)),
    )
    loss, gradient = whole_loss(inputs, kind, options)
    padded_loss, padded_gradient = whole_loss(padded, kind, options)
    torch.testing.assert_close(padded_loss, loss)
    torch.testing.assert_close(padded_gradient[places], gradient)


@pytest.mark.parametrize(
    ("kind", "options"),
    # Covariances are those of the tokens passed in, so a split changes them.
    [form for form in ALL_FORMS if form[0] not in ("clip_cov", "kl_cov")],
)
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_of_means"])
def test_micro_batches_add_up(kind: str, options: dict[str, Any], mode: str) -> None:
    inputs = make_inputs()
    counts = {"mode": mode, "num_tokens": int(inputs.mask.sum()), "num_rows": 6}
    loss, gradient = whole_loss(inputs, kind, options, **counts)
    total = torch.zeros_like(loss)
    gradients: list[Tensor] = []
    measured: list[metric.Metrics] = []
    for chosen in ([0, 1], [2, 3], [4, 5]):
        tokens = torch.isin(inputs.rows.index, torch.tensor(chosen))
        part = LossInputs(
            logprobs=inputs.logprobs.detach()[tokens].requires_grad_(),
            proximal_logprobs=inputs.proximal_logprobs[tokens],
            behavior_logprobs=inputs.behavior_logprobs[tokens],
            advantages=inputs.advantages[tokens],
            rewards=inputs.rewards[chosen],
            mask=inputs.mask[tokens],
            rows=Rows.from_lengths([LENGTHS[row] for row in chosen]),
        )
        share, share_gradient = whole_loss(part, kind, options, **counts)
        total = total + share
        gradients.append(share_gradient)
        measured.append(loss_of(part, kind, **options).metrics)
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(torch.cat(gradients), gradient)
    whole = loss_of(inputs, kind, **options).metrics
    assert metric.values(metric.combine(measured)) == pytest.approx(
        metric.values(whole), nan_ok=True
    )


@pytest.mark.parametrize(("kind", "options"), ALL_FORMS)
@pytest.mark.parametrize("extreme", [100.0, -100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(
    kind: str, options: dict[str, Any], extreme: float, dtype: torch.dtype
) -> None:
    inputs = make_inputs()
    inputs = replace(
        inputs,
        logprobs=(inputs.logprobs.detach() - 200).to(dtype).requires_grad_(),
        proximal_logprobs=(inputs.logprobs.detach() - 200 - extreme).to(dtype),
        behavior_logprobs=(inputs.logprobs.detach() - 200 + extreme).to(dtype),
        advantages=inputs.advantages.to(dtype),
    )
    loss, gradient = whole_loss(inputs, kind, options)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("kind", "options"), ALL_FORMS)
def test_all_masked_is_zero_with_zero_gradient(kind: str, options: dict[str, Any]) -> None:
    inputs = make_inputs()
    inputs = replace(inputs, mask=torch.zeros_like(inputs.mask))
    for mode in ("token_mean", "sequence_mean_of_means"):
        loss, gradient = whole_loss(inputs, kind, options, mode=mode, num_tokens=0, num_rows=0)
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize(
    ("kind", "options"), [form for form in ALL_FORMS if form[0] not in ("gmpo", "kl_cov")]
)
def test_rejected_rows_lose_their_loss_but_stay_in_the_denominator(
    kind: str, options: dict[str, Any]
) -> None:
    inputs = make_inputs()
    keep = inputs.rows.index != 3
    rejected = replace(inputs, weights=keep.double())
    dropped = replace(inputs, mask=inputs.mask & keep)
    if kind == "clip_cov":
        options = {**options, "covariance_low": 1e9}  # its statistics see what the mask shows
    torch.testing.assert_close(
        whole_loss(rejected, kind, options, num_tokens=13),
        whole_loss(dropped, kind, options, num_tokens=13),
    )


@pytest.mark.parametrize("mode", ["filter", "cap"])
def test_decoupled_ppo_weighs_by_proximal_over_behavior(mode: str) -> None:
    inputs = make_inputs(2)
    weights = (inputs.proximal_logprobs - inputs.behavior_logprobs).exp()
    cap = float(weights[inputs.mask].median())
    bounded = weights.clamp(max=cap) if mode == "cap" else torch.where(weights > cap, 0, weights)
    torch.testing.assert_close(
        whole_loss(inputs, "decoupled_ppo", {"behavior_cap": cap, "behavior_mode": mode}),
        whole_loss(replace(inputs, weights=bounded), "ppo", {"dual_clip": None}),
    )
    found = loss_of(inputs, "decoupled_ppo", behavior_cap=cap, behavior_mode=mode)
    if mode == "filter":
        wanted = (weights > cap)[inputs.mask].double().mean().item()
        assert found.metrics["behavior_weight/rejected_fraction"].value() == pytest.approx(wanted)


def test_gspo_forms_agree_for_advantages_of_rows() -> None:
    inputs = make_inputs(3)
    options = {"clip_low": 0.05, "clip_high": 0.05}
    # Row 4 has a single token; rows that do not train count in neither.
    torch.testing.assert_close(
        whole_loss(inputs, "gspo", {**options, "form": "token"}),
        whole_loss(inputs, "gspo", {**options, "form": "sequence"}),
    )


def test_clip_cov_drops_as_many_tokens_as_asked() -> None:
    inputs = make_inputs(7, spread=0.05)
    options = {"drop_ratio": 0.2, "covariance_low": -100.0, "covariance_high": 100.0}
    output = loss_of(inputs, "clip_cov", **options)
    num_tokens = int(inputs.mask.sum())
    wanted = max(int(0.2 * num_tokens), 1) / num_tokens
    assert output.metrics["clip_fraction"].value() == pytest.approx(wanted)


def test_dro_sequence_is_the_sum_over_the_row() -> None:
    inputs = make_inputs(8)
    wanted = 0.0
    for row in range(6):
        chosen = (inputs.rows.index == row) & inputs.mask
        if chosen.any():
            total = float(inputs.logprobs.detach()[chosen].sum())
            moved = total - float(inputs.proximal_logprobs[chosen].sum())
            advantage = float(inputs.advantages[chosen][0])
            wanted -= (advantage * total - 0.2 / 2 * moved**2) / 6
    loss, _ = whole_loss(inputs, "dro", {"form": "sequence", "beta": 0.2})
    assert loss.item() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ppo", {"clip_low": 0.9, "clip_high": 9.0}),
        ("ppo", {"dual_clip": None, "delta": 30.0}),
        ("sequence_ratio", {"clip_low": 0.99, "clip_high": 50.0}),
        ("gspo", {"form": "sequence", "clip_low": 0.9, "clip_high": 9.0}),
        ("gmpo", {}),
        ("luspo", {"clip_low": 0.9, "clip_high": 9.0}),
        ("sapo", {}),
        ("dro", {}),
        ("dro", {"form": "sequence"}),
        ("gpg", {}),
        ("kl_cov", {"top_ratio": 1.0}),
    ],
)
def test_gradients_of_differentiable_losses(kind: str, options: dict[str, Any]) -> None:
    inputs = make_inputs(9, lengths=[3, 2])

    def loss(logprobs: Tensor) -> Tensor:
        return loss_of(replace(inputs, logprobs=logprobs), kind, **options).values

    assert torch.autograd.gradcheck(loss, (inputs.logprobs,))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ppo", {"dual_clip": 1.0}),
        ("dro", {"beta": 0.0}),
        ("gspo", {"form": "word"}),
        ("reinforce", {"ratio_cap": 0.0}),
        ("gpg", {"clip_low": 0.1}),
    ],
)
def test_invalid_options_are_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        section_of("loss", kind, **options)


def test_on_policy_losses_share_the_policy_gradient() -> None:
    inputs = make_inputs(10)
    inputs = replace(
        inputs,
        proximal_logprobs=inputs.logprobs.detach(),
        behavior_logprobs=inputs.logprobs.detach(),
    )
    _, wanted = whole_loss(inputs, "gpg", {})
    same = (
        "ppo",
        "decoupled_ppo",
        "gspo",
        "cispo",
        "gppo",
        "reinforce",
        "topr",
        "dppo_tv",
        "dppo_kl",
        "vespo",
        "sapo",
        "dro",
        "gmpo",
    )
    for kind in same:
        _, gradient = whole_loss(inputs, kind, {})
        torch.testing.assert_close(gradient, wanted, msg=kind)


def test_entropy_bonus_is_the_negated_entropy_on_the_mask() -> None:
    entropy = torch.tensor([1.0, math.nan, 3.0])
    values, metrics = entropy_bonus(entropy, torch.tensor([True, False, True]))
    assert values.tolist() == [-1.0, 0.0, -3.0]
    assert metric.values(metrics) == {"entropy": 2.0, "entropy_max": 3.0, "entropy_min": 1.0}


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_value_loss_takes_the_worse_of_plain_and_clipped(kind: Any) -> None:
    values = torch.tensor([0.0, 2.0, 30.0, math.nan], dtype=torch.float64).requires_grad_()
    old = torch.tensor([0.0, 0.0, 0.0, math.nan], dtype=torch.float64)
    returns = torch.tensor([1.0, 3.0, -5.0, math.nan], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])

    def loss(error: float) -> float:
        if kind == "huber" and abs(error) > 10:
            return 10 * (abs(error) - 5)
        return error**2 / 2

    found, metrics = value_loss(values, old, returns, mask, CriticSection(loss=kind))
    wanted = [loss(-1.0), max(loss(-1.0), loss(-2.5)), loss(35.0), 0.0]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    assert metrics["value_clip_fraction"].value() == pytest.approx(1 / 3)
    found.sum().backward()
    assert values.grad is not None
    assert values.grad[3] == 0
    # The clipped prediction is constant, so the second token has no gradient.
    assert values.grad[1] == 0


def test_value_loss_without_a_clip_is_half_the_squared_error() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    mask = torch.ones(8, dtype=torch.bool)
    found, metrics = value_loss(values, old, returns, mask, CriticSection(clip=None))
    torch.testing.assert_close(found, (values - returns) ** 2 / 2)
    wanted = 1 - (returns - values).var() / (returns.var() + 1e-5)
    assert metrics["explained_variance"].value() == pytest.approx(wanted.item())
    leaf = values.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, CriticSection())[0], (leaf,)
    )


def test_clip_fractions_are_those_of_the_trained_tokens_and_rows() -> None:
    inputs = make_inputs(4, spread=0.6)
    found = metric.values(loss_of(inputs, "ppo", clip_low=0.1, clip_high=0.1).metrics)
    ratio = (inputs.logprobs - inputs.proximal_logprobs).exp().detach()
    low = (ratio < 0.9) & (inputs.advantages < 0) & inputs.mask
    high = (ratio > 1.1) & (inputs.advantages > 0) & inputs.mask
    by_row = [
        (low[own].double().mean().item(), high[own].double().mean().item())
        for row in range(6)
        if (own := (inputs.rows.index == row) & inputs.mask).any()
    ]
    num_tokens = int(inputs.mask.sum())
    wanted = {
        "clip_fraction_low": int(low.sum()) / num_tokens,
        "clip_fraction_high": int(high.sum()) / num_tokens,
        "clip_fraction_region": int((low | high).sum()) / num_tokens,
        "clip_fraction_low_min": min(below for below, _ in by_row),
        "clip_fraction_high_max": max(above for _, above in by_row),
        "ratio_max": ratio[inputs.mask].max().item(),
        "ratio_min": ratio[inputs.mask].min().item(),
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert low.any()
    assert high.any()
    moved = (inputs.logprobs - inputs.proximal_logprobs).detach()[inputs.mask]
    assert found["approx_kl"] == pytest.approx(-moved.mean().item())
    assert found["approx_kl_k3"] == pytest.approx((moved.exp() - 1 - moved).mean().item())
    assert found["approx_kl_abs"] == pytest.approx(moved.abs().mean().item())
