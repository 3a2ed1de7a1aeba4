"""`configs/quickstart.yaml`, unchanged but for its length, on the GPUs that are visible."""

import time

import yaml

from benchmarks.gpu.common import ROOT, Result, parser, rows
from benchmarks.gpu.training import Run, summary


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--name", default="quickstart")
    args.add_argument("--steps", type=int, default=30)
    args.add_argument("set", nargs="*", help="further key=value")
    arguments = args.parse_args()
    result = Result(arguments.out, arguments.name)
    steps = 2 if arguments.cpu else arguments.steps
    overrides = [f"run.num_steps={steps}", *arguments.set]
    if arguments.cpu:
        overrides += [
            "model.warm_start.num_steps=20",
            "evaluation.num_prompts=8",
            "actors.num_actors=1",
        ]
    started = time.monotonic()
    run = Run(
        arguments.out / f"{arguments.name}-run",
        ROOT / "configs" / "quickstart.yaml",
        *overrides,
        cpu=arguments.cpu,
    )
    code = run.wait(timeout_s=500 if arguments.cpu else 200)
    result.add(exit_code=code, total_s=time.monotonic() - started)
    result.add(tail=run.tail(40))
    result.add(
        evaluations=[
            {k: v for k, v in row.items() if isinstance(v, int | float)}
            for row in rows(run.folder / "eval.jsonl")
        ],
        **summary(run.metrics(), skip=0, trajectories_per_step=64),
    )
    saved = run.folder / "config.yaml"
    if saved.exists():
        config = yaml.safe_load(saved.read_text())
        result.add(
            gpus_per_actor=config["actors"]["gpus_per_actor"],
            gpus_per_rank=config["learner"]["gpus_per_rank"],
            transport=config["weights"]["transport"],
        )
    if code == 0:
        result.done()


if __name__ == "__main__":
    main()
