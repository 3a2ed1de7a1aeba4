"""Learners for tests, random trajectories, steps and states."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from raylearner.config.schema import LearnerSection, RunSection
from raylearner.learner.batch.pack import LearnerBatch, pack
from raylearner.learner.checkpoint.state import state_tensors
from raylearner.learner.learner import Learner
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.learner.weight_writer import probe_logprobs
from raylearner.observability.spans import Tracer
from raylearner.types import Trajectory, TrajectoryGroup


def random_trajectory(
    rng: np.random.Generator,
    *,
    group_id: int = 0,
    sample_index: int = 0,
    segment: int = 0,
    num_tokens: int = 12,
    policy_version: int = 0,
    reward: float | None = 0.0,
    trains: bool = True,
) -> Trajectory:
    """A prompt of 2 tokens, then sampled tokens with some observations between."""
    loss_mask = rng.random(num_tokens) < 0.7
    loss_mask[:2] = False
    loss_mask[-1] = True
    logprobs = np.where(loss_mask, -3.0 - rng.random(num_tokens), np.nan)
    return Trajectory(
        group_id=group_id,
        sample_index=sample_index,
        attempt=0,
        segment=segment,
        prompt_id=str(group_id),
        token_ids=rng.integers(10, 200, num_tokens).astype(np.int32),
        loss_mask=loss_mask,
        train_mask=loss_mask.copy() if trains else np.zeros_like(loss_mask),
        behavior_logprobs=logprobs.astype(np.float32),
        policy_versions=np.where(loss_mask, policy_version, -1).astype(np.int32),
        claim_policy_version=policy_version,
        reward=reward,
    )


def make_groups(
    seed: int, *, num_groups: int = 3, group_size: int = 4, policy_version: int = 0
) -> list[TrajectoryGroup]:
    """Groups of random lengths and 0/1 rewards."""
    rng = np.random.default_rng(seed)
    return [
        TrajectoryGroup(
            group_id=1000 * seed + group,
            prompt_id=str(group),
            policy_version=policy_version,
            trajectories=tuple(
                random_trajectory(
                    rng,
                    group_id=1000 * seed + group,
                    sample_index=index,
                    num_tokens=int(rng.integers(4, 24)),
                    policy_version=policy_version,
                    reward=float(rng.integers(0, 2)),
                )
                for index in range(group_size)
            ),
        )
        for group in range(num_groups)
    ]


def with_prompts(
    groups: Sequence[TrajectoryGroup], *, seed: int = 0, num_tokens: int = 40
) -> list[TrajectoryGroup]:
    """The groups with a prompt of their own before the tokens of each trajectory."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 200, num_tokens).astype(np.int32) for _ in groups]
    return [
        replace(
            group,
            trajectories=tuple(prepend(t, prompt) for t in group.trajectories),
        )
        for group, prompt in zip(groups, prompts, strict=True)
    ]


def prepend(trajectory: Trajectory, token_ids: NDArray[np.int32]) -> Trajectory:
    """The trajectory after tokens that are not sampled."""

    def before(name: str, value: float) -> NDArray[Any]:
        array = getattr(trajectory, name)
        return np.concatenate([np.full(len(token_ids), value, array.dtype), array])

    return replace(
        trajectory,
        token_ids=np.concatenate([token_ids, trajectory.token_ids]),
        loss_mask=before("loss_mask", False),
        train_mask=before("train_mask", False),
        behavior_logprobs=before("behavior_logprobs", np.nan),
        policy_versions=before("policy_versions", -1),
    )


def make_episodes(seed: int = 0) -> list[TrajectoryGroup]:
    """Groups with prompts, several turns, an episode of two segments and one that does not train."""
    first, *others = with_prompts(make_groups(seed))
    kept, untrained, *rest = first.trajectories
    segment = random_trajectory(
        np.random.default_rng(seed),
        group_id=kept.group_id,
        segment=1,
        num_tokens=15,
        reward=kept.reward,
    )
    segment = prepend(segment, kept.token_ids[:40])
    untrained = untrained.with_train_mask(np.zeros_like(untrained.train_mask))
    return [replace(first, trajectories=(kept, segment, untrained, *rest)), *others]


def make_learner(
    folder: Path | str,
    section: LearnerSection | Mapping[str, Any],
    *,
    num_steps: int = 10,
    device_mesh: DeviceMesh | None = None,
    tracer: Tracer | None = None,
    **options: Any,
) -> Learner:
    """`options` are further fields of the spec."""
    section = LearnerSection.model_validate(section)
    run = RunSection(num_steps=num_steps)
    spec = LearnerSpec(learner=section, model_path=str(folder), run=run, **options)
    return Learner(spec, device_mesh=device_mesh, tracer=tracer)


def one_batch(
    groups: list[TrajectoryGroup], *, policy_version: int = 0, **options: Any
) -> LearnerBatch:
    """The batch of a single rank; `options` are those of packing."""
    options = {"max_tokens_per_micro_batch": 48, **options}
    (batch,) = pack(groups, policy_version=policy_version, num_ranks=1, **options)
    return batch


def step(learner: Learner, groups: list[TrajectoryGroup], **options: Any) -> StepOutput:
    """One step on the groups; `options` are those of packing."""
    return learner.step(one_batch(groups, policy_version=learner.policy_version, **options))


def weights_of(learner: Learner, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Copies of the full weights; every rank must call it."""
    return {name: tensor.clone() for name, tensor in learner.models.policy.named_weights(dtype)}


def assert_same_weights(
    found: Learner | Mapping[str, Any], wanted: Learner | Mapping[str, Any], *, atol: float = 0.0
) -> None:
    """All tensors differ by at most `atol`; a learner stands for its weights."""
    found, wanted = (weights_of(x) if isinstance(x, Learner) else x for x in (found, wanted))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, wanted[name], rtol=0, atol=atol, err_msg=name)


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
