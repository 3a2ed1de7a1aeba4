"""One rank that makes the same step once for each choice of what it keeps.

Run by `ranks.run_ranks`.

`job.pkl` holds `config`, `model`, `batches` by rank and `options`; `result.pkl` gets, by option, the
number of gathers and reductions of the step, and the state after it.
"""

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from learners import full_state, make_learner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from raylearner.learner.model import models


def main(folder: Path, rank: int, device_mesh: DeviceMesh) -> None:
    job = pickle.loads((folder / "job.pkl").read_bytes())
    counts: Counter[str] = Counter()
    for name in ("foreach_all_gather", "foreach_reduce"):
        setattr(_fsdp_param_group, name, _counted(getattr(_fsdp_param_group, name), name, counts))
    results = []
    for kept in job["options"]:
        models.choose_kept = lambda *_, kept=kept, **__: kept
        learner = make_learner(job["model"], job["config"], device_mesh=device_mesh)
        first, second = learner.models.policy.blocks
        (prefetched,) = first._get_fsdp_state()._states_to_forward_prefetch
        assert prefetched is second._get_fsdp_state()
        counts.clear()
        learner.step(job["batches"][rank])
        found = counts["foreach_all_gather"], counts["foreach_reduce"]
        results.append((*found, full_state(learner)))
    if rank == 0:
        (folder / "result.pkl").write_bytes(pickle.dumps(results))


def _counted(function: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call
