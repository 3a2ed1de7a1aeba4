"""Decide what `auto` means for options that cost time at the start and save it in every step."""

from collections.abc import Iterator

from raylearner.config.devices import MIN_PACKED_CAPABILITY, Devices, attention_kernel
from raylearner.config.memory import ModelSize
from raylearner.config.schema import PretrainedModel, RunConfig, VllmEngine
from raylearner.errors import ConfigError

COMPILATION_FLOPS = 5e16
"""Training operations of a rank that take as long without compilation as with it, its start included:
compiling takes a minute, in which a GPU makes about 3e16 operations more than without."""
MIN_STEPS = 50
"""Number of steps from which a learner compiles if the size of its model is not known before the start."""
FLOPS_PER_PARAMETER = 6.0
"""Operations per parameter and token in forward and backward (Kaplan et al. 2020, arXiv 2001.08361)."""


def is_eager(config: RunConfig, *, gpus_per_actor: float, devices: Devices) -> bool:
    """Return whether engines run without CUDA graphs and compilation: on CPUs, where they gain nothing, and
    on machines that cannot compile, where `actors.engine.eager: false` raises `ConfigError`.
    """
    engine = config.actors.engine
    if isinstance(engine, VllmEngine) and engine.eager != "auto":
        if gpus_per_actor and not engine.eager:
            _require_compiler(devices, "actors.engine.eager: false")
        return engine.eager
    return gpus_per_actor == 0 or devices.compiler_error is not None


def schedules_ahead(engine: VllmEngine, *, is_on_gpu: bool) -> bool:
    """Return whether vLLM prepares a step while the last one runs (async scheduling): on GPUs.

    A pause waits for the step in flight, whose tokens keep the version that sampled them, so versions and
    log-probabilities stay right. vLLM itself has it off on CPUs, and refuses it with Ray as its executor.
    """
    given = engine.extra_arguments
    is_possible = is_on_gpu and given.get("distributed_executor_backend") in (None, "mp", "uni")
    return is_possible and given.get("async_scheduling") is not False


def should_compile(config: RunConfig, *, gpus_per_rank: float, devices: Devices) -> bool:
    """Return whether the learner compiles: on GPUs, in runs long enough.

    Raises `ConfigError` for `learner.compile: true` on machines that cannot.
    """
    if config.learner.compile != "auto":
        if gpus_per_rank and config.learner.compile:
            _require_compiler(devices, "learner.compile: true")
        return config.learner.compile
    if gpus_per_rank == 0 or devices.compiler_error is not None:
        return False
    flops = flops_per_rank(config)
    return config.run.num_steps >= MIN_STEPS if flops is None else flops >= COMPILATION_FLOPS


def _require_compiler(devices: Devices, setting: str) -> None:
    if devices.compiler_error is not None:
        raise ConfigError(
            f"{setting}: kernels cannot be compiled: {devices.compiler_error}; or set it to auto"
        )


def flops_per_rank(config: RunConfig) -> float | None:
    """Return the operations of a rank over the run with episodes of half the maximum length.

    None if the files of the model are not on this machine.
    """
    if not isinstance(config.model, PretrainedModel):
        return 0.0  # a tiny model
    size = ModelSize.of(config.model.folder)
    if size is None:
        return None
    tokens = config.run.num_steps * config.episodes_per_step * config.max_sequence_tokens / 2
    return FLOPS_PER_PARAMETER * size.num_parameters * tokens / config.learner.num_ranks


def decisions(config: RunConfig, resolved: RunConfig, devices: Devices) -> Iterator[str]:
    """Yield a line for each way that `resolved` takes on GPUs, with the reason and cost of a slow one."""
    if devices.gpus:
        yield f"GPUs: {devices.names}"
    engine, chosen = config.actors.engine, resolved.actors.engine
    if isinstance(engine, VllmEngine) and resolved.actors.gpus_per_actor:
        assert isinstance(chosen, VllmEngine)
        if not chosen.eager:
            yield (
                "engines compile and capture CUDA graphs, about a minute at the start"
                " (actors.engine.eager: true starts sooner and generates at less than half the speed)"
            )
        elif engine.eager == "auto":
            yield (
                "engines run eagerly, at less than half the speed, since kernels cannot be compiled:"
                f" {devices.compiler_error}; vLLM may not start without its own kernels"
            )
        else:
            yield "engines run eagerly, at less than half the speed (actors.engine.eager: true)"
        if schedules_ahead(chosen, is_on_gpu=True):
            yield "engines prepare each step while the last one runs (async scheduling)"
        else:
            yield (
                "engines wait for each step before they prepare the next, as"
                " actors.engine.extra_arguments ask, which lowers throughput"
            )
    if resolved.learner.gpus_per_rank:
        yield from _learner_lines(config, resolved, devices)


def _learner_lines(config: RunConfig, resolved: RunConfig, devices: Devices) -> Iterator[str]:
    section, oldest = resolved.learner, devices.min_capability
    kernel = section.attention
    is_half = section.compute_dtype == "bfloat16"
    if kernel == "auto":
        kernel = attention_kernel(
            oldest if oldest is not None else MIN_PACKED_CAPABILITY,
            is_half=is_half,
            has_flash_attn=devices.has_flash_attn,
        )
    if kernel != "sdpa":
        name = "flash-attn" if kernel == "flash_attn" else "torch's varlen kernel"
        if devices.has_flash_3 and section.attention == "auto":
            name = "FlashAttention-3"
        yield f"the learner attends with {name}, and updates with fused AdamW"
    else:
        reason = "learner.attention: sdpa"
        if section.attention == "auto" and not is_half:
            reason = f"learner.compute_dtype: {section.compute_dtype}"
        elif section.attention == "auto":
            reason = f"a GPU of compute capability {oldest:g}"
        yield (
            f"the learner attends with SDPA, one sequence at a time ({reason}): kernels for packed"
            " sequences are faster, and need bfloat16 and compute capability"
            f" {MIN_PACKED_CAPABILITY:g}"
        )
    if config.learner.compile != "auto":
        verb = "compiles" if section.compile else "does not compile"
        yield f"the learner {verb} its model (learner.compile: {str(section.compile).lower()})"
        return
    if devices.compiler_error is not None:
        yield (
            "the learner does not compile its model, which makes its steps about a third slower, since"
            f" kernels cannot be compiled: {devices.compiler_error}"
        )
        return
    flops = flops_per_rank(config)
    why = (
        f"a run of {config.run.num_steps} steps"
        if flops is None
        else f"about {flops:.0e} operations per rank"
    )
    if section.compile:
        yield f"the learner compiles its model while engines start, about a minute, for {why}"
    else:
        yield f"the learner does not compile its model: {why} would save less time than compiling takes"
