"""Tokens per second, MFU, peak memory and kernels of a dense model's training steps, packed tokens.

Random weights, float32 masters, bfloat16 compute, fused AdamW; forward, backward, clip and update are
timed, over `--micro-batches` an update. The FLOP formula is that of `raylearner.learner.recording`.

    python -m benchmarks.gpu.throughput --out DIR --model SMOLLM2 --compile --micro-batches 4
    ... --keep nothing      what a step was before gathered weights and gradients were kept
    ... --size 8B --ranks 4 --keep weights      one process a GPU, FSDP2
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.common import ROOT, Result, end, environment, model_folder, parser, visible_gpus
from raylearner.config.memory import Kept
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model import mesh
from raylearner.learner.model.loading import load_sharded
from raylearner.learner.model.policy import ModelOptions
from raylearner.learner.optimizer import ClippedAdamW
from raylearner.learner.recording import ModelCost, peak_flops

KEPT = {
    "nothing": Kept(),
    "weights": Kept(weights=True),
    "all": Kept(weights=True, gradients=True),
}
NUM_KERNELS = 40
RANK_LIMIT_S = 560.0


def options() -> argparse.ArgumentParser:
    args = parser(__doc__)
    args.add_argument("--size", default="1.5B")
    args.add_argument("--compile", action="store_true")
    args.add_argument("--checkpointing", default="none")
    args.add_argument("--attention", default="auto")
    args.add_argument("--keep", choices=KEPT, default="all", help="between micro-batches")
    args.add_argument("--chunk", type=int, default=8192, help="tokens of a chunk of the head")
    args.add_argument("--micro-batches", type=int, default=1, help="for each optimizer step")
    args.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    args.add_argument("--length", type=int, default=1024, help="of a row")
    args.add_argument("--steps", type=int, default=12)
    args.add_argument("--ranks", type=int, default=1)
    args.add_argument("--name", help="of the result; by default made of the options")
    args.add_argument("--rank", type=int, help="of a process that this one started")
    args.add_argument("--port", type=int)
    return args


def main() -> None:
    arguments = options().parse_args()
    if arguments.ranks == 1 or arguments.rank is not None:
        measure(arguments)
        return
    gpus, port = visible_gpus() or [str(i) for i in range(arguments.ranks)], mesh.free_port()
    command = [sys.executable, "-m", "benchmarks.gpu.throughput", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--port", str(port)],
            env=environment([gpus[rank]], cpu=arguments.cpu),
            cwd=ROOT,
            start_new_session=True,
        )
        for rank in range(arguments.ranks)
    ]
    try:
        until = time.monotonic() + RANK_LIMIT_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.2)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            end(rank)
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def name_of(arguments: argparse.Namespace) -> str:
    parts = [
        "throughput",
        "" if arguments.size == "1.5B" else arguments.size,
        "compiled" if arguments.compile else "eager",
        "" if arguments.checkpointing == "none" else arguments.checkpointing,
        "" if arguments.micro_batches == 1 else str(arguments.micro_batches),
        "" if arguments.keep == "all" else f"keep_{arguments.keep}",
    ]
    return arguments.name or "_".join(part for part in parts if part)


def measure(arguments: argparse.Namespace) -> None:
    rank, device = arguments.rank or 0, "cpu" if arguments.cpu else "cuda"
    group = mesh.connect(
        rank=rank,
        world_size=arguments.ranks,
        address=None if arguments.ranks == 1 else ("127.0.0.1", arguments.port),
        device=device,
    )
    out = arguments.out if rank == 0 else arguments.out / f"rank_{rank}"
    result = Result(out, name_of(arguments))
    num_micros, num_rows, length = arguments.micro_batches, arguments.rows, arguments.length
    size = arguments.size
    if arguments.cpu:
        size, num_rows, length = "tiny", 4, 64
    folder = model_folder(out, size, tokenizer=arguments.model)
    started = time.monotonic()
    model = load_sharded(
        str(folder),
        group,
        dtype=torch.float32,
        compute_dtype=torch.float32 if arguments.cpu else torch.bfloat16,
        options=ModelOptions(
            chunk_tokens=arguments.chunk,
            should_compile=arguments.compile,
            activation_checkpointing=arguments.checkpointing,
            attention=arguments.attention,
            kept=KEPT[arguments.keep],
        ),
        random_seed=0,
    )
    parameters = list(model.parameters())
    adamw = ClippedAdamW(
        parameters, learning_rate=1e-6, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0
    )
    cost = ModelCost.of(model.causal_lm)
    result.add(
        options={k: v for k, v in vars(arguments).items() if k not in ("out", "model", "port")},
        size=size,
        attention=model.causal_lm.config._attn_implementation,
        num_parameters=sum(p.numel() for p in parameters),
        num_body_weights=cost.num_body_weights,
        num_head_weights=cost.num_head_weights,
        load_s=time.monotonic() - started,
    )
    generator = torch.Generator().manual_seed(rank)
    vocab = model.causal_lm.config.vocab_size
    ids = torch.randint(3, min(vocab, 49_000), (num_rows, length), generator=generator)
    scored = torch.ones(num_rows, length, dtype=torch.bool)
    scored[:, 0] = False
    tokens = PackedTokens.of(list(ids.numpy()), list(scored.numpy()), device=device)
    advantages = torch.randn(num_rows * length, generator=generator).to(device)

    def gradients() -> None:
        for number in range(num_micros):
            scores = model(tokens)
            share = -(scores.logprobs * advantages).sum() / len(advantages) / num_micros
            model.backward(share, is_last=number == num_micros - 1)

    def step() -> None:
        gradients()
        adamw.clip_and_step(adamw.grad_norm())
        adamw.zero_grad()

    started = time.monotonic()
    for _ in range(3):
        step()
    result.add(warm_up_s=time.monotonic() - started)
    if device == "cuda":
        result.add(host_waits=_host_waits(gradients))
        adamw.zero_grad()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2 if arguments.cpu else arguments.steps):
        started = time.monotonic()
        step()
        _synchronize(device)
        times.append(time.monotonic() - started)
    seconds = statistics.median(times)
    flops = num_micros * cost.flops([length] * num_rows, num_scored=num_rows * (length - 1))
    peak = peak_flops(device)
    result.add(
        step_s=seconds,
        step_s_min=min(times),
        step_s_max=max(times),
        num_micro_batches=num_micros,
        tokens_per_s=num_micros * num_rows * length / seconds,
        flops_per_step=flops,
        tflops=flops / seconds / 1e12,
        mfu=None if peak is None else flops / seconds / peak,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    )
    result.add(profile=_profile(step, device))
    mesh.disconnect()
    result.done()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _host_waits(gradients: Callable[[], None]) -> str:
    """Return where the host waits for the GPU between the first forward and the last backward."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "nowhere"


def _profile(step: Callable[[], None], device: str) -> dict[str, Any]:
    """Where the time of one step goes: seconds in kernels, and the longest of them."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as found:
        started = time.monotonic()
        step()
        _synchronize(device)
        wall = time.monotonic() - started
    table = [
        (
            e.key[:100],
            (e.self_device_time_total if is_gpu else e.self_cpu_time_total) / 1e3,
            e.count,
        )
        for e in found.key_averages()
    ]
    table.sort(key=lambda row: -row[1])
    return {
        "wall_s": wall,
        "busy_s": sum(ms for _, ms, _ in table) / 1e3,
        "kernels": [{"name": n, "ms": ms, "calls": c} for n, ms, c in table[:NUM_KERNELS]],
    }


if __name__ == "__main__":
    main()
