"""Distance of the learner from the policies that sampled, and other measurements without gradient.

Legend: `T` packed tokens, `R` rows, `E` episodes. All return combinable metrics (see `metric`). Row
statistics leave out rows without a trained token.
"""

from functools import cache

import torch
from torch import Tensor

from raylearner.learner.batch.metric import Correlation, Max, Mean, Metrics, Min, Std, summary
from raylearner.learner.batch.rows import Rows, clamp_log_ratio, dense_ids, select
from raylearner.learner.objective.statistics import zero_variance

WEIGHT_BOUNDS = (0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0)
"""Edges between which trained tokens are counted by their importance weight."""


def weight_shares(log_ratio: Tensor, mask: Tensor) -> Metrics:
    """Return the distribution of exp(log_ratio) over the mask `[T]`, before any truncation.

    `importance_weight/share_k` is the share of tokens in bin k of those that `WEIGHT_BOUNDS` divide,
    upper edges included.
    """
    bins = torch.bucketize(log_ratio, _log_bounds(log_ratio.dtype, log_ratio.device))
    return {
        f"importance_weight/share_{number}": Mean.of(bins == number, mask)
        for number in range(len(WEIGHT_BOUNDS) + 1)
    }


@cache
def _log_bounds(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the logarithms of `WEIGHT_BOUNDS`; a copy from the host would wait for the device."""
    return torch.tensor(WEIGHT_BOUNDS, dtype=dtype, device=device).log()


def logprob_gap(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Metrics:
    """Return |proximal - behavior| in nats and |exp - exp| of the probabilities, over the mask `[T]`.

    Also Pearson's correlation of the probabilities. Behavior log-probabilities that are not finite
    are left out and their fraction is reported.
    """
    known = mask & behavior_logprobs.isfinite()
    proximal = select(proximal_logprobs.detach(), known)
    behavior = select(behavior_logprobs, known)
    gap = (proximal - behavior).abs()
    probability, sampled_probability = proximal.exp(), behavior.exp()
    difference = (probability - sampled_probability).abs()
    return {
        "logprob_gap/mean": Mean.of(gap, known),
        "logprob_gap/max": Max.of(gap, known),
        "logprob_gap/std": Std.of(gap, known, ddof=1),
        "probability_gap/mean": Mean.of(difference, known),
        "probability_gap/max": Max.of(difference, known),
        "probability_gap/std": Std.of(difference, known, ddof=1),
        "probability_gap/correlation": Correlation.of(probability, sampled_probability, known),
        "behavior_unknown_fraction": Mean.of(torch.logical_not(known), mask),
    }


def off_policy(
    proximal_logprobs: Tensor,  # [T]
    behavior_logprobs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
) -> Metrics:
    """Return perplexities of both policies, their ratio, KL(behavior || proximal) and chi-square.

    Perplexities are of each row, then averaged over rows. `off_policy_kl` is k1 and `..._k3` k3. chi2 = E[ratio^2] - 1 per token and per row (product of ratios).
    """
    mask = mask & behavior_logprobs.isfinite()
    proximal = select(proximal_logprobs.detach(), mask).double()
    behavior = select(behavior_logprobs, mask).double()
    log_ratio = proximal - behavior
    bounded = clamp_log_ratio(log_ratio)
    row_chi2 = (2 * clamp_log_ratio(rows.sum(log_ratio))).exp()  # [R]
    token_chi2 = (2 * clamp_log_ratio(log_ratio)).exp()
    proximal_mean, behavior_mean = rows.mean(proximal, mask), rows.mean(behavior, mask)  # [R]
    gap = behavior_mean - proximal_mean
    counted = rows.count(mask) > 0
    return {
        "perplexity/proximal": Mean.of((-proximal_mean).exp(), counted),
        "perplexity/behavior": Mean.of((-behavior_mean).exp(), counted),
        "log_perplexity/proximal": Mean.of(-proximal_mean, counted),
        "log_perplexity/behavior": Mean.of(-behavior_mean, counted),
        "perplexity_gap/mean": Mean.of(gap, counted),
        "perplexity_gap/abs_mean": Mean.of(gap.abs(), counted),
        "perplexity_gap/max": Max.of(gap, counted),
        "perplexity_gap/min": Min.of(gap, counted),
        "perplexity_gap/ratio": Mean.of(clamp_log_ratio(gap).exp(), counted),
        "off_policy_kl": Mean.of(-log_ratio, mask),
        "off_policy_kl_k3": Mean.of(bounded.exp() - bounded - 1, mask),
        "chi2/token": Mean.of(token_chi2, mask, offset=-1.0),
        "chi2/row": Mean.of(row_chi2, counted, offset=-1.0),
    }


def staleness(
    token_versions: Tensor,  # [T] int64
    mask: Tensor,  # [T] bool
    rows: Rows,
    *,
    policy_version: int,
    num_bins: int = 9,
) -> Metrics:
    """Return the staleness of the trained tokens, and the number of versions that a row spans.

    `staleness_fraction/k` is the share of tokens k versions old; the last bin takes all that are
    older. `policy_version` is the version being trained.
    """
    age = policy_version - token_versions
    metrics = summary("token_staleness", age, mask)
    for bin_index in range(num_bins):
        is_last = bin_index == num_bins - 1
        inside = age >= bin_index if is_last else age == bin_index
        name = f"{bin_index}+" if is_last else f"{bin_index}"
        metrics[f"staleness_fraction/{name}"] = Mean.of(inside, mask)
    oldest = rows.max(age.double(), mask, empty=0.0)
    newest = -rows.max(-age.double(), mask, empty=0.0)
    filled = rows.count(mask) > 0
    return {**metrics, **summary("version_span", oldest - newest + 1, filled)}


def groups(rewards: Tensor, group_ids: Tensor) -> Metrics:
    """Return the fractions of groups with zero variance, and of those that cannot be compared.

    A group counts as zero-variance when its scorable rewards are equal, a group of one included.
    """
    index, num_groups = dense_ids(group_ids)
    flat = zero_variance(rewards, group_ids).double()
    of_groups = flat.new_zeros(num_groups).scatter_reduce(0, index, flat, "amax")
    scorable = ~rewards.isnan()
    sizes = flat.new_zeros(num_groups).index_add(0, index, scorable.double())
    return {
        "zero_variance_fraction": Mean.of(of_groups),
        "single_group_fraction": Mean.of(sizes <= 1),
        "unscorable_fraction": Mean.of(~scorable),
        **summary("reward", rewards, scorable),
    }


def gradient_power(
    advantages: Tensor,  # [T]
    logprobs: Tensor,  # [T]
    squared_probs: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
) -> Metrics:
    """Return a proxy of E||g||^2 from the logits' side: E[A^2 W] over rows.

    W sums (1 - 2 p + sum_v p_v^2) over a row's trained tokens: the squared norm of the score with
    respect to the logits. `squared_probs` is that sum of squares; A is a row's mean.
    """
    score = rows.sum(select(1 - 2 * logprobs.detach().exp() + squared_probs, mask), mask)
    advantage = rows.mean(advantages, mask)
    counted = rows.count(mask) > 0
    return {
        "gradient_power/total": Mean.of(advantage**2 * score.clamp(min=0), counted),
        "gradient_power/advantage_squared": Mean.of(advantage**2, counted),
        "gradient_power/score": Mean.of(score, counted),
    }


def gradient_noise(total_power: float, gradient_norm: float, num_rows: int) -> dict[str, float]:
    """Return signal ||g||^2 of the mean gradient, and the variance of that mean, never below 0.

    `total_power` is the finished `gradient_power/total`, `gradient_norm` the batch's own.
    """
    signal = gradient_norm**2
    noise = max(0.0, (total_power - signal) / (num_rows - 1)) if num_rows > 1 else 0.0
    return {"gradient_power/signal": signal, "gradient_power/noise": noise}
