"""Decide what `auto` means for options that cost time at the start and save it in every step."""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.memory import ModelSize
from raylearner.config.schema import PretrainedModel, RunConfig, VllmEngine

COMPILATION_FLOPS = 5e16
"""Training operations of a rank that take as long without compilation as with it, its start included:
compiling takes a minute, in which a GPU makes about 3e16 operations more than without."""
MIN_STEPS = 50
"""Number of steps from which a learner compiles if the size of its model is not known before the start."""
FLOPS_PER_PARAMETER = 6.0
"""Operations per parameter and token in forward and backward (Kaplan et al. 2020, arXiv 2001.08361)."""


def is_eager(config: RunConfig, *, gpus_per_actor: float) -> bool:
    """Return whether engines run without CUDA graphs and compilation: on CPUs, where they gain nothing."""
    engine = config.actors.engine
    if not isinstance(engine, VllmEngine) or engine.eager == "auto":
        return gpus_per_actor == 0
    return engine.eager


def schedules_ahead(engine: VllmEngine, *, is_on_gpu: bool) -> bool:
    """Return whether vLLM prepares a step while the last one runs (async scheduling): on GPUs.

    A pause waits for the step in flight, whose tokens keep the version that sampled them, so versions and
    log-probabilities stay right. vLLM itself has it off on CPUs, and refuses it with Ray as its executor.
    """
    given = engine.extra_arguments
    is_possible = is_on_gpu and given.get("distributed_executor_backend") in (None, "mp", "uni")
    return is_possible and given.get("async_scheduling") is not False


def should_compile(config: RunConfig, *, gpus_per_rank: float) -> bool:
    """Return whether the learner compiles: on GPUs, in runs long enough."""
    if config.learner.compile != "auto":
        return config.learner.compile
    if gpus_per_rank == 0:
        return False
    flops = flops_per_rank(config)
    return config.run.num_steps >= MIN_STEPS if flops is None else flops >= COMPILATION_FLOPS


def flops_per_rank(config: RunConfig) -> float | None:
    """Return the operations of a rank over the run with episodes of half the maximum length.

    None if the files of the model are not on this machine.
    """
    if not isinstance(config.model, PretrainedModel):
        return 0.0  # a tiny model
    size = ModelSize.of(Path(config.model.path).expanduser())
    if size is None:
        return None
    tokens = config.run.num_steps * config.episodes_per_step * config.max_sequence_tokens / 2
    return FLOPS_PER_PARAMETER * size.num_parameters * tokens / config.learner.num_ranks


def decisions(config: RunConfig, resolved: RunConfig) -> Iterator[str]:
    """Yield a line for each `auto` of `config` that `resolved` decides, on GPUs alone."""
    engine, chosen = config.actors.engine, resolved.actors.engine
    if isinstance(engine, VllmEngine) and engine.eager == "auto" and resolved.actors.gpus_per_actor:
        assert isinstance(chosen, VllmEngine)
        yield (
            "engines run eagerly"
            if chosen.eager
            else "engines compile and capture CUDA graphs, about a minute at the start"
            " (actors.engine.eager: true starts sooner and generates at less than half the speed)"
        )
    if isinstance(chosen, VllmEngine) and resolved.actors.gpus_per_actor:
        if schedules_ahead(chosen, is_on_gpu=True):
            yield "engines prepare each step while the last one runs (async scheduling)"
        else:
            yield (
                "engines wait for each step before they prepare the next, as"
                " actors.engine.extra_arguments ask, which lowers throughput"
            )
    if config.learner.compile == "auto" and resolved.learner.gpus_per_rank:
        flops = flops_per_rank(config)
        why = (
            f"a run of {config.run.num_steps} steps"
            if flops is None
            else f"about {flops:.0e} operations per rank"
        )
        if resolved.learner.compile:
            yield f"the learner compiles its model, about a minute in the first step, for {why}"
        else:
            yield f"the learner does not compile its model: {why} would save less time than compiling takes"
