"""Sampling that the engine cannot do, or whose log-probabilities would mean something else to the
learner.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from raylearner.config.problems import Finding, did_you_mean
from raylearner.config.schema import RunConfig, SamplingSection, VllmEngine

ATTENTION = frozenset(
    {
        "attention_backend",
        "disable_cascade_attn",
        "disable_hybrid_kv_cache_manager",
        "enable_flashinfer_autotune",
        "gdn_prefill_backend",
        "kda_decode_backend",
        "kda_prefill_backend",
        "mamba_backend",
        "mamba_block_size",
        "mamba_cache_mode",
    }
)
CACHE = frozenset(
    {
        "block_size",
        "enable_prefix_caching",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "num_gpu_blocks_override",
        "prefix_caching_hash_algo",
    }
)
COMPILATION = frozenset(
    {
        "compilation_config",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "optimization_level",
        "performance_mode",
    }
)
KERNELS = frozenset(
    {
        "all2all_backend",
        "disable_custom_all_reduce",
        "enable_expert_parallel",
        "kernel_config",
        "linear_backend",
        "moe_backend",
    }
)
LOADING = frozenset(
    {
        "download_dir",
        "load_format",
        "max_parallel_loading_workers",
        "safetensors_load_strategy",
        "trust_remote_code",
        "use_tqdm_on_load",
    }
)
PLACEMENT = frozenset(
    {
        "cpu_distributed_timeout_seconds",
        "distributed_executor_backend",
        "distributed_timeout_seconds",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
    }
)
PICTURES = frozenset(
    {
        "mm_encoder_attn_backend",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "renderer_num_workers",
        "skip_mm_profiling",
    }
)
REPORTS = frozenset(
    {
        "collect_detailed_traces",
        "cudagraph_metrics",
        "disable_log_stats",
        "enable_layerwise_nvtx_tracing",
        "enable_mfu_metrics",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "otlp_traces_endpoint",
        "profiler_config",
        "show_hidden_metrics_for_version",
    }
)
SCHEDULING = frozenset(
    {
        "async_scheduling",
        "disable_chunked_mm_input",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "structured_outputs_config",
    }
)
SAFE = (
    ATTENTION
    | CACHE
    | COMPILATION
    | KERNELS
    | LOADING
    | PLACEMENT
    | PICTURES
    | REPORTS
    | SCHEDULING
)

OWN_KEYS = {
    "dtype": "actors.engine.dtype",
    "enforce_eager": "actors.engine.eager",
    "enable_sleep_mode": "actors.engine.sleep",
    "gpu_memory_utilization": "actors.engine.memory_fraction",
    "limit_mm_per_prompt": "renderer.images",
    "max_model_len": "actors.engine.max_model_tokens",
    "max_num_seqs": "actors.engine.max_sequences",
    "model": "model.path",
    "seed": "run.seed",
    "tensor_parallel_size": "actors.engine.tensor_parallel_size",
}
"""Arguments that the configuration sets by a key of its own."""
REASONS = {
    "enable_lora": "it follows from weights.transport",
    "hf_overrides": "engine and learner would run different models; change the checkpoint's config.json",
    "hf_token": "keys do not belong into a configuration, which is stored; set HF_TOKEN",
    "logits_processors": "the learner would not know what they do to the distribution",
    "logprobs_mode": "only 'processed_logprobs' are those of the distribution sampled from",
    "max_logprobs": "every token's log-probability is needed",
    "quantization": "pushed weights are not quantized",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "weight_transfer_config": "it follows from weights.transport",
    "worker_extension_cls": "raylearner's own loads the weights",
}
"""What further arguments would break."""


def argument_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and problem of every argument that is not known to be safe."""
    for name in sorted(arguments.keys() - SAFE):
        if name in OWN_KEYS:
            yield name, f"cannot be set: it follows from {OWN_KEYS[name]}; set that"
        elif name in REASONS:
            yield name, f"cannot be set: {REASONS[name]}; remove it"
        else:
            yield (
                name,
                "is not among the engine arguments that are known to leave tokens,"
                f" log-probabilities, stops and weights as they are{did_you_mean(name, SAFE)};"
                " docs/running.md lists those",
            )


