"""Policy losses with a ratio per token, or without one.

Legend: `T` packed tokens, `R` rows. A is the advantage, pi the current and old the proximal policy,
R = pi / old; log-ratios are clamped to plus or minus 20 before `exp`. Weights from corrections
multiply every loss. All return token losses and report `approx_kl`.
"""

from typing import ClassVar, Literal

from raylearner.config.section import NonNegativeFloat, PositiveFloat
from raylearner.learner.batch.metric import Mean, Metrics
from raylearner.learner.batch.rows import clamp_log_ratio
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.loss import (
    AboveOne,
    ClippedLoss,
    Loss,
    LossInputs,
    LossOutput,
    kl_metrics,
    ratio_metrics,
    weigh,
)


class Ppo(ClippedLoss):
    """Clipped ratio per token (1707.06347); clip_high 0.28 is DAPO's (2503.14476)."""

    kind: Literal["ppo"]
    dual_clip: AboveOne | None = 3.0
    """Maximum factor of a negative advantage (1912.09729); None for off."""
    delta: AboveOne | None = None
    """Cap of the unclipped ratio (2505.07291), above 1 + clip_high; None for off."""


def ppo(inputs: LossInputs, config: Ppo) -> LossOutput:
    """max(-A R, -A clip(R, 1-clip_low, 1+clip_high)) (1707.06347, eq. 7).

    Where A < 0 the loss is at most -A * dual_clip. `delta` caps the unclipped ratio: the two-sided
    clip of INTELLECT-2.
    """
    return clipped_ratio(
        inputs,
        low=1 - config.clip_low,
        high=1 + config.clip_high,
        dual_clip=config.dual_clip,
        delta=config.delta,
    )


