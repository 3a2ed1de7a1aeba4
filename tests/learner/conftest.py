"""Tiny models and a run of two ranks for the learner's tests."""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylearner.config.schema import TinyModel
from raylearner.learner.spec import StepOutput
from raylearner.types import TrajectoryGroup


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
    from learners import make_groups
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
