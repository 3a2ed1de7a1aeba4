"""The corrections by kind, and the configured ones together.

Legend: `T` packed tokens, `R` rows; `log_ratio` as in `importance`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raylearner.errors import LearnerError
from raylearner.learner.batch.metric import Metrics
from raylearner.learner.batch.rows import select
from raylearner.learner.lazy_torch import torch
from raylearner.learner.objective.custom import CustomFunction
from raylearner.learner.objective.importance import (
    Correction,
    CorrectionInputs,
    CorrectionRule,
    ImportanceWeights,
    weigh_by_ratio,
    weight_mean,
)
from raylearner.learner.objective.rejection import (
    Geometric,
    M2po,
    Opsm,
    Rejection,
    Veto,
    geometric,
    m2po,
    opsm,
    reject,
    rejected_fractions,
    veto,
)


class CustomCorrection(CorrectionRule, CustomFunction):
    """A user-defined correction: a function of `CorrectionInputs` and the options that returns a `Correction`."""

    kind: Literal["custom"]
    uses_advantages: ClassVar[bool] = True


def custom_correction(inputs: CorrectionInputs, config: CustomCorrection) -> Correction:
    """Call the function and check the shapes of its weights and mask."""
    found = config.call(inputs)
    name = f"learner.corrections: function {config.function!r}"
    if not isinstance(found, Correction):
        raise LearnerError(f"{name} must return a Correction, got {type(found).__name__}")
    wanted = tuple(inputs.mask.shape)
    for field in ("weights", "keep"):
        tensor: Any = getattr(found, field)
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if shape != wanted:
            raise LearnerError(f"{name} must return {field} of shape {wanted}, got {shape}")
    keep = found.keep.bool() & inputs.mask
    weights = select(found.weights.detach().to(inputs.log_ratio.dtype), keep)
    return Correction(weights=weights, keep=keep, metrics=found.metrics)


CorrectionSection = Annotated[
    ImportanceWeights | Rejection | Geometric | Opsm | Veto | M2po | CustomCorrection,
    Field(discriminator="kind"),
]

CORRECTIONS: dict[str, Callable[[CorrectionInputs, Any], Correction]] = {
    "tis": weigh_by_ratio,
    "icepop": weigh_by_ratio,
    "mis": weigh_by_ratio,
    "rejection": reject,
    "geometric": geometric,
    "opsm": opsm,
    "veto": veto,
    "m2po": m2po,
    "custom": custom_correction,
}
"""Each takes the section of its kind."""


def correct(
    sections: Sequence[CorrectionSection],
    inputs: CorrectionInputs,
    batch_values: Sequence[float | None],
) -> Correction | None:
    """Apply all: weights multiply, a token is kept only if every one keeps it. None without any.

    `batch_values` holds for each section the number of the whole batch that it needs: the mean of
    weights that are normalized (`weight_means`, finished), or `m2po_bound`.
    `corrections/rejected_fraction` and `row_rejected_fraction` count over all of them.
    """
    if not sections:
        return None
    mask, rows = inputs.mask, inputs.rows
    weights, keep = mask.to(torch.float32), mask
    metrics: Metrics = {}
    for section, value in zip(sections, batch_values, strict=True):
        correction = CORRECTIONS[section.kind](replace(inputs, batch_value=value), section)
        weights = weights * correction.weights
        keep = keep & correction.keep
        metrics.update(correction.metrics)
    metrics.update(rejected_fractions(keep, mask, rows, prefix="corrections"))
    return Correction(weights=select(weights, keep), keep=keep, metrics=metrics)


def is_normalized(section: CorrectionSection) -> bool:
    return isinstance(section, ImportanceWeights) and section.normalize != "none"


def needs_whole_batch(section: CorrectionSection) -> bool:
    """Whether a number of the whole batch decides about each token."""
    return is_normalized(section) or section.uses_batch_value


def weight_means(sections: Sequence[CorrectionSection], inputs: CorrectionInputs) -> Metrics:
    """Return the means that normalized weights are divided by, under the number of their section."""
    means: Metrics = {}
    for number, section in enumerate(sections):
        if isinstance(section, ImportanceWeights) and section.normalize != "none":
            weights = weigh_by_ratio(inputs, section).weights
            level = section.normalize
            means[str(number)] = weight_mean(weights, inputs.mask, inputs.rows, level=level)
    return means
