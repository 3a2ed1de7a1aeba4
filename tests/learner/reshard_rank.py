"""One rank that resumes from a checkpoint, or starts, steps, and saves beside a further step.

Run by `ranks.run_ranks`.

`job.pkl` holds `config`, `model`, `restored` (a folder, or None), `batches` by step and rank, and what
comes after the save in `later`. Leaves `saved/` and, of the moment of the save, `state.pkl`.
"""

import pickle
from pathlib import Path

from learners import full_state, make_learner
from torch.distributed.device_mesh import DeviceMesh


def main(folder: Path, rank: int, device_mesh: DeviceMesh) -> None:
    job = pickle.loads((folder / "job.pkl").read_bytes())
    learner = make_learner(job["model"], job["config"], device_mesh=device_mesh)
    if job["restored"] is not None:
        learner.restore(job["restored"])
    for step in job["batches"]:
        learner.step(step[rank])
    state = full_state(learner)
    learner.save(folder / "saved", should_defer=True)
    for step in job["later"]:
        learner.step(step[rank])
    learner.finish_save()
    if rank == 0:
        (folder / "state.pkl").write_bytes(pickle.dumps(state))
