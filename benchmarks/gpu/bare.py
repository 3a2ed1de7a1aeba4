"""Tokens per second of vLLM alone: its own AsyncLLM, log-probabilities of sampled tokens, no raylearner.

A fixed number of requests run at once; each that ends is followed by another. The options are those of a
run's engines, the precision of the head included.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.common import say

MAX_WARM_UP_S = 120.0
"""Maximum time until the first token is counted."""


async def run_bare(
    folder: str,
    *,
    lengths: Callable[[], int],
    num_requests: int,
    max_model_tokens: int,
    prompt_tokens: int,
    seconds: float,
    warm_up_s: float,
    cpu: bool,
) -> dict[str, float]:
    """Return tokens per second over `seconds`, and the time of the start."""
    if cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": folder,
        "dtype": "float32" if cpu else "bfloat16",
        "max_model_len": max_model_tokens,
        "max_num_seqs": num_requests,
        "enforce_eager": cpu,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        **({} if cpu else {"gpu_memory_utilization": 0.85}),
        **({} if cpu else {"hf_overrides": {"head_dtype": "float32"}}),
    }
    started = time.monotonic()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    start_s = time.monotonic() - started
    say(start_s=start_s)
    number = 0

    async def play(is_first: bool) -> None:
        nonlocal number
        number += 1
        name, size = str(number), lengths()
        if is_first:  # as if it had run for some time already
            size = max(1, size * number // num_requests)
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=size,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = [3 + (7 * number + i) % 97 for i in range(prompt_tokens)]
        async for _ in llm.generate({"prompt_token_ids": prompt}, parameters, name):
            pass

    async def keep_busy() -> None:
        await play(is_first=True)
        while True:
            await play(is_first=False)

    workers = [asyncio.create_task(keep_busy()) for _ in range(num_requests)]
    try:
        await _sleep(warm_up_s, workers)
        until = time.monotonic() + MAX_WARM_UP_S
        while _num_sampled() == 0:
            if time.monotonic() > until:
                raise RuntimeError(f"vLLM counted no token in {MAX_WARM_UP_S:g} s")
            await _sleep(1.0, workers)
        before, began = _num_sampled(), time.monotonic()
        await _sleep(seconds, workers)
        sampled, took = _num_sampled() - before, time.monotonic() - began
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        llm.shutdown()
    return {"tokens_per_s": sampled / took, "sampled_tokens": sampled, "start_s": start_s}


async def _sleep(seconds: float, workers: list[asyncio.Task[None]]) -> None:
    """Wait, and raise what ended a worker."""
    done, _ = await asyncio.wait(workers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for worker in done:
        worker.result()


def _num_sampled() -> float:
    """Return vLLM's own count of sampled tokens."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:generation_tokens_total"
    )
