"""The policy losses by kind, and the entropy bonus."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from raylearner.errors import LearnerError
from raylearner.learner.batch.metric import Max, Mean, Metrics, Min
from raylearner.learner.batch.rows import select
from raylearner.learner.lazy_torch import Tensor, torch
from raylearner.learner.objective.behavior_losses import (
    DecoupledPpo,
    Reinforce,
    Topr,
    decoupled_ppo,
    reinforce,
    topr,
)
from raylearner.learner.objective.covariance_losses import ClipCov, KlCov, clip_cov, kl_cov
from raylearner.learner.objective.custom import CustomFunction
from raylearner.learner.objective.loss import Loss, LossInputs, LossOutput
from raylearner.learner.objective.ratio_losses import (
    Cispo,
    DppoKl,
    DppoTv,
    Gpg,
    Gppo,
    Ppo,
    Sapo,
    cispo,
    dppo_kl,
    dppo_tv,
    gpg,
    gppo,
    ppo,
    sapo,
)
from raylearner.learner.objective.sequence_losses import (
    Dro,
    Gmpo,
    Gspo,
    Luspo,
    SequenceRatio,
    Vespo,
    dro,
    gmpo,
    gspo,
    luspo,
    sequence_ratio,
    vespo,
)


class CustomLoss(Loss, CustomFunction):
    """A user-defined loss: a function of `LossInputs` and the options that returns a `LossOutput`."""

    kind: Literal["custom"]


def custom_loss(inputs: LossInputs, config: CustomLoss) -> LossOutput:
    """Call the function and check the shape of its values."""
    output = config.call(inputs)
    name = f"learner.loss.function {config.function!r}"
    if not isinstance(output, LossOutput):
        raise LearnerError(f"{name} must return a LossOutput, got {type(output).__name__}")
    wanted = inputs.rows.num_rows if output.level == "row" else inputs.rows.num_tokens
    values: Any = output.values
    if not isinstance(values, torch.Tensor) or tuple(values.shape) != (wanted,):
        found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        raise LearnerError(
            f"{name} must return values of shape ({wanted},) at level {output.level!r}, got {found}"
        )
    per_token = inputs.mask if output.level == "token" else inputs.rows.count(inputs.mask) > 0
    return LossOutput(values=select(values, per_token), level=output.level, metrics=output.metrics)


LossSection = Annotated[
    Ppo
    | DecoupledPpo
    | SequenceRatio
    | Gspo
    | Gmpo
    | Cispo
    | Sapo
    | DppoTv
    | DppoKl
    | Dro
    | Gppo
    | Topr
    | ClipCov
    | KlCov
    | Gpg
    | Reinforce
    | Vespo
    | Luspo
    | CustomLoss,
    Field(discriminator="kind"),
]

POLICY_LOSSES: dict[str, Callable[[LossInputs, Any], LossOutput]] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "sequence_ratio": sequence_ratio,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "gppo": gppo,
    "topr": topr,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "gpg": gpg,
    "reinforce": reinforce,
    "vespo": vespo,
    "luspo": luspo,
    "custom": custom_loss,
}
"""Formula of each kind; its second argument is the section of that kind."""


def entropy_bonus(entropy: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Return token losses `-entropy [T]`, 0 off the mask, to aggregate and scale by a coefficient."""
    entropy = select(entropy, mask)
    metrics: Metrics = {
        "entropy": Mean.of(entropy, mask),
        "entropy_max": Max.of(entropy, mask),
        "entropy_min": Min.of(entropy, mask),
    }
    return -entropy, metrics
