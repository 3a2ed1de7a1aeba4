"""Asynchronous against synchronous on the same GPUs: the stories of `benchmarks/stories.py`.

`async` and `sync` give the learner a GPU of its own and the engines the others; `colocated` is
synchronous too, but a learner rank and engines share every GPU, and the engines sleep while the
learner steps. No option of speed is set but the number of engines on a shared GPU.
"""

import time
from typing import Any

from benchmarks.gpu.common import Result, parser, visible_gpus
from benchmarks.gpu.training import Run, summary
from benchmarks.stories import config, write_prompts


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--mode", choices=("async", "sync", "colocated"), required=True)
    args.add_argument(
        "--engines-per-gpu", type=int, help="default: as the run decides; 4 beside ranks"
    )
    args.add_argument("--seconds", type=float, default=45, help="after the first step")
    args.add_argument("--tuned", action="store_true")
    arguments = args.parse_args()
    cpu, mode = arguments.cpu, arguments.mode
    result = Result(arguments.out, f"modes_{mode}")
    prompts = write_prompts(
        arguments.out / f"modes_{mode}.jsonl",
        num_prompts=4000,
        shortest=3 if cpu else 30,
        longest=30 if cpu else 600,
    )
    num_gpus = max(1, len(visible_gpus()))
    per_gpu = arguments.engines_per_gpu
    engines: int | None = None
    sections: dict[str, dict[str, Any]] = {}
    if cpu:
        engines = 1
        sections["cluster"] = {"num_cpus": 4}
    elif mode == "colocated":
        engines = num_gpus * (per_gpu or 4)
        sections["learner"] = {"num_ranks": num_gpus}
        sections["weights"] = {"transport": "ipc"}
    elif per_gpu is not None:
        engines = (num_gpus - 1) * per_gpu
    groups = 1 if cpu else 16
    found = config(
        prompts,
        model=arguments.model,
        num_steps=2 if cpu else 100_000,
        engines=engines,
        max_staleness=4 if mode == "async" else 0,
        groups_per_step=groups,
        cpu=cpu,
        tuned=arguments.tuned,
        **sections,
    )
    found["actors"]["engine"]["sleep"] = mode == "colocated"
    if not cpu:
        found["actors"]["max_concurrent_episodes"] = 64
    started = time.monotonic()
    run = Run(arguments.out / f"modes_{mode}-run", found, cpu=cpu)

    def enough(metrics: list[dict[str, Any]]) -> bool:
        return bool(metrics) and metrics[-1]["time_s"] - metrics[0]["time_s"] > arguments.seconds

    code = run.wait(timeout_s=500 if cpu else 380, enough=None if cpu else enough)
    result.add(mode=mode, engines=engines, exit_code=code, total_s=time.monotonic() - started)
    result.add(tail=run.tail())
    numbers = summary(run.metrics(), skip=0 if cpu else 3, trajectories_per_step=8 * groups)
    result.add(**numbers)
    if code == 0 and numbers["num_steps"] > 1:
        result.done()


if __name__ == "__main__":
    main()
