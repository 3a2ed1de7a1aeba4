"""Learners for tests, their steps and their state."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raylearner.config.schema import LearnerSection, RunSection
from raylearner.learner.batch.pack import pack
from raylearner.learner.checkpoint.state import state_tensors
from raylearner.learner.learner import Learner
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.learner.weight_writer import probe_logprobs
from raylearner.observability.spans import Tracer
from raylearner.types import TrajectoryGroup


def make_learner(
    folder: Path | str,
    section: LearnerSection,
    *,
    num_steps: int = 10,
    device_mesh: DeviceMesh | None = None,
    tracer: Tracer | None = None,
    **options: Any,
) -> Learner:
    """`options` are further fields of the spec."""
    run = RunSection(num_steps=num_steps)
    spec = LearnerSpec(learner=section, model_path=str(folder), run=run, **options)
    return Learner(spec, device_mesh=device_mesh, tracer=tracer)


def step(learner: Learner, groups: list[TrajectoryGroup], **options: Any) -> StepOutput:
    """One step on the groups; `options` are those of packing."""
    (batch,) = pack(
        groups,
        policy_version=learner.policy_version,
        num_ranks=1,
        **{"max_tokens_per_micro_batch": 48, **options},
    )
    return learner.step(batch)


def weights_of(learner: Learner, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Copies of the full weights; every rank must call it."""
    return {name: tensor.clone() for name, tensor in learner.models.policy.named_weights(dtype)}


def probe_of(learner: Learner, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities by the policy; every rank must call it."""
    return probe_logprobs(learner.models.policy, token_ids, reader=learner.models.reader)


def full_state(learner: Learner) -> dict[str, NDArray[Any]]:
    """Masters and moments, whole, and what was counted; every rank must call it."""
    models = learner.models
    tensors = state_tensors(models.policy.own_parameters(), models.optimizer)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    counts = {name: np.array(value) for name, value in asdict(learner._progress).items() if value}
    return counts | {name: tensor.numpy().copy() for name, tensor in full.items()}
