"""Decide how many engines a run has that names no number: as many as the GPUs beside the learner hold well."""

import math
from dataclasses import dataclass

from raylearner.config.actors import ACTORS_BEFORE_RESOLUTION
from raylearner.config.memory import BYTES, ModelSize
from raylearner.config.schema import PretrainedModel, RunConfig, VllmEngine
from raylearner.config.section import number

SHARING = ((500_000_000, 4), (1_500_000_000, 2))
"""Number of parameters up to which engines share a GPU, and how many: an engine's processes prepare a step
in some milliseconds, in which a GPU decodes one of a small model several times."""
MIN_EPISODES = 128
"""Admitted episodes that each engine on a shared GPU must have, of which less than half run at a time: engines that
take turns on a GPU lengthen each other's steps, which pays with more than about 60 requests each (docs/benchmarks.md)."""
CPUS_PER_ENGINE = 2.0
"""CPUs that an engine keeps busy: its core and the process that plays episodes."""
LOADING = 1.5
"""Memory of an engine's weights, with those that arrive in a push, by that of its weights."""
BESIDE_CACHE_BYTES = 2 * 1024**3
"""Part of an engine's share of a GPU for activations, CUDA's context and graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What learner and engines may use of a cluster. Bytes of memory of each GPU."""

    gpus: float
    cpus: float
    gpu_bytes: int | None


def num_actors(config: RunConfig, supply: Supply) -> tuple[int, str]:
    """Return the number of rollout actors, and the decision as a line, empty where GPUs decide nothing."""
    engine, actors = config.actors.engine, config.actors
    per_rank = 1.0 if config.learner.gpus_per_rank == "auto" else config.learner.gpus_per_rank
    free = supply.gpus - config.learner.num_ranks * per_rank
    is_beside = config.weights.transport == "ipc"  # on the learner's GPUs
    if not isinstance(engine, VllmEngine) or engine.sleep or is_beside or free < 1:
        return ACTORS_BEFORE_RESOLUTION, ""
    if given := number(actors.gpus_per_actor):
        per_gpu = math.floor(1 / given + 1e-9) if given < 1 else 1
        count = math.floor(free) * per_gpu if given < 1 else math.floor(free / given)
        reason = f"actors.gpus_per_actor is {given:g}"
    elif actors.gpus_per_actor != "auto":
        return ACTORS_BEFORE_RESOLUTION, ""  # engines on CPUs
    elif engine.tensor_parallel_size > 1:
        count = math.floor(free / engine.tensor_parallel_size)
        reason = f"each uses {engine.tensor_parallel_size} GPUs"
    else:
        per_gpu, reason = _engines_per_gpu(config, engine, supply, gpus=math.floor(free))
        count = math.floor(free) * per_gpu
    reserved = config.learner.num_ranks * config.learner.cpus_per_rank
    if actors.cpus_per_actor and (supply.cpus - reserved) / actors.cpus_per_actor < count:
        count = math.floor((supply.cpus - reserved) / actors.cpus_per_actor)
        reason = f"{supply.cpus:g} CPUs hold no more"
    count = max(1, count)
    return count, f"{count} rollout actors on {math.floor(free)} GPUs (actors.num_actors): {reason}"


def _engines_per_gpu(
    config: RunConfig, engine: VllmEngine, supply: Supply, *, gpus: int
) -> tuple[int, str]:
    """Return the number of engines on each of `gpus` GPUs, with the reason."""
    size = _size(config)
    if size is None or supply.gpu_bytes is None:
        unknown = "size of the model" if size is None else "memory of the GPUs"
        return 1, f"one on each, as the {unknown} is unknown"
    wanted = next((count for most, count in SHARING if size.num_parameters <= most), 1)
    if wanted == 1:
        return 1, f"one on each, which {_named(size)} keeps busy"
    limits = {
        f"their caches fill {supply.gpu_bytes / 2**30:.0f} GiB": _num_in_memory(
            config, engine, size, supply.gpu_bytes
        ),
        f"{supply.cpus:g} CPUs keep no more busy": supply.cpus / gpus / CPUS_PER_ENGINE,
        "there are too few episodes for more": _num_for_episodes(config, gpus=gpus),
    }
    scarcest = min(limits, key=lambda name: limits[name])
    count = max(1, math.floor(min(wanted, limits[scarcest])))
    if count < wanted:
        return count, f"{count} on each, since {scarcest}"
    return count, f"{count} on each, which {_named(size)} would leave idle"


def _named(size: ModelSize) -> str:
    """Return the model in words."""
    return f"a model of {size.num_parameters / 1e9:.2g}B" if size.num_parameters else "a tiny model"


def _num_in_memory(config: RunConfig, engine: VllmEngine, size: ModelSize, gpu_bytes: int) -> float:
    """Return how many engines have room for all concurrent episodes at full length."""
    sequences = min(config.actors.max_concurrent_episodes, engine.max_sequences)
    tokens = sequences * min(config.max_sequence_tokens, engine.max_model_tokens)
    # At most two thirds of queries, keys and values together are keys and values.
    per_token = size.num_blocks * size.attention_size * 2 / 3 * BYTES[engine.dtype]
    weights = LOADING * size.num_parameters * BYTES[engine.dtype]
    return engine.memory_fraction * gpu_bytes / (weights + BESIDE_CACHE_BYTES + tokens * per_token)


def _num_for_episodes(config: RunConfig, *, gpus: int) -> int:
    """Return how many engines a GPU's share of the admitted episodes keeps busy, and at least how many can play it."""
    groups = (config.replay.max_staleness + 1) * config.replay.groups_per_step
    admitted = groups * config.replay.group_size / gpus
    return max(
        math.floor(admitted / MIN_EPISODES),
        math.ceil(admitted / config.actors.max_concurrent_episodes),
    )


def _size(config: RunConfig) -> ModelSize | None:
    """Return the model's size; that of a tiny one counts as nothing."""
    if isinstance(config.model, PretrainedModel):
        return ModelSize.of(config.model.folder)
    return ModelSize(
        num_parameters=0,
        num_block=0,
        num_rest=0,
        num_blocks=0,
        hidden_size=0,
        intermediate_size=0,
        attention_size=0,
        vocab_size=0,
        linears=(),
    )
