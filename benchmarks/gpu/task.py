"""A real task with SmolLM2: arithmetic with a calculator, held-out reward before and after."""

import time
from typing import Any

from benchmarks.gpu.common import ROOT, Result, parser, rows
from benchmarks.gpu.training import Run, summary


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--name", default="task")
    args.add_argument("--rate", type=float, default=1e-5)
    args.add_argument("--seconds", type=float, default=260)
    args.add_argument("--steps", type=int, default=60)
    arguments = args.parse_args()
    result = Result(arguments.out, arguments.name)
    cpu = arguments.cpu
    overrides: dict[str, Any] = {
        "model.path": arguments.model,
        "run.num_steps": 2 if cpu else arguments.steps,
        "run.checkpoint_every_steps": 0,
        "learner.learning_rate": arguments.rate,
        "evaluation.every_steps": 1 if cpu else 10,
        "evaluation.num_prompts": 4 if cpu else 256,
        "data.evaluation.num_prompts": 4 if cpu else 256,
    }
    if cpu:
        overrides |= {
            "actors.num_actors": 1,
            "actors.engine.dtype": "float32",
            "actors.engine.max_sequences": 8,
            "learner.compute_dtype": "float32",
            "replay.groups_per_step": 1,
            "replay.group_size": 4,
            "cluster.num_cpus": 4,
            "sampling.max_turn_tokens": 16,
            "evaluation.sampling.max_turn_tokens": 16,
        }
    else:
        overrides |= {
            "replay.groups_per_step": 16,
            "replay.group_size": 16,
            "actors.num_actors": 3,
            "actors.max_concurrent_episodes": 192,
            "actors.engine.max_sequences": 256,
            "learner.max_tokens_per_micro_batch": 32_768,
        }
    started = time.monotonic()
    run = Run(
        arguments.out / f"{arguments.name}-run",
        ROOT / "configs" / "smollm2_arithmetic.yaml",
        *(f"{key}={value}" for key, value in overrides.items()),
        cpu=cpu,
    )
    code = run.wait(timeout_s=500 if cpu else arguments.seconds)
    result.add(rate=arguments.rate, exit_code=code, total_s=time.monotonic() - started)
    result.add(tail=run.tail())
    found = [
        {k: v for k, v in row.items() if isinstance(v, int | float)}
        for row in rows(run.folder / "eval.jsonl")
    ]
    metrics = run.metrics()
    result.add(
        evaluations=found,
        rewards=[step.get("rollout/reward/mean") for step in metrics],
        **summary(metrics, skip=0, trajectories_per_step=4 if cpu else 256),
    )
    if len(found) > 1:
        result.done()


if __name__ == "__main__":
    main()
