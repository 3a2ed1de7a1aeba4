"""Ranks that run many objectives in turn, and write their results.

Run by `ranks.run_ranks`.

`jobs.pkl` holds, by name, a `config`, a `model` and `batches`, per step and rank.
"""

import pickle
from pathlib import Path
from typing import Any

from learners import make_learner, weights_of
from torch.distributed.device_mesh import DeviceMesh

from raylearner.learner.spec import StepOutput


def play(config: dict[str, Any], model: str, batches: list[Any]) -> tuple[list[StepOutput], dict]:
    """Outputs of each step, and the weights after the last."""
    learner = make_learner(model, config, temperature=0.9)
    outputs = [learner.step(batch) for batch in batches]
    return outputs, {name: w.numpy() for name, w in weights_of(learner).items()}


def main(folder: Path, rank: int, _: DeviceMesh) -> None:
    jobs = pickle.loads((folder / "jobs.pkl").read_bytes())
    results = {
        name: play(job["config"], job["model"], [step[rank] for step in job["batches"]])
        for name, job in jobs.items()
    }
    if rank == 0:
        (folder / "results.pkl").write_bytes(pickle.dumps(results))
