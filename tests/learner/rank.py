"""Ranks of a learner as processes: they run the job in FOLDER and write its results there.

Run by `ranks.run_ranks`.

`job.pkl` holds `config`, `model` and `batches`, per step and rank. `saved/` and `beside/` are checkpoints
of the end; in the second rank 1 could not write its random state.
"""

import pickle
from contextlib import suppress
from pathlib import Path

import torch
from learners import make_learner, probe_of, weights_of
from torch.distributed.device_mesh import DeviceMesh

from raylearner.learner.checkpoint import state
from raylearner.weights.checksums import checksum


def main(folder: Path, rank: int, device_mesh: DeviceMesh) -> None:
    state.AGREEMENT_TIMEOUT_S = 20
    job = pickle.loads((folder / "job.pkl").read_bytes())
    learner = make_learner(job["model"], job["config"], temperature=0.9, device_mesh=device_mesh)
    outputs = [learner.step(step[rank]) for step in job["batches"]]
    learner.save(folder / "saved")
    if rank == 1:
        (folder / "beside" / "learner" / "rng_00001.json").mkdir(parents=True)
    learner.save(folder / "beside", should_defer=True)
    with suppress(IsADirectoryError):
        learner.finish_save()
    result = {
        "outputs": outputs,
        "probe": probe_of(learner, [[35, 36, 37], [20, 21, 22, 23]]),
        "checksums": learner.models.policy.weight_checksums(torch.bfloat16),
        "sent": {
            name: checksum(w) for name, w in learner.models.policy.named_weights(torch.bfloat16)
        },
        "weights": {name: w.numpy() for name, w in weights_of(learner).items()},
    }
    if rank == 0:
        (folder / "result.pkl").write_bytes(pickle.dumps(result))
