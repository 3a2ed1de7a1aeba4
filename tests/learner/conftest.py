"""Random trajectories and a tiny model for the learner's tests."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylearner.config.schema import TinyModel
from raylearner.learner.spec import StepOutput
from raylearner.types import Trajectory, TrajectoryGroup

MakeGroups = Callable[..., list[TrajectoryGroup]]


def make_trajectory(
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
                make_trajectory(
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


@pytest.fixture(name="make_trajectory", scope="session")
def make_trajectory_fixture() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture(name="make_groups", scope="session")
def make_groups_fixture() -> MakeGroups:
    return make_groups


def _tiny(folder: Path, *, is_tied: bool) -> Path:
    from raylearner.tiny.model import make_tiny_model

    config = TinyModel(
        kind="tiny",
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        intermediate_size=96,
        max_length=128,
        tie_embeddings=is_tied,
    )
    return make_tiny_model(config, folder, seed=0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny(tmp_path_factory.mktemp("tied"), is_tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _tiny(tmp_path_factory.mktemp("untied"), is_tied=False)


@dataclass(frozen=True)
class TwoRanks:
    """Results of two processes for `steps`: outputs, probe, weights and checkpoints."""

    config: dict[str, Any]
    steps: list[list[TrajectoryGroup]]
    outputs: list[StepOutput]
    probe: list[list[float]]
    weights: dict[str, Any]
    checksums: dict[str, Any]
    """Sum of each rank's checksums of its own rows."""
    sent: dict[str, Any]
    """Checksums of the full tensors."""
    saved: Path
    saved_beside: Path
    """Checkpoint by `finish_save`, while rank 1 could not write its own files."""


@pytest.fixture(scope="session")
def two_ranks(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Two steps of several mini-batches, then one with a single row, so that one rank has none."""
    from ranks import run_ranks

    from raylearner.learner.batch.pack import pack

    folder = tmp_path_factory.mktemp("two_ranks")
    config = {
        "compute_dtype": "float64",
        "learning_rate": 1e-2,
        "max_tokens_per_micro_batch": 48,
        "num_epochs": 2,
        "num_mini_batches": 2,
        "aggregation": "sequence_mean_of_means",
    }
    steps = [make_groups(seed, num_groups=4, policy_version=seed) for seed in range(2)]
    (group,) = make_groups(2, num_groups=1, group_size=2, policy_version=2)
    first, second = group.trajectories
    untrained = second.with_train_mask(np.zeros_like(second.train_mask))
    pair = (replace(first, reward=0.0), replace(untrained, reward=1.0))
    steps.append([replace(group, trajectories=pair)])
    batches = [
        pack(
            groups,
            policy_version=version,
            num_ranks=2,
            max_tokens_per_micro_batch=48,
            num_mini_batches=2,
        )
        for version, groups in enumerate(steps)
    ]
    job = {"config": config, "model": str(tiny_folder), "batches": batches}
    (folder / "job.pkl").write_bytes(pickle.dumps(job))
    run_ranks(Path(__file__).with_name("rank.py"), folder, num_ranks=2)
    result = pickle.loads((folder / "result.pkl").read_bytes())
    return TwoRanks(
        config=config,
        steps=steps,
        saved=folder / "saved",
        saved_beside=folder / "beside",
        **result,
    )
