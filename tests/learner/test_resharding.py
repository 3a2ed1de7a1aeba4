"""Checkpoints saved beside training by four ranks, resumed by two, and by one."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from learners import full_state, make_groups, make_learner
from ranks import run_ranks

from raylearner.learner.batch.pack import LearnerBatch, pack
from raylearner.types import TrajectoryGroup

CONFIG: dict[str, Any] = {"compute_dtype": "float32", "learning_rate": 1e-2}
SCRIPT = Path(__file__).with_name("reshard_rank.py")


def batches(groups: list[TrajectoryGroup], *, version: int, num_ranks: int) -> list[LearnerBatch]:
    return list(
        pack(groups, policy_version=version, num_ranks=num_ranks, max_tokens_per_micro_batch=48)
    )


def run(folder: Path, num_ranks: int, **job: Any) -> dict[str, Any]:
    """The state at the moment of the save."""
    folder.mkdir()
    job = {"restored": None, "later": [], **job}
    (folder / "job.pkl").write_bytes(pickle.dumps(job))
    run_ranks(SCRIPT, folder, num_ranks=num_ranks)
    return pickle.loads((folder / "state.pkl").read_bytes())


def assert_equal(state: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_four_ranks_are_resumed_by_two_and_those_by_one(
    untied_folder: Path, tmp_path: Path
) -> None:
    """The four hold two copies. Nothing of the step made while they wrote is in what they wrote."""
    groups = [make_groups(seed, policy_version=seed) for seed in range(3)]
    model = {"model": str(untied_folder), "config": CONFIG}
    of_four = run(
        tmp_path / "four",
        4,
        model=str(untied_folder),
        config=CONFIG | {"shard_size": 2},
        batches=[batches(groups[0], version=0, num_ranks=4)],
        later=[batches(groups[1], version=1, num_ranks=4)],
    )
    assert (of_four["policy_version"], of_four["num_updates"]) == (1, 1)
    assert np.abs(of_four["exp_avg.lm_head.weight"]).max() > 0
    of_two = run(tmp_path / "two", 2, **model, batches=[], restored=tmp_path / "four" / "saved")
    assert_equal(of_two, of_four)
    learner = make_learner(untied_folder, CONFIG | {"offload": True})
    learner.restore(tmp_path / "two" / "saved")
    assert_equal(full_state(learner), of_four)
