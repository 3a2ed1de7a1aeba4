"""Steps of a learner of one rank, and learners of many."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from raylearner.learner.batch import pack
from raylearner.learner.learner import Learner
from raylearner.learner.mesh import free_port
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


def run_ranks(script: Path, folder: Path, *, num_ranks: int, limit_s: float = 280) -> None:
    """Run `script FOLDER RANK NUM_RANKS PORT` in as many processes, and fail if one of them does."""
    port = free_port()
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank), str(num_ranks), str(port)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    errors = [process.communicate(timeout=limit_s)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)[-4000:]


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_weights("float64")}
