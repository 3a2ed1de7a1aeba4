"""Ranks that try many objectives, one after the other, and leave what they did.

Run by `ranks.run_ranks`.

`jobs.pkl` holds, by name, a `config`, a `model` and `batches`, per step and rank.
"""

import os
import pickle
from pathlib import Path
from typing import Any

from raylearner.config.schema import LearnerSection
from raylearner.learner import mesh
from raylearner.learner.learner import Learner
from raylearner.types import StepOutput


def play(config: dict[str, Any], model: str, batches: list[Any]) -> tuple[list[StepOutput], dict]:
    """What each step said, and the weights after the last."""
    learner = Learner(LearnerSection(**config), model_path=model, num_steps=10, temperature=0.9)
    outputs = [learner.step(batch) for batch in batches]
    return outputs, {name: w.numpy().copy() for name, w in learner.named_weights("float64")}


def main(folder: Path, rank: int, num_ranks: int, port: int) -> None:
    jobs = pickle.loads((folder / "jobs.pkl").read_bytes())
    mesh.connect(rank=rank, world_size=num_ranks, port=port)
    results = {
        name: play(job["config"], job["model"], [step[rank] for step in job["batches"]])
        for name, job in jobs.items()
    }
    if rank == 0:
        (folder / "results.pkl").write_bytes(pickle.dumps(results))
    mesh.disconnect()
    os._exit(0)  # the interpreter's own shutdown sometimes aborts in a thread of gloo