SHAPING = {
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "extra_args",
}
"""SamplingParams that change the distribution sampled from; what the engine reports is of the changed
one, masks of a regex included: vLLM applies them to the logits before it takes any log-probability."""
HARMLESS = {"ignore_eos", "repetition_detection", "skip_reading_prefix_cache"}
"""SamplingParams that change when a turn ends, or nothing."""


def check_sampling(config: RunConfig) -> Iterator[Finding]:
    """Clashes of both samplings with the engine, and of training's with the learner."""
    yield from _compared(config)
    findings = [*_understood("sampling", config.sampling, config)]
    yield from findings
    if config.evaluation is not None:
        for finding in _understood("evaluation.sampling", config.evaluation.sampling, config):
            inherited = Finding(finding.key.removeprefix("evaluation."), finding.text)
            if inherited not in findings:
                yield finding
    engine = config.actors.engine
    if isinstance(engine, VllmEngine):
        for name, problem in argument_problems(engine.extra_arguments):
            yield Finding(f"actors.engine.extra_arguments.{name}", problem)


def _understood(key: str, sampling: SamplingSection, config: RunConfig) -> Iterator[Finding]:
    """What the engine does not take, or raylearner sets itself."""
    engine = config.actors.engine
    if not isinstance(engine, VllmEngine):
        for name in ("regex", "extra_arguments"):
            if getattr(sampling, name):
                yield Finding(
                    f"{key}.{name}",
                    f"needs actors.engine.kind 'vllm', got {engine.kind!r}; remove it",
                )
        return
    for name in sorted(sampling.extra_arguments.keys() - SHAPING - HARMLESS):
        known = ", ".join(sorted(SHAPING | HARMLESS))
        yield Finding(
            f"{key}.extra_arguments.{name}",
            f"is set by raylearner or is no SamplingParams of vLLM; further ones are {known}",
        )
    if sampling.regex is not None:
        try:
            re.compile(sampling.regex)
        except re.error as error:
            yield Finding(f"{key}.regex", f"is no regular expression: {error}")


def _compared(config: RunConfig) -> Iterator[Finding]:
    """Engine and learner must mean the same distribution where log-probabilities are compared."""
    sampling, reason = config.sampling, _why_compared(config)
    if sampling.temperature == 0.0:
        yield Finding(
            "sampling.temperature",
            "must be > 0 in training, got 0.0: greedy tokens carry no probability to learn from; "
            "1.0 is the usual choice",
        )
    if reason is None:
        return
    off = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "min_p": (sampling.min_p, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 1.0),
        "regex": (sampling.regex, None),
        **{
            f"extra_arguments.{name}": (value, None)
            for name, value in sampling.extra_arguments.items()
            if name in SHAPING
        },
    }
    for name, (value, neutral) in off.items():
        if value != neutral:
            wanted = "be absent" if neutral is None else f"be {neutral} (off)"
            yield Finding(
                f"sampling.{name}",
                f"must {wanted} in training, got {value!r}: {reason} compares learner and "
                "engine probabilities, and the learner applies the temperature only; "
                "sharpen with sampling.temperature, or restrict in evaluation.sampling alone",
            )


def _why_compared(config: RunConfig) -> str | None:
    """The key by which the engine's log-probabilities enter the objective; None without one."""
    learner = config.learner
    if learner.loss.weighs_by_behavior:
        return f"learner.loss.kind {learner.loss.kind!r}"
    if learner.corrections:
        return f"learner.corrections, {learner.corrections[0].kind!r},"
    if learner.advantage.kind == "vtrace":
        return "learner.advantage.kind 'vtrace'"
    if learner.proximal != "recomputed":
        return f"learner.proximal {learner.proximal!r}"
    return None
