"""Steps of a learner of one rank."""

from typing import Any

from torch import Tensor

from raylearner.learner.batch import pack
from raylearner.learner.learner import Learner
from raylearner.types import StepOutput, TrajectoryGroup


def step(learner: Learner, groups: list[TrajectoryGroup], **options: Any) -> StepOutput:
    """One step on the groups; `options` are those of packing."""
    (batch,) = pack(
        groups,
        policy_version=learner.policy_version,
        num_ranks=1,
        max_tokens_per_micro_batch=48,
        **options,
    )
    return learner.step(batch)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_weights("float64")}
