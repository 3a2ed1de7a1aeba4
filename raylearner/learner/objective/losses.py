"""The policy losses by kind, and the entropy bonus: what the learner calls.

Every entry of `POLICY_LOSSES` takes `LossInputs` and keyword-only options, and returns `LossOutput`.
"""

from collections.abc import Callable

from torch import Tensor

from raylearner.learner.batch.metric import Max, Mean, Metrics, Min
from raylearner.learner.batch.rows import select
from raylearner.learner.objective.policy_loss import LossInputs, LossOutput
from raylearner.learner.objective.sequence_losses import (
    dro,
    gmpo,
    gspo,
    luspo,
    sequence_ratio,
    vespo,
)
from raylearner.learner.objective.token_losses import (
    cispo,
    clip_cov,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    gpg,
    gppo,
    kl_cov,
    ppo,
    reinforce,
    sapo,
    topr,
)

__all__ = ["POLICY_LOSSES", "LossInputs", "LossOutput", "decoupled_ppo", "entropy_bonus", "ppo"]

POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
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
}
"""Each with its own options; an option that a kind does not have is a TypeError."""


def entropy_bonus(entropy: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Token losses `-entropy [T]`, 0 off the mask, to aggregate and scale by a coefficient >= 0."""
    entropy = select(entropy, mask)
    metrics: Metrics = {
        "entropy": Mean.of(entropy, mask),
        "entropy_max": Max.of(entropy, mask),
        "entropy_min": Min.of(entropy, mask),
    }
    return -entropy, metrics
