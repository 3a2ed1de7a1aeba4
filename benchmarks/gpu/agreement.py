"""The same batches on one, two and four ranks: float32 numbers agree, bfloat16 stays within noise.

One process a rank, a GPU each. Every group takes the same steps from the same weights; compared are
the first step's log-probabilities and gradient norm, and the parameters after the last.

With `--context` the ranks share every micro-batch, of a random model whose heads they can deal out,
and at the end take a step on one long trajectory: its seconds and peak memory tell what slices save.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.common import ROOT, Result, end, environment, parser, visible_gpus
from raylearner.learner.spec import LearnerSpec, StepOutput
from raylearner.types import Trajectory, TrajectoryGroup

BYTES = 250
"""Tokens that the random model of `--context` knows, at least."""

LONG_TOKENS = 32_768
"""Length of the trajectories that it is timed with."""


def make_groups(
    seed: int, *, num_groups: int, longest: int, vocab: int, shortest: int = 16, group_size: int = 4
) -> list[TrajectoryGroup]:
    """Of random tokens, `longest` excluded."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in range(num_groups):
        trajectories = []
        for index in range(group_size):
            size = int(rng.integers(shortest, longest))
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

    from raylearner.config.schema import LearnerSection, RunSection
    from raylearner.learner.batch.pack import pack
    from raylearner.learner.learner import Learner
    from raylearner.learner.model import mesh
    from raylearner.learner.weight_writer import probe_logprobs

    device = "cpu" if arguments.cpu else "cuda"
    group = mesh.connect(
        rank=arguments.rank,
        world_size=arguments.world,
        address=("127.0.0.1", arguments.port),
        device=device,
    )
    num_steps = (2 if arguments.cpu else 3) if arguments.dtype == "float32" else 20
    budget, longest = (256, 48) if arguments.cpu else (8192, 512)
    vocab = BYTES if arguments.context else 40_000
    config = LearnerSection(
        num_ranks=arguments.world,
        gpus_per_rank=float(device == "cuda"),
        context_parallel_size=arguments.world if arguments.context else 1,
        compute_dtype=arguments.dtype,
        learning_rate=1e-5,
        max_tokens_per_micro_batch=budget,
        num_mini_batches=2,
    )
    spec = LearnerSpec(
        learner=config,
        model_path=str(context_model(arguments)) if arguments.context else arguments.model,
        run=RunSection(num_steps=num_steps),
    )
    learner = Learner(spec, device_mesh=group)
    probe = [list(range(10 + i, 40 + i)) for i in range(4)]
    found: dict[str, Any] = {
        "probe_before": np.array(probe_logprobs(learner.models.policy, probe, device=device))
    }
    metrics = []

    def step(groups: list[TrajectoryGroup], *, max_tokens: int) -> StepOutput:
        batches = pack(
            groups,
            policy_version=learner.policy_version,
            num_ranks=config.num_data_ranks,
            max_tokens_per_micro_batch=max_tokens,
            num_mini_batches=2,
        )
        return learner.step(batches[arguments.rank // config.context_parallel_size])

    for number in range(num_steps):
        num_groups = 4 if arguments.cpu else 16
        groups = make_groups(number, num_groups=num_groups, longest=longest, vocab=vocab)
        output = step(groups, max_tokens=budget)
        metrics.append([output.metrics["learner/loss"], output.metrics["learner/grad_norm"]])
    found["metrics"] = np.array(metrics)
    found["probe_after"] = np.array(probe_logprobs(learner.models.policy, probe, device=device))
    for name, tensor in learner.models.policy.named_weights(torch.float32):
        if any(part in name for part in ("layers.0.", "layers.15.", "norm.weight")):
            found[f"weight.{name}"] = tensor.float().cpu().numpy()
    if arguments.context:
        length = 512 if arguments.cpu else LONG_TOKENS
        sizes = {"shortest": length - 1, "longest": length, "group_size": 2}
        groups = make_groups(num_steps, num_groups=1, vocab=vocab, **sizes)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        output = step(groups, max_tokens=length)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else math.nan
        found["long"] = np.array([output.metrics["learner/step_s"], peak])
    if arguments.rank == 0:
        np.savez(result_path(arguments, arguments.world), **found)
    if device == "cuda":
        torch.cuda.synchronize()
    mesh.disconnect()


def context_model(arguments: Any) -> Path:
    """About 100 million weights in 8 layers, whose 16 heads 2, 4, 8 or 16 ranks share; few on the CPU."""
    from raylearner.config.schema import TinyModel
    from raylearner.tiny.model import make_tiny_model

    folder = arguments.out / "model-context"
    if not (folder / "config.json").exists():
        shape = {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "intermediate_size": 2816}
        config = TinyModel(kind="tiny", max_length=LONG_TOKENS, **({} if arguments.cpu else shape))
        make_tiny_model(config, folder, seed=0)
    return folder


def result_path(arguments: Any, world: int) -> Path:
    name = "agreement_context" if arguments.context else "agreement"
    return arguments.out / f"{name}-{arguments.dtype}-{world}.npz"


def launch(
    arguments: Any, *, world: int, dtype: str, gpus: list[str]
) -> list["subprocess.Popen[Any]"]:
    from raylearner.learner.model.mesh import free_port

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


def compare(paths: dict[int, Path]) -> dict[str, Any]:
    """Relative differences to one rank: of values by their own size, of weights by the change."""
    found = {world: dict(np.load(path)) for world, path in paths.items()}
    worlds = list(found)
    one = found[worlds[0]]
    table: dict[str, Any] = {
        f"metrics_{world}": found[world]["metrics"].tolist() for world in worlds
    }
    for world in worlds:
        if "long" in found[world]:
            seconds, peak = found[world]["long"].tolist()
            table[f"long_{world}"] = {"step_s": seconds, "peak_memory_gib": peak}
    for world in worlds[1:]:
        other = found[world]
        relative = {}
        for key in ("probe_before", "metrics", "probe_after"):
            scale = np.maximum(np.abs(one[key]), 1e-3)
            relative[key] = float((np.abs(one[key] - other[key]) / scale).max())
        # Biases start at 0: their size is that of updates, which Adam makes of rounding errors, too.
        weights = [k for k in one if k.startswith("weight.") and not k.endswith(".bias")]
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
    args.add_argument("--context", action="store_true", help="ranks share every micro-batch")
    arguments = args.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    result = Result(arguments.out, "agreement_context" if arguments.context else "agreement")
    if arguments.context:
        context_model(arguments)
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
            arguments.dtype = dtype
            result.add(**{dtype: compare({w: result_path(arguments, w) for w in worlds})})
        finally:
            for process in running:
                end(process)
    result.done()


if __name__ == "__main__":
    main()
