"""Ranks of a learner as processes: they run the job in FOLDER and leave its results there.

Run by `ranks.run_ranks`.

`job.pkl` holds `config`, `model` and `batches`, per step and rank.
"""

import pickle
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from raylearner.config.schema import LearnerSection
from raylearner.learner.learner import Learner


def main(folder: Path, rank: int, device_mesh: DeviceMesh) -> None:
    job = pickle.loads((folder / "job.pkl").read_bytes())
    learner = Learner(
        LearnerSection(**job["config"]),
        model_path=job["model"],
        num_steps=10,
        temperature=0.9,
        device_mesh=device_mesh,
    )
    outputs = [learner.step(step[rank]) for step in job["batches"]]
    learner.save(folder / "saved")
    result = {
        "outputs": outputs,
        "probe": learner.probe_logprobs([[35, 36, 37], [20, 21, 22, 23]]),
        "weights": {name: w.numpy().copy() for name, w in learner.named_weights("float64")},
    }
    if rank == 0:
        (folder / "result.pkl").write_bytes(pickle.dumps(result))
