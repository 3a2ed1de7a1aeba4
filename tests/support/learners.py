"""Steps of a learner of one rank, and learners of many."""

import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from raylearner.learner.batch import pack
from raylearner.learner.learner import Learner
from raylearner.learner.learner_state import state_tensors
from raylearner.learner.mesh import free_port
from raylearner.types import StepOutput, TrajectoryGroup


def step(learner: Learner, groups: list[TrajectoryGroup], **options: Any) -> StepOutput:
    """One step on the groups; `options` are those of packing."""
    (batch,) = pack(
        groups,
        policy_version=learner.policy_version,
        num_ranks=1,
        **{"max_tokens_per_micro_batch": 48, **options},
    )
    return learner.step(batch)


def run_ranks(script: Path, folder: Path, *, num_ranks: int) -> None:
    """Run `script FOLDER NUM_RANKS PORT`, which calls `fork_ranks`; fails with its errors."""
    paths = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, script, folder, str(num_ranks), str(free_port())],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def fork_ranks(main: Callable[[Path, int, int, int], None]) -> None:
    """Call `main(folder, rank, num_ranks, port)` in one process a rank; imports are shared."""
    folder, num_ranks, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(folder, r, num_ranks, port)) for r in range(num_ranks)]
    for rank in ranks:
        rank.start()
    while running := [rank.sentinel for rank in ranks if rank.is_alive()]:
        multiprocessing.connection.wait(running)
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.terminate()
            sys.exit("a rank failed")


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.named_weights("float64")}


def full_state(learner: Learner) -> dict[str, NDArray[Any]]:
    """Masters and moments, whole, and what was counted; every rank must call it."""
    models = learner._models
    tensors = state_tensors(models.policy.own_parameters(), models.optimizer)
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    counts = {name: np.array(value) for name, value in asdict(learner._progress).items() if value}
    return counts | {name: tensor.numpy().copy() for name, tensor in full.items()}
