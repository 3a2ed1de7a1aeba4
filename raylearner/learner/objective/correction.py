"""The configured corrections in order, as one weight and one verdict per token.

Legend: `T` packed tokens of a micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from raylearner.config.correction import (
    CorrectionSection,
    Geometric,
    Icepop,
    M2po,
    Mis,
    Opsm,
    Rejection,
    Tis,
    Veto,
)
from raylearner.config.loss import DecoupledPpo, LossSection, Reinforce, Topr
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective.corrections import (
    Correction,
    combine_corrections,
    importance_weights,
    m2po_mask,
    normalize_weights,
    opsm_mask,
    rejection_mask,
    veto_mask,
    weight_mean,
)


def correct(
    sections: Sequence[CorrectionSection],
    log_ratio: Tensor,  # [T] proximal - behavior
    mask: Tensor,  # [T] bool
    rows: Rows,
    advantages: Tensor,  # [T]
    means: Sequence[float | None],
) -> Correction | None:
    """All of them together; None without any.

    `means` say of the whole batch what a section needs: the mean of weights that are normalized
    (`weight_means`, finished), the bound of a second moment (`m2po_bound`).
    """
    if not sections:
        return None
    found: list[Correction] = []
    for section, mean in zip(sections, means, strict=True):
        if isinstance(section, M2po):
            assert mean is not None, "the bound is found over the whole batch first"
            found.append(m2po_mask(log_ratio, advantages, mask, rows, bound=mean))
            continue
        correction = _correct(section, log_ratio, mask, rows, advantages)
        found.append(correction if mean is None else normalize_weights(correction, mean))
    return combine_corrections(found, mask, rows)


def behavior_weights(
    section: LossSection,
    log_ratio: Tensor,  # [T] learner at the start of the step - behavior
    mask: Tensor,  # [T] bool
    rows: Rows,
    rewards: Tensor,  # [R]
) -> Tensor | None:
    """What a loss of `BEHAVIOR_WEIGHTED` multiplies tokens by at its first update; None of others: `[T]`."""
    match section:
        case DecoupledPpo():
            return importance_weights(
                log_ratio,
                mask,
                rows,
                level=section.behavior_level,
                mode="mask" if section.behavior_mode == "filter" else "truncate",
                low=section.behavior_low,
                high=section.behavior_cap,
            ).weights
        case Reinforce():
            return importance_weights(
                log_ratio,
                mask,
                rows,
                level=section.level,
                mode=section.mode,
                low=section.ratio_low,
                high=section.ratio_cap,
            ).weights
        case Topr():
            tapered = importance_weights(
                log_ratio, mask, rows, level=section.level, high=section.ratio_cap
            ).weights
            return torch.where(rows.spread(rewards > 0), torch.ones_like(tapered), tapered)
        case _:
            return None


def is_normalized(section: CorrectionSection) -> bool:
    return isinstance(section, Tis | Icepop | Mis) and section.normalize != "none"


def needs_whole_batch(section: CorrectionSection) -> bool:
    """Whether a number of the whole batch decides about each token."""
    return is_normalized(section) or isinstance(section, M2po)


def weight_means(
    sections: Sequence[CorrectionSection],
    log_ratio: Tensor,  # [T]
    mask: Tensor,  # [T] bool
    rows: Rows,
    advantages: Tensor,  # [T]
) -> Metrics:
    """What normalized weights are divided by, under the number of their section."""
    means: Metrics = {}
    for number, section in enumerate(sections):
        if isinstance(section, Tis | Icepop | Mis) and section.normalize != "none":
            weights = _correct(section, log_ratio, mask, rows, advantages).weights
            means[str(number)] = weight_mean(weights, mask, rows, level=section.normalize)
    return means


def _correct(
    section: Tis | Icepop | Mis | Rejection | Geometric | Opsm | Veto,
    log_ratio: Tensor,
    mask: Tensor,
    rows: Rows,
    advantages: Tensor,
) -> Correction:
    match section:
        case Tis() | Icepop() | Mis():
            return importance_weights(
                log_ratio,
                mask,
                rows,
                level=section.level,
                mode="truncate" if section.kind == "tis" else "mask",
                low=section.low,
                high=section.high,
            )
        case Rejection():
            return rejection_mask(
                log_ratio,
                mask,
                rows,
                level=section.level,
                estimator=section.estimator,
                low=section.low,
                high=section.high,
            )
        case Geometric():
            return rejection_mask(
                log_ratio, mask, rows, level="sequence_mean", low=section.low, high=section.high
            )
        case Opsm():
            return opsm_mask(log_ratio, advantages, mask, rows, threshold=section.threshold)
        case Veto():
            return veto_mask(log_ratio, mask, rows, threshold=section.threshold)
