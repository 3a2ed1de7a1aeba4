"""Steps of a learner of one rank, and what learners hold."""

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from raylearner.learner.batch.layout import StepOutput
from raylearner.learner.batch.pack import pack
from raylearner.learner.checkpoint.learner_state import state_tensors
from raylearner.learner.learner import Learner
from raylearner.types import TrajectoryGroup


def step(learner: Learner, groups: list[TrajectoryGroup], **options: Any) -> StepOutput:
    """One step on the groups; `options` are those of packing."""
    (batch,) = pack(
        groups,
        policy_version=learner.policy_version,
        num_ranks=1,
        **{"max_tokens_per_micro_batch": 48, **options},
    )
    return learner.step(batch)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_weights("float64")}


def full_state(learner: Learner) -> dict[str, NDArray[Any]]:
    """Masters and moments, whole, and what was counted; every rank must call it."""
    models = learner._models
    tensors = state_tensors(models.policy.own_parameters(), models.optimizer)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    counts = {name: np.array(value) for name, value in asdict(learner._progress).items() if value}
    return counts | {name: tensor.numpy().copy() for name, tensor in full.items()}