def clipped_ratio(
    inputs: LossInputs, *, low: float, high: float, dual_clip: float | None, delta: float | None
) -> LossOutput:
    """Return PPO's loss, which other kinds build on."""
    inputs = inputs.without_masked()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    unclipped = -advantages * (ratio if delta is None else ratio.clamp(max=delta))
    clipped = -advantages * ratio.clamp(low, high)
    values = torch.maximum(unclipped, clipped)
    metrics: Metrics = {
        "clip_fraction": Mean.of(clipped > unclipped, mask),
        **ratio_metrics(ratio, advantages, mask, low=low, high=high, rows=inputs.rows),
        **kl_metrics(log_ratio, mask),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        metrics["clip_fraction_dual"] = Mean.of((values > bound) & (advantages < 0), mask)
        values = torch.where(advantages < 0, torch.minimum(values, bound), values)
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class Gppo(ClippedLoss):
    """PPO whose clipped tokens keep a gradient (2508.07629)."""

    kind: Literal["gppo"]


def gppo(inputs: LossInputs, config: Gppo) -> LossOutput:
    """PPO's value, but a clipped ratio keeps a gradient: bound * R / sg(R).

    The released code also caps negative advantages as a dual clip of 1, which the paper does not
    have and which stops their gradient wherever R > 1; it is left out here.
    """
    inputs = inputs.without_masked()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    bound = ratio.detach().clamp(low, high) * (log_ratio - log_ratio.detach()).exp()
    values = -advantages * torch.where(is_clipped, bound, ratio)
    metrics: Metrics = {
        "clip_fraction": Mean.of(is_clipped, mask),
        **ratio_metrics(ratio, advantages, mask, low=low, high=high, rows=inputs.rows),
        **kl_metrics(log_ratio, mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class Cispo(Loss):
    """Policy gradient weighted by a clipped, detached ratio (2506.13585, 2510.13786)."""

    kind: Literal["cispo"]
    ratio_min: NonNegativeFloat = 0.0
    """Minimum ratio."""
    ratio_max: PositiveFloat = 5.0
    """Maximum ratio, itself and not its distance from 1."""


def cispo(inputs: LossInputs, config: Cispo) -> LossOutput:
    """-sg(clip(R, ratio_min, ratio_max)) A log pi.

    Bounds are on the ratio itself: ratio_max 5 is ScaleRL's and TRL's `epsilon_high`; verl's
    clip_ratio_high is ratio_max - 1. Every token keeps a gradient.
    """
    inputs = inputs.without_masked()
    low, high = config.ratio_min, config.ratio_max
    log_ratio = clamp_log_ratio(inputs.logprobs.detach() - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(low, high)
    values = -bounded * inputs.advantages * inputs.logprobs
    metrics: Metrics = {
        "clip_fraction": Mean.of(ratio != bounded, inputs.mask),
        **ratio_metrics(
            ratio, inputs.advantages, inputs.mask, low=low, high=high, rows=inputs.rows
        ),
        **kl_metrics(log_ratio, inputs.mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class Sapo(Loss):
    """A smooth gate in place of a clip (2511.20347); for sequence_mean_of_means."""

    kind: Literal["sapo"]
    tau_positive: PositiveFloat = 1.0
    """Sharpness for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """Sharpness for negative advantages."""


def sapo(inputs: LossInputs, config: Sapo) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (R - 1)), tau by the sign of A."""
    inputs = inputs.without_masked()
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    tau = torch.full_like(log_ratio, config.tau_negative)
    tau = tau.masked_fill(inputs.advantages > 0, config.tau_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    values = weigh(-gate * inputs.advantages, inputs.weights)
    return LossOutput(values=values, metrics=kl_metrics(log_ratio, inputs.mask))


class DppoTv(Loss):
    """Trust region of total variation (2602.04879)."""

    kind: Literal["dppo_tv"]
    divergence_low: PositiveFloat = 0.15
    """Maximum decrease of a probability."""
    divergence_high: PositiveFloat = 0.15
    """Maximum increase of a probability."""
    ratio_cap: PositiveFloat = 20.0
    """Maximum ratio."""


def dppo_tv(inputs: LossInputs, config: DppoTv) -> LossOutput:
    """-A sg(min(R, ratio_cap)) log pi inside a trust region of total variation.

    A token trains while its probability has not moved past the bound in the direction of A:
    p - p_old <= divergence_high if A > 0, >= -divergence_low otherwise.
    """
    inputs = inputs.without_masked()
    moved = inputs.logprobs.detach().exp() - inputs.proximal_logprobs.exp()
    keep = torch.where(
        inputs.advantages > 0, moved <= config.divergence_high, moved >= -config.divergence_low
    )
    return _dppo(inputs, keep, ratio_cap=config.ratio_cap)


class DppoKl(Loss):
    """Trust region of binary KL (2602.04879)."""

    kind: Literal["dppo_kl"]
    divergence_low: PositiveFloat = 0.05
    """Bound for negative advantages, in nats."""
    divergence_high: PositiveFloat = 0.05
    """Bound for positive advantages, in nats."""
    ratio_cap: PositiveFloat = 20.0
    """Maximum ratio."""


def dppo_kl(inputs: LossInputs, config: DppoKl) -> LossOutput:
    """As `dppo_tv`, with the KL of "this token or another" as the divergence.

    A token trains while that KL is within the bound or its probability moves back toward old.
    """
    inputs = inputs.without_masked()
    logprobs, old_logprobs = inputs.logprobs.detach(), inputs.proximal_logprobs
    prob, old_prob = logprobs.exp(), old_logprobs.exp()
    others = ((1 - old_prob + 1e-8) / (1 - prob + 1e-8)).log()
    divergence = old_prob * (old_logprobs - logprobs) + (1 - old_prob) * others
    keep = torch.where(
        inputs.advantages > 0,
        (divergence <= config.divergence_high) | (prob <= old_prob),
        (divergence <= config.divergence_low) | (prob >= old_prob),
    )
    return _dppo(inputs, keep, ratio_cap=config.ratio_cap)


def _dppo(inputs: LossInputs, keep: Tensor, *, ratio_cap: float) -> LossOutput:
    """Return the DPPO loss, given which tokens are inside the trust region."""
    mask = inputs.mask
    log_ratio = clamp_log_ratio(inputs.logprobs.detach() - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    values = -inputs.advantages * ratio.clamp(max=ratio_cap) * inputs.logprobs
    values = torch.where(keep, values, torch.zeros_like(values))
    metrics: Metrics = {
        "clip_fraction": Mean.of(~keep, mask),
        "ratio_cap_fraction": Mean.of((ratio > ratio_cap) & keep, mask),
        **kl_metrics(log_ratio, mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class Gpg(Loss):
    """The plain policy gradient (2504.02546)."""

    kind: Literal["gpg"]
    uses_proximal: ClassVar[bool] = False


def gpg(inputs: LossInputs, config: Gpg) -> LossOutput:
    """-A log pi; weights make it any reweighting."""
    inputs = inputs.without_masked()
    values = weigh(-inputs.advantages * inputs.logprobs, inputs.weights)
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    return LossOutput(values=values, metrics=kl_metrics(log_ratio, inputs.mask))
