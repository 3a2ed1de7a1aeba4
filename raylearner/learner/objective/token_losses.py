"""Policy losses with a ratio per token.

Legend: `T` packed tokens, `R` rows. A is the advantage, pi the current, old the proximal and mu the
behavior policy; log-ratios are clamped to plus or minus 20 before `exp`. Weights from corrections
multiply every loss. All return token losses unless they say otherwise, and all report `approx_kl`.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from raylearner.learner.batch.metric import Max, Mean, Metrics
from raylearner.learner.batch.rows import clamp_log_ratio
from raylearner.learner.objective.corrections import importance_weights
from raylearner.learner.objective.masked import masked_mean
from raylearner.learner.objective.policy_loss import (
    LossInputs,
    LossOutput,
    kl_metrics,
    ratio_metrics,
    weigh,
)


def ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    delta: float | None = None,
) -> LossOutput:
    """max(-A R, -A clip(R, 1-clip_low, 1+clip_high)), R = pi / old (1707.06347, eq. 7).

    clip_high > clip_low is DAPO's clip-higher (2503.14476; 0.28). Where A < 0 the loss is at most
    -A * dual_clip (1912.09729; > 1, None for off). `delta` caps the unclipped ratio: the
    two-sided clip of INTELLECT-2 (2505.07291; > 1 + clip_high). Raises ValueError for a dual_clip
    of 1 or less.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: want > 1 or None, got {dual_clip!r}")
    inputs = inputs.selected()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    unclipped = -advantages * (ratio if delta is None else ratio.clamp(max=delta))
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    values = torch.maximum(unclipped, clipped)
    metrics: Metrics = {
        "clip_fraction": Mean.of(clipped > unclipped, mask),
        **ratio_metrics(
            ratio, advantages, mask, low=1 - clip_low, high=1 + clip_high, rows=inputs.rows
        ),
        **kl_metrics(log_ratio, mask),
    }
    if dual_clip is not None:
        bound = -advantages * dual_clip
        metrics["clip_fraction_dual"] = Mean.of((values > bound) & (advantages < 0), mask)
        values = torch.where(advantages < 0, torch.minimum(values, bound), values)
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    behavior_cap: float | None = 5.0,
    behavior_low: float | None = None,
    behavior_mode: Literal["filter", "cap"] = "filter",
    behavior_level: Literal["token", "geometric"] = "token",
) -> LossOutput:
    """PPO around the proximal policy, times old / mu (AReaL 2505.24298).

    A weight outside `behavior_low..behavior_cap` is set to 0 (`filter`, as AReaL does) or clamped
    (`cap`); filtered tokens stay in the denominators. `geometric` takes one weight per row, the
    exponential of its mean log-ratio. Weights from corrections multiply as well: give only keep
    masks there, or the same ratio counts twice.
    """
    chosen = inputs.selected()
    correction = importance_weights(
        *inputs.behavior_ratio(inputs.proximal_logprobs),
        inputs.rows,
        level=behavior_level,
        mode="mask" if behavior_mode == "filter" else "truncate",
        low=behavior_low,
        high=behavior_cap,
    )
    output = ppo(
        replace(inputs, weights=weigh(correction.weights, chosen.weights)),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    reported = ("mean", "max", "ess", "rejected_fraction")
    metrics: Metrics = {
        f"behavior_weight/{name}": correction.metrics[f"importance_weight/{name}"]
        for name in reported
    }
    return replace(output, metrics={**output.metrics, **metrics})


def cispo(inputs: LossInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> LossOutput:
    """-sg(clip(R, ratio_min, ratio_max)) A log pi, R = pi / old (MiniMax-M1 2506.13585).

    Bounds are on the ratio itself: ratio_max 5 is ScaleRL's (2510.13786) and TRL's `epsilon_high`;
    verl's clip_ratio_high is ratio_max - 1. Every token keeps a gradient.
    """
    inputs = inputs.selected()
    log_ratio = clamp_log_ratio(inputs.logprobs.detach() - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(ratio_min, ratio_max)
    values = -bounded * inputs.advantages * inputs.logprobs
    metrics: Metrics = {
        "clip_fraction": Mean.of(ratio != bounded, inputs.mask),
        **ratio_metrics(
            ratio, inputs.advantages, inputs.mask, low=ratio_min, high=ratio_max, rows=inputs.rows
        ),
        **kl_metrics(log_ratio, inputs.mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def sapo(
    inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (R - 1)), tau by the sign of A (2511.20347).

    A smooth gate in the place of a clip; meant for `sequence_mean_of_means`.
    """
    inputs = inputs.selected()
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    tau = torch.full_like(log_ratio, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    values = weigh(-gate * inputs.advantages, inputs.weights)
    return LossOutput(values=values, level="token", metrics=kl_metrics(log_ratio, inputs.mask))


def _dppo(inputs: LossInputs, keep: Tensor, *, ratio_cap: float) -> LossOutput:
    """The DPPO loss of selected inputs, given which tokens are inside the trust region."""
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
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def dppo_tv(
    inputs: LossInputs,
    *,
    divergence_low: float = 0.15,
    divergence_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> LossOutput:
    """-A sg(min(R, ratio_cap)) log pi inside a trust region of total variation (2602.04879).

    A token trains while its probability has not moved past the bound in the direction of A:
    p - p_old <= divergence_high if A > 0, >= -divergence_low otherwise.
    """
    inputs = inputs.selected()
    moved = inputs.logprobs.detach().exp() - inputs.proximal_logprobs.exp()
    keep = torch.where(inputs.advantages > 0, moved <= divergence_high, moved >= -divergence_low)
    return _dppo(inputs, keep, ratio_cap=ratio_cap)


def dppo_kl(
    inputs: LossInputs,
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> LossOutput:
    """As `dppo_tv`, with the KL of "this token or another" as the divergence (2602.04879).

    A token trains while that KL is within the bound or its probability moves back toward old.
    """
    inputs = inputs.selected()
    logprobs, old_logprobs = inputs.logprobs.detach(), inputs.proximal_logprobs
    prob, old_prob = logprobs.exp(), old_logprobs.exp()
    others = ((1 - old_prob + 1e-8) / (1 - prob + 1e-8)).log()
    divergence = old_prob * (old_logprobs - logprobs) + (1 - old_prob) * others
    keep = torch.where(
        inputs.advantages > 0,
        (divergence <= divergence_high) | (prob <= old_prob),
        (divergence <= divergence_low) | (prob >= old_prob),
    )
    return _dppo(inputs, keep, ratio_cap=ratio_cap)


def gppo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """PPO's value, but a clipped ratio keeps a gradient: bound * R / sg(R) (2508.07629).

    The released code also caps negative advantages as a dual clip of 1, which the paper does not
    have and which stops their gradient wherever R > 1; it is left out here.
    """
    inputs = inputs.selected()
    advantages, mask = inputs.advantages, inputs.mask
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.proximal_logprobs)
    ratio = log_ratio.exp()
    low, high = 1 - clip_low, 1 + clip_high
    is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    bound = ratio.detach().clamp(low, high) * (log_ratio - log_ratio.detach()).exp()
    values = -advantages * torch.where(is_clipped, bound, ratio)
    metrics: Metrics = {
        "clip_fraction": Mean.of(is_clipped, mask),
        **ratio_metrics(ratio, advantages, mask, low=low, high=high, rows=inputs.rows),
        **kl_metrics(log_ratio, mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def _covariance(inputs: LossInputs) -> Tensor:
    """(A - mean A) (log pi - mean log pi) over the trained tokens passed in, detached: `[T]`."""
    logprobs, advantages, mask = inputs.logprobs.detach(), inputs.advantages, inputs.mask
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drop_ratio: float = 0.0002,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    generator: torch.Generator | None = None,
    chosen: Tensor | None = None,  # [T] bool
) -> LossOutput:
    """PPO without a random `drop_ratio` of the tokens of high covariance (2505.22617).

    Those tokens are `chosen`, or else what `clip_cov_choice` finds among the tokens passed in.
    """
    if chosen is None:
        chosen = clip_cov_choice(
            inputs,
            clip_low=clip_low,
            clip_high=clip_high,
            drop_ratio=drop_ratio,
            covariance_low=covariance_low,
            covariance_high=covariance_high,
            generator=generator,
        )
    output = ppo(
        replace(inputs, weights=None), clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    inputs = inputs.selected()
    values = torch.where(chosen, torch.zeros_like(output.values), output.values)
    metrics: Metrics = {**output.metrics, "clip_fraction": Mean.of(chosen, inputs.mask)}
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def clip_cov_choice(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drop_ratio: float = 0.0002,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The tokens that Clip-Cov takes the gradient from: `[T] bool`.

    Candidates are tokens that PPO does not clip and whose covariance of A and log pi lies strictly
    between the bounds; max(1, int(drop_ratio * tokens)) of them are chosen. Means and counts are
    those of the tokens passed in: pass all of an update.
    """
    inputs = inputs.selected()
    mask, advantages = inputs.mask, inputs.advantages
    ratio = clamp_log_ratio(inputs.logprobs.detach() - inputs.proximal_logprobs).exp()
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high) > -advantages * ratio
    covariance = _covariance(inputs)
    is_candidate = (covariance > covariance_low) & (covariance < covariance_high)
    candidates = torch.nonzero(is_candidate & mask & ~clipped).squeeze(1)
    num_dropped = max(int(drop_ratio * int(mask.sum())), 1)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    chosen = torch.zeros_like(mask)
    chosen[candidates[order[:num_dropped]]] = True
    return chosen


def kl_cov(
    inputs: LossInputs,
    *,
    top_ratio: float = 0.0002,
    kl_coefficient: float = 1.0,
    chosen: Tensor | None = None,  # [T] bool
) -> LossOutput:
    """-A R, plus kl_coefficient |log R| on the tokens of highest covariance (2505.22617).

    Those tokens are `chosen`, or else what `kl_cov_choice` finds among the tokens passed in.
    """
    if chosen is None:
        chosen = kl_cov_choice(inputs, top_ratio=top_ratio)
    inputs = inputs.selected()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    values = -inputs.advantages * clamp_log_ratio(log_ratio).exp()
    penalty = torch.where(chosen, log_ratio.abs(), torch.zeros_like(log_ratio))
    values = weigh(values + kl_coefficient * penalty, inputs.weights)
    metrics: Metrics = {
        "penalized_fraction": Mean.of(chosen, inputs.mask),
        **kl_metrics(log_ratio, inputs.mask),
    }
    return LossOutput(values=values, level="token", metrics=metrics)


def kl_cov_choice(inputs: LossInputs, *, top_ratio: float = 0.0002) -> Tensor:
    """The max(1, int(top_ratio * tokens)) tokens of highest covariance, of those passed in: `[T]`."""
    inputs = inputs.selected()
    place = torch.nonzero(inputs.mask).squeeze(1)
    chosen = torch.zeros_like(inputs.mask)
    if len(place):
        num_top = max(1, int(len(place) * top_ratio))
        chosen[place[_covariance(inputs)[place].topk(num_top).indices]] = True
    return chosen


def gpg(inputs: LossInputs) -> LossOutput:
    """-A log pi, the plain policy gradient (2504.02546); weights make it any reweighing."""
    inputs = inputs.selected()
    values = weigh(-inputs.advantages * inputs.logprobs, inputs.weights)
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    return LossOutput(values=values, level="token", metrics=kl_metrics(log_ratio, inputs.mask))


def reinforce(
    inputs: LossInputs,
    *,
    level: Literal["token", "sequence"] = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    ratio_low: float | None = None,
    ratio_cap: float | None = 2.0,
) -> LossOutput:
    """-sg(min(pi / mu, ratio_cap)) A log pi: REINFORCE with truncated importance sampling.

    The ratio is to the behavior policy, per token (AIPO of LlamaRL, 2505.24034) or the product over
    the row. Weights from corrections multiply as well: give only keep masks there.
    """
    behavior_ratio = inputs.behavior_ratio(inputs.logprobs)
    inputs = inputs.selected()
    correction = importance_weights(
        *behavior_ratio,
        inputs.rows,
        level=level,
        mode=mode,
        low=ratio_low,
        high=ratio_cap,
    )
    values = -correction.weights * inputs.advantages * inputs.logprobs
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    metrics: Metrics = {**kl_metrics(log_ratio, inputs.mask), **correction.metrics}
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)


def topr(
    inputs: LossInputs,
    *,
    level: Literal["token", "sequence"] = "sequence",
    ratio_cap: float = 1.0,
) -> LossOutput:
    """-A log pi for good rows, -sg(min(pi / mu, ratio_cap)) A log pi for bad ones (2503.14286).

    Good rows have a reward > 0 or, when no rewards are given, an advantage > 0: their gradient is
    not reweighed, that of bad ones is tapered. The paper's ratio is the whole row's.
    """
    behavior_ratio = inputs.behavior_ratio(inputs.logprobs)
    inputs = inputs.selected()
    correction = importance_weights(
        *behavior_ratio,
        inputs.rows,
        level=level,
        high=ratio_cap,
    )
    outcome = inputs.row_advantages() if inputs.rewards is None else inputs.rewards
    is_good = inputs.rows.spread(outcome > 0)
    taper = torch.where(is_good, 1.0, correction.weights)
    values = -taper * inputs.advantages * inputs.logprobs
    metrics: Metrics = {
        "tapered_fraction": Mean.of(~is_good, inputs.mask),
        "taper_max": Max.of(taper, inputs.mask),
        **kl_metrics(inputs.logprobs - inputs.proximal_logprobs, inputs.mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), level="token", metrics=metrics)
