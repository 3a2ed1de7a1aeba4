"""Policy losses that single out tokens by the covariance of their advantage and log-probability.

Legend: `T` packed tokens. The tokens are selected among all tokens of an update, over all ranks,
and passed to the loss as `LossInputs.selected_tokens`.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from raylearner.config.section import Fraction, NonNegativeFloat
from raylearner.learner.batch.metric import Mean, Metrics
from raylearner.learner.batch.rows import clamp_log_ratio
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.loss import (
    ClippedLoss,
    Loss,
    LossInputs,
    LossOutput,
    kl_metrics,
    weigh,
)
from raylearner.learner.objective.ratio_losses import clipped_ratio
from raylearner.learner.objective.statistics import masked_mean


class ClipCov(ClippedLoss):
    """PPO without a random few of the tokens of high covariance (2505.22617)."""

    kind: Literal["clip_cov"]
    selects_tokens: ClassVar[bool] = True
    drop_ratio: Fraction = 0.0002
    """Share of the update's tokens that get no gradient; at least one token."""
    covariance_low: float = 1.0
    """Candidates have a covariance of advantage and log-probability above this,"""
    covariance_high: float = 5.0
    """and below this."""


def clip_cov(inputs: LossInputs, config: ClipCov) -> LossOutput:
    """PPO without the selected tokens."""
    selected = _selected(inputs)
    output = clipped_ratio(
        replace(inputs, weights=None),
        low=1 - config.clip_low,
        high=1 + config.clip_high,
        dual_clip=None,
        delta=None,
    )
    inputs = inputs.without_masked()
    values = torch.where(selected, torch.zeros_like(output.values), output.values)
    metrics: Metrics = {**output.metrics, "clip_fraction": Mean.of(selected, inputs.mask)}
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class KlCov(Loss):
    """A penalty on the tokens of highest covariance (2505.22617)."""

    kind: Literal["kl_cov"]
    selects_tokens: ClassVar[bool] = True
    top_ratio: Fraction = 0.0002
    """Share of the update's tokens that are penalized; at least one token."""
    kl_coefficient: NonNegativeFloat = 1.0
    """Weight of the penalty |log-ratio|."""


def kl_cov(inputs: LossInputs, config: KlCov) -> LossOutput:
    """-A R, plus kl_coefficient |log R| on the selected tokens."""
    selected = _selected(inputs)
    inputs = inputs.without_masked()
    log_ratio = inputs.logprobs - inputs.proximal_logprobs
    values = -inputs.advantages * clamp_log_ratio(log_ratio).exp()
    penalty = torch.where(selected, log_ratio.abs(), torch.zeros_like(log_ratio))
    values = weigh(values + config.kl_coefficient * penalty, inputs.weights)
    metrics: Metrics = {
        "penalized_fraction": Mean.of(selected, inputs.mask),
        **kl_metrics(log_ratio, inputs.mask),
    }
    return LossOutput(values=values, metrics=metrics)


def select_tokens(inputs: LossInputs, config: ClipCov | KlCov, *, seed: int) -> Tensor:
    """Return the tokens that the loss singles out among those passed in: `[T] bool`.

    `kl_cov` takes the max(1, int(top_ratio * tokens)) of highest covariance. Candidates of
    `clip_cov` are tokens that PPO does not clip and whose covariance lies strictly between the
    bounds; max(1, int(drop_ratio * tokens)) of them are drawn.
    """
    inputs = inputs.without_masked()
    mask, advantages = inputs.mask, inputs.advantages
    selected = torch.zeros_like(mask)
    covariance = _covariance(inputs)
    if isinstance(config, KlCov):
        place = torch.nonzero(mask).squeeze(1)
        if len(place):
            num_top = max(1, int(len(place) * config.top_ratio))
            selected[place[covariance[place].topk(num_top).indices]] = True
        return selected
    ratio = clamp_log_ratio(inputs.logprobs.detach() - inputs.proximal_logprobs).exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    is_clipped = -advantages * bounded > -advantages * ratio
    is_candidate = (covariance > config.covariance_low) & (covariance < config.covariance_high)
    candidates = torch.nonzero(is_candidate & mask & ~is_clipped).squeeze(1)
    num_dropped = max(int(config.drop_ratio * int(mask.sum())), 1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    selected[candidates[order[:num_dropped]]] = True
    return selected


def _covariance(inputs: LossInputs) -> Tensor:
    """Return (A - mean A) (log pi - mean log pi) over the trained tokens, detached: `[T]`."""
    logprobs, advantages, mask = inputs.logprobs.detach(), inputs.advantages, inputs.mask
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected_tokens is None:
        raise ValueError("selected_tokens: required by losses that select tokens")
    return inputs.selected_tokens
