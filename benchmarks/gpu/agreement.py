"""The same batches on one, two and four ranks: float32 numbers agree, bfloat16 stays within noise.

One process a rank, a GPU each. Every group takes the same steps from the same weights; compared are
the first step's log-probabilities and gradient norm, and the parameters after the last.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.common import ROOT, Result, end, environment, parser, visible_gpus
from raylearner.types import Trajectory, TrajectoryGroup


def make_groups(seed: int, *, num_groups: int, longest: int, vocab: int) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        trajectories = []
        for index in range(4):
            size = int(rng.integers(16, longest))
            mask = np.arange(size) >= 8
            logprobs = np.where(mask, -8.0 - rng.random(size), np.nan).astype(np.float32)
            trajectories.append(
                Trajectory(
                    group_id=1000 * seed + group,
                    sample_index=index,
                    attempt=0,
                    segment=0,
                    prompt_id=str(group),
                    token_ids=rng.integers(10, vocab, size).astype(np.int32),
                    loss_mask=mask,
                    train_mask=mask.copy(),
                    behavior_logprobs=logprobs,
                    policy_versions=np.where(mask, seed, -1).astype(np.int32),
                    claim_policy_version=seed,
                    reward=float(rng.random()),
                )
            )
        groups.append(
            TrajectoryGroup(
                group_id=1000 * seed + group,
                prompt_id=str(group),
                policy_version=seed,
                trajectories=tuple(trajectories),
            )
        )
    return groups


def run_rank(arguments: Any) -> None:
    import torch

    from raylearner.config.schema import LearnerSection
    from raylearner.learner import mesh
    from raylearner.learner.batch import pack
    from raylearner.learner.learner import Learner

    device = "cpu" if arguments.cpu else "cuda"
    group = mesh.connect(
        rank=arguments.rank,
        world_size=arguments.world,
        port=arguments.port,
        device=device,
    )
    num_steps = (2 if arguments.cpu else 3) if arguments.dtype == "float32" else 20
    budget, longest = (256, 48) if arguments.cpu else (8192, 512)
    config = LearnerSection(
        num_ranks=arguments.world,
        compute_dtype=arguments.dtype,
        learning_rate=1e-5,
        max_tokens_per_micro_batch=budget,
        num_mini_batches=2,
    )
    learner = Learner(
        config,
        model_path=arguments.model,
        num_steps=num_steps,
        device=device,
        device_mesh=group,
    )
    probe = [list(range(10 + i, 40 + i)) for i in range(4)]
    found: dict[str, Any] = {"probe_before": np.array(learner.probe_logprobs(probe))}
    metrics = []
    for step in range(num_steps):
        batches = pack(
            make_groups(step, num_groups=4 if arguments.cpu else 16, longest=longest, vocab=40_000),
            policy_version=step,
            num_ranks=arguments.world,
            max_tokens_per_micro_batch=budget,
            num_mini_batches=2,
        )
        output = learner.step(batches[arguments.rank])
        metrics.append([output.metrics["learner/loss"], output.metrics["learner/grad_norm"]])
    found["metrics"] = np.array(metrics)
    found["probe_after"] = np.array(learner.probe_logprobs(probe))
    for name, tensor in learner.named_weights("float32"):
        if any(part in name for part in ("layers.0.", "layers.15.", "norm.weight")):
            found[f"weight.{name}"] = tensor.float().cpu().numpy()
    if arguments.rank == 0:
        np.savez(arguments.out / f"agreement-{arguments.dtype}-{arguments.world}.npz", **found)
    if device == "cuda":
        torch.cuda.synchronize()
    mesh.disconnect()


def launch(
    arguments: Any, *, world: int, dtype: str, gpus: list[str]
) -> list["subprocess.Popen[Any]"]:
    from raylearner.learner.mesh import free_port

    port = free_port()
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.gpu.agreement",
                *sys.argv[1:],
                *("--rank", str(rank), "--world", str(world)),
                *("--port", str(port), "--dtype", dtype),
            ],
            env=environment([gpus[rank]] if gpus else None, cpu=arguments.cpu),
            cwd=ROOT,
            start_new_session=True,
        )
        for rank in range(world)
    ]


def compare(out: Path, dtype: str, worlds: list[int]) -> dict[str, Any]:
    """Relative differences to one rank: of values by their own size, of weights by the change."""
    found = {world: dict(np.load(out / f"agreement-{dtype}-{world}.npz")) for world in worlds}
    one = found[worlds[0]]
    table: dict[str, Any] = {
        f"metrics_{world}": found[world]["metrics"].tolist() for world in worlds
    }
    for world in worlds[1:]:
        other = found[world]
        relative = {}
        for key in ("probe_before", "metrics", "probe_after"):
            scale = np.maximum(np.abs(one[key]), 1e-3)
            relative[key] = float((np.abs(one[key] - other[key]) / scale).max())
        weights = [key for key in one if key.startswith("weight.")]
        relative["weights"] = max(
            float(np.abs(one[key] - other[key]).max() / np.abs(one[key]).max()) for key in weights
        )
        relative["probe_after_mean_absolute"] = float(
            np.abs(one["probe_after"] - other["probe_after"]).mean()
        )
        table[f"{world} ranks vs {worlds[0]}"] = relative
    return table


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--rank", type=int)
    args.add_argument("--world", type=int, default=1)
    args.add_argument("--port", type=int)
    args.add_argument("--dtype", default="float32")
    arguments = args.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    result = Result(arguments.out, "agreement")
    gpus = visible_gpus()
    most = 2 if arguments.cpu else max(1, len(gpus))
    worlds = [world for world in (1, 2, 4) if world <= most]
    dtypes = ["float32"] if arguments.cpu else ["float32", "bfloat16"]
    for dtype in dtypes:
        codes: dict[int, list[int]] = {}
        running: list[subprocess.Popen[Any]] = []
        try:
            # One and two ranks at once where four GPUs are there; four after them.
            together = [world for world in worlds if world < 4] if len(gpus) >= 3 else []
            for batch in [together] + [[w] for w in worlds if w not in together]:
                start = 0
                waiting = {}
                for world in batch:
                    waiting[world] = launch(
                        arguments, world=world, dtype=dtype, gpus=gpus[start : start + world]
                    )
                    running += waiting[world]
                    start += world
                codes |= {w: [p.wait() for p in found] for w, found in waiting.items()}
            result.add(**{f"exit_codes_{dtype}": codes})
            result.add(**{dtype: compare(arguments.out, dtype, worlds)})
        finally:
            for process in running:
                end(process)
    result.done()


if __name__ == "__main__":
    main()
