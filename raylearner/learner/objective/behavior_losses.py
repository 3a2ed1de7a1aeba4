"""Policy losses that weigh tokens by learner against behavior probability themselves.

Legend: `T` packed tokens, `R` rows. A is the advantage, pi the current, old the proximal and mu the
behavior policy. Weights from corrections multiply as well: only rejecting ones belong there, or the
same ratio would count twice, which `check` refuses. All return token losses.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from raylearner.config.section import PositiveFloat
from raylearner.learner.batch.metric import Max, Mean, Metrics
from raylearner.learner.batch.rows import Rows
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.importance import Correction, importance_weights
from raylearner.learner.objective.loss import (
    AboveOne,
    ClippedLoss,
    Loss,
    LossInputs,
    LossOutput,
    kl_metrics,
    weigh,
)
from raylearner.learner.objective.ratio_losses import clipped_ratio


class DecoupledPpo(ClippedLoss):
    """PPO around the proximal policy times proximal/behavior (2505.24298)."""

    kind: Literal["decoupled_ppo"]
    weighs_by_behavior: ClassVar[bool] = True
    dual_clip: AboveOne | None = None
    """Maximum factor of a negative advantage; None for off."""
    behavior_cap: PositiveFloat | None = 2.0
    """Maximum weight proximal/behavior; AReaL takes 5."""
    behavior_mode: Literal["cap", "filter"] = "cap"
    """Larger weights are clamped, or set to 0 as AReaL does."""
    behavior_level: Literal["token", "geometric"] = "token"
    """One weight per token, or per row from its mean log-ratio."""


def decoupled_ppo(inputs: LossInputs, config: DecoupledPpo) -> LossOutput:
    """PPO around the proximal policy, times old / mu (AReaL 2505.24298).

    `geometric` takes one weight per row, the exponential of its mean log-ratio. Tokens whose weight
    is set to 0 stay in the denominators.
    """
    log_ratio, mask = inputs.behavior_ratio(inputs.proximal_logprobs)
    correction = behavior_weights(config, log_ratio, mask, inputs.rows, inputs.rewards)
    weights = inputs.without_masked().weights
    output = clipped_ratio(
        replace(inputs, weights=weigh(correction.weights, weights)),
        low=1 - config.clip_low,
        high=1 + config.clip_high,
        dual_clip=config.dual_clip,
        delta=None,
    )
    reported = ("mean", "max", "ess", "rejected_fraction")
    metrics: Metrics = {
        f"behavior_weight/{name}": correction.metrics[f"importance_weight/{name}"]
        for name in reported
    }
    return replace(output, metrics={**output.metrics, **metrics})


class Reinforce(Loss):
    """Policy gradient weighted by the truncated ratio current/behavior (2505.24034)."""

    kind: Literal["reinforce"]
    weighs_by_behavior: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False
    level: Literal["token", "sequence"] = "token"
    """Ratio of the token, or of the whole row."""
    ratio_cap: PositiveFloat | None = 2.0
    """Maximum ratio; None for no bound."""


def reinforce(inputs: LossInputs, config: Reinforce) -> LossOutput:
    """-sg(min(pi / mu, ratio_cap)) A log pi: REINFORCE with truncated importance sampling.

    The ratio is per token (AIPO of LlamaRL) or the product over the row. Ratios that are masked and
    not truncated are the loss `gpg` with the correction `icepop` around `proximal: behavior`.
    """
    log_ratio, mask = inputs.behavior_ratio(inputs.logprobs)
    correction = behavior_weights(config, log_ratio, mask, inputs.rows, inputs.rewards)
    inputs = inputs.without_masked()
    values = -correction.weights * inputs.advantages * inputs.logprobs
    moved = inputs.logprobs - inputs.proximal_logprobs
    metrics: Metrics = {**kl_metrics(moved, inputs.mask), **correction.metrics}
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


class Topr(Loss):
    """Bad rows are tapered by their ratio current/behavior, good ones are not (2503.14286)."""

    kind: Literal["topr"]
    weighs_by_behavior: ClassVar[bool] = True
    uses_proximal: ClassVar[bool] = False
    level: Literal["token", "sequence"] = "sequence"
    """Ratio of the token, or of the whole row as in the paper."""
    ratio_cap: PositiveFloat = 1.0
    """Maximum ratio."""


def topr(inputs: LossInputs, config: Topr) -> LossOutput:
    """-A log pi for good rows, -sg(min(pi / mu, ratio_cap)) A log pi for bad ones.

    Good rows have a reward > 0: their gradient is not reweighted, that of bad ones is tapered.
    """
    log_ratio, mask = inputs.behavior_ratio(inputs.logprobs)
    taper = behavior_weights(config, log_ratio, mask, inputs.rows, inputs.rewards).weights
    inputs = inputs.without_masked()
    values = -taper * inputs.advantages * inputs.logprobs
    is_good = inputs.rows.spread(inputs.rewards > 0)
    metrics: Metrics = {
        "tapered_fraction": Mean.of(~is_good, inputs.mask),
        "taper_max": Max.of(taper, inputs.mask),
        **kl_metrics(inputs.logprobs - inputs.proximal_logprobs, inputs.mask),
    }
    return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


def behavior_weights(
    config: DecoupledPpo | Reinforce | Topr,
    log_ratio: Tensor,  # [T] learner - behavior
    mask: Tensor,  # [T] bool
    rows: Rows,
    rewards: Tensor,  # [R]
) -> Correction:
    """Return the weights by which the loss multiplies tokens."""
    match config:
        case DecoupledPpo():
            return importance_weights(
                log_ratio,
                mask,
                rows,
                level=config.behavior_level,
                mode="mask" if config.behavior_mode == "filter" else "truncate",
                low=None,
                high=config.behavior_cap,
            )
        case Reinforce() | Topr():
            found = importance_weights(
                log_ratio,
                mask,
                rows,
                level=config.level,
                mode="truncate",
                low=None,
                high=config.ratio_cap,
            )
            if isinstance(config, Reinforce):
                return found
            is_good = rows.spread(rewards > 0)
            weights = torch.where(is_good, torch.ones_like(found.weights), found.weights)
            return replace(found, weights=weights)
