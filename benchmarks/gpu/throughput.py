"""Tokens per second, MFU and peak memory of one GPU training a 1.5 B dense model, packed 8k tokens.

Random weights, float32 masters, bfloat16 compute, fused AdamW; forward, backward, clip and update are
timed. The FLOP formula is that of `raylearner.learner.throughput`.
"""

import time

import torch

from benchmarks.gpu.common import Result, model_folder, parser
from raylearner.config.memory import Kept
from raylearner.learner.batch.micro_batch import PackedTokens
from raylearner.learner.model import mesh
from raylearner.learner.model.loading import load_sharded
from raylearner.learner.model.policy import ModelOptions
from raylearner.learner.optimizer import ClippedAdamW
from raylearner.learner.recording import ModelCost, peak_flops


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--compile", action="store_true")
    args.add_argument("--checkpointing", default="none")
    args.add_argument("--keep", action="store_true", help="gathered weights, forward to backward")
    args.add_argument("--micro-batches", type=int, default=1, help="for each optimizer step")
    arguments = args.parse_args()
    suffix = ("_compiled" if arguments.compile else "_eager") + (
        "" if arguments.checkpointing == "none" else f"_{arguments.checkpointing}"
    )
    num_micros = arguments.micro_batches
    suffix += f"_{num_micros}" if num_micros > 1 else ""
    result = Result(arguments.out, f"throughput{suffix}")
    device = "cpu" if arguments.cpu else "cuda"
    size, length, num_rows = ("tiny", 64, 4) if arguments.cpu else ("1.5B", 1024, 8)
    folder = model_folder(arguments.out, size, tokenizer=arguments.model)
    group = mesh.connect(device=device)
    started = time.monotonic()
    model = load_sharded(
        str(folder),
        group,
        dtype=torch.float32,
        compute_dtype=torch.float32 if arguments.cpu else torch.bfloat16,
        options=ModelOptions(
            chunk_tokens=2048,
            should_compile=arguments.compile,
            activation_checkpointing=arguments.checkpointing,
            kept=Kept(weights=arguments.keep, gradients=arguments.keep),
        ),
        random_seed=0,
    )
    parameters = list(model.parameters())
    adamw = ClippedAdamW(
        parameters, learning_rate=1e-6, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0
    )
    cost = ModelCost.of(model.causal_lm)
    result.add(
        size=size,
        attention=model.causal_lm.config._attn_implementation,
        num_parameters=sum(p.numel() for p in parameters),
        num_body_weights=cost.num_body_weights,
        num_head_weights=cost.num_head_weights,
        load_s=time.monotonic() - started,
    )
    generator = torch.Generator().manual_seed(0)
    vocab = model.causal_lm.config.vocab_size
    ids = torch.randint(3, min(vocab, 49_000), (num_rows, length), generator=generator)
    scored = torch.ones(num_rows, length, dtype=torch.bool)
    scored[:, 0] = False
    tokens = PackedTokens.of(list(ids.numpy()), list(scored.numpy()), device=device)
    advantages = torch.randn(num_rows * length, generator=generator).to(device)

    def step() -> None:
        for _ in range(num_micros):
            scores = model(tokens)
            (-(scores.logprobs * advantages).sum() / len(advantages) / num_micros).backward()
        adamw.clip_and_step(adamw.grad_norm())
        adamw.zero_grad()

    started = time.monotonic()
    for _ in range(3):
        step()
    result.add(warm_up_s=time.monotonic() - started)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    num_steps = 2 if arguments.cpu else 12
    times = []
    for _ in range(num_steps):
        started = time.monotonic()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    seconds = sorted(times)[len(times) // 2]
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
    if device == "cuda":
        _profile(step, result)
    result.done()


def _profile(step, result: Result) -> None:
    """Where the time of one step goes: the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:15]
    result.add(kernels_ms={e.key[:90]: e.self_device_time_total / 1e3 for e in events})


if __name__ == "__main__":
    main()
