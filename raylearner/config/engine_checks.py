"""Check sampling and engine arguments: what the engine supports, and what the learner can reproduce."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from raylearner.config.problems import Finding, did_you_mean
from raylearner.config.schema import RunConfig, SamplingSection, VllmEngine

SAFE = frozenset(
    # attention, cache, compilation, kernels, loading, placement, images, reports, scheduling
    [
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
        "block_size",
        "enable_prefix_caching",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "num_gpu_blocks_override",
        "prefix_caching_hash_algo",
        "compilation_config",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "optimization_level",
        "performance_mode",
        "all2all_backend",
        "disable_custom_all_reduce",
        "enable_expert_parallel",
        "kernel_config",
        "linear_backend",
        "moe_backend",
        "download_dir",
        "load_format",
        "max_parallel_loading_workers",
        "safetensors_load_strategy",
        "trust_remote_code",
        "use_tqdm_on_load",
        "cpu_distributed_timeout_seconds",
        "distributed_executor_backend",
        "distributed_timeout_seconds",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "mm_encoder_attn_backend",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "renderer_num_workers",
        "skip_mm_profiling",
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
        "async_scheduling",
        "disable_chunked_mm_input",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "structured_outputs_config",
    ]
)
"""Engine arguments of vLLM that change only speed, memory and reports. Others might silently change tokens,
log-probabilities, stops or weights, so a run refuses them."""
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
"""Arguments that the configuration sets by another key."""
REASONS = {
    "enable_lora": "it follows from weights.transport",
    "hf_overrides": "engine and learner would run different models; change the checkpoint's config.json",
    "hf_token": "configurations are stored and must not contain secrets; set HF_TOKEN",
    "logits_processors": "the learner cannot reproduce their effect on the distribution",
    "logprobs_mode": "only 'processed_logprobs' belong to the distribution that is sampled from",
    "max_logprobs": "the log-probability of every token is needed",
    "quantization": "pushed weights are not quantized",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "weight_transfer_config": "it follows from weights.transport",
    "worker_extension_cls": "raylearner's extension loads the weights",
}
"""Reasons to refuse further arguments."""


def argument_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and error of each argument that is not known to be safe."""
    for name in sorted(arguments.keys() - SAFE):
        if name in OWN_KEYS:
            yield name, f"cannot be set: use {OWN_KEYS[name]} instead"
        elif name in REASONS:
            yield name, f"cannot be set: {REASONS[name]}; remove it"
        else:
            yield (
                name,
                "is not among the engine arguments known to keep tokens, log-probabilities, stops and"
                f" weights unchanged, which docs/running.md lists{did_you_mean(name, SAFE)}",
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
"""SamplingParams that change the distribution. The engine reports log-probabilities of the changed one,
masks of a regex included: vLLM applies them to the logits first."""
HARMLESS = {"ignore_eos", "repetition_detection", "skip_reading_prefix_cache"}
"""SamplingParams that change when a turn ends, or nothing."""


def check_sampling(config: RunConfig) -> Iterator[Finding]:
    """Yield errors of `sampling` and `evaluation.sampling` for the engine, and of `sampling` for the learner."""
    yield from _check_distribution(config)
    findings = [*_check_supported("sampling", config.sampling, config)]
    yield from findings
    if config.evaluation is not None:
        sections = {"evaluation": config.evaluation.sampling}
        sections |= {h.section_key: h.section.sampling for h in config.held_out}
        for key, sampling in sections.items():
            for finding in _check_supported(f"{key}.sampling", sampling, config):
                # A key that is inherited is reported where it was set.
                rest = finding.key.removeprefix(f"{key}.")
                if all(
                    Finding(f"{up}{rest}", finding.text) not in findings
                    for up in ("", "evaluation.")
                ):
                    findings.append(finding)
                    yield finding
    engine = config.actors.engine
    if isinstance(engine, VllmEngine):
        for name, problem in argument_problems(engine.extra_arguments):
            yield Finding(f"actors.engine.extra_arguments.{name}", problem)


def _check_supported(key: str, sampling: SamplingSection, config: RunConfig) -> Iterator[Finding]:
    """Yield arguments that the engine does not support, or that raylearner sets."""
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
            f"is set by raylearner or is not a SamplingParams argument of vLLM; must be one of {known}",
        )
    if sampling.regex is not None:
        try:
            re.compile(sampling.regex)
        except re.error as error:
            yield Finding(f"{key}.regex", f"is not a valid regular expression: {error}")


def _check_distribution(config: RunConfig) -> Iterator[Finding]:
    """Yield keys by which the distributions of engine and learner would differ where they are compared."""
    sampling, reason = config.sampling, _compared_by(config)
    if sampling.temperature == 0.0:
        yield Finding(
            "sampling.temperature",
            "must be > 0 in training, got 0.0: greedy tokens have no probability to learn from; set it to"
            " 1.0, the usual value",
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
            expected = "be absent" if neutral is None else f"be {neutral} (off)"
            yield Finding(
                f"sampling.{name}",
                f"must {expected} in training, got {value!r}: {reason} compares the probabilities of learner"
                " and engine, and the learner only applies the temperature; use sampling.temperature,"
                " or set this in evaluation.sampling only",
            )


def _compared_by(config: RunConfig) -> str | None:
    """Return the key by which the engine's log-probabilities enter the objective, or None."""
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
