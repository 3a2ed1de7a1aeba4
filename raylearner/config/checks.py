"""What single keys cannot tell: combinations that would deadlock, crash or bias a run.

Nothing here touches the cluster or starts anything; only the paths that a run would open are
looked at.
"""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.context_checks import check_context
from raylearner.config.data_checks import check_data
from raylearner.config.environment_checks import check_environment
from raylearner.config.finding import Finding
from raylearner.config.image_checks import check_images, image_notes
from raylearner.config.model_checks import check_model
from raylearner.config.objective_checks import check_objective, objective_notes
from raylearner.config.reward_checks import check_rewards
from raylearner.config.sampling_checks import check_sampling
from raylearner.config.schedule_checks import check_schedule, schedule_notes
from raylearner.config.schema import (
    RunConfig,
    TinyModel,
    TransformersEngine,
    VllmEngine,
)
from raylearner.config.section import number

HALF_DTYPES = ("bfloat16", "float16")
"""Precisions of engines that LoRA adapters are not merged into."""


def check(config: RunConfig) -> list[Finding]:
    """All clashes of a configuration whose single values are valid."""
    return [
        *_publishing(config),
        *check_objective(config),
        *check_schedule(config),
        *check_sampling(config),
        *_groups(config),
        *_lengths(config),
        *_layout(config),
        *check_model(config),
        *check_context(config),
        *_lora(config),
        *check_environment(config),
        *check_data(config),
        *check_images(config),
        *check_rewards(config),
    ]


def notes(config: RunConfig) -> list[str]:
    """What is allowed and yet worth a word, one line each."""
    found: list[str] = []
    learner, replay, actors = config.learner, config.replay, config.actors
    if learner.gpus_per_rank == 0 and learner.compute_dtype == "bfloat16":
        found.append(
            "learner.compute_dtype: bfloat16 on a CPU is slow and widens the gap to the engine; "
            "float32 is the better choice there"
        )
    in_flight = actors.num_actors * actors.max_concurrent_episodes
    claims = replay.group_size + replay.extra
    if replay.extra and in_flight < claims:
        found.append(
            f"replay.extra: a group's {claims} episodes do not fit in flight at once "
            f"({in_flight}), so the extra ones save no time"
        )
    offered = config.cluster.num_cpus
    if offered is not None and offered < config.cpus_needed:
        found.append(
            f"cluster.num_cpus: a local cluster of {offered} does not hold the run, whose actors "
            f"reserve {config.cpus_needed:g}; the number may exceed the machine's cores"
        )
    if replay.on_stale == "train":
        found.append(
            "replay.on_stale: 'train' puts no bound on staleness; watch buffer/staleness/max"
        )
    episodes, ranks = config.episodes_per_step, learner.num_data_ranks
    if episodes % ranks:
        idle = f"; {ranks - episodes} of them have none" if episodes < ranks else ""
        found.append(
            f"learner.num_ranks: the {episodes} episodes of a step (replay.groups_per_step *"
            f" replay.group_size = {replay.groups_per_step} * {replay.group_size}) do not divide by"
            f" {ranks} ranks; they are dealt out by tokens, and a rank that has fewer waits{idle}"
        )
    found.extend(objective_notes(config))
    found.extend(schedule_notes(config))
    found.extend(image_notes(config))
    return found


def _publishing(config: RunConfig) -> Iterator[Finding]:
    every, staleness = config.weights.every_steps, config.replay.max_staleness
    if every > staleness + 1:
        yield Finding(
            "weights.every_steps",
            f"must be <= replay.max_staleness + 1 = {staleness + 1}, got {every}: engines would "
            f"fall more than {staleness} versions behind, and nothing would be admitted again; "
            f"set it to {staleness + 1}, or replay.max_staleness to {every - 1}",
        )


def _groups(config: RunConfig) -> Iterator[Finding]:
    replay = config.replay
    if replay.group_size < 2 and replay.partial_groups == "train":
        yield Finding(
            "replay.partial_groups",
            "'train' needs replay.group_size >= 2, since a partial group trains on two "
            "episodes at least; use 'drop'",
        )
    episodes, parts = config.episodes_per_step, config.learner.num_mini_batches
    if parts > episodes:
        yield Finding(
            "learner.num_mini_batches",
            f"must be <= replay.groups_per_step * replay.group_size = {episodes}, got {parts}: "
            "some updates would have no episode",
        )


def _lengths(config: RunConfig) -> Iterator[Finding]:
    renderer, engine = config.renderer, config.actors.engine
    longest = config.max_sequence_tokens
    parts = (
        f"renderer.max_prompt_tokens + renderer.max_response_tokens = "
        f"{renderer.max_prompt_tokens} + {renderer.max_response_tokens} = {longest}"
    )
    limits = {"learner.max_tokens_per_micro_batch": config.learner.max_tokens_per_micro_batch}
    if isinstance(engine, VllmEngine | TransformersEngine):
        limits["actors.engine.max_model_tokens"] = engine.max_model_tokens
    if isinstance(config.model, TinyModel):
        limits["model.max_length"] = config.model.max_length
    for key, limit in limits.items():
        if longest > limit:
            yield Finding(key, f"must be >= {parts}, got {limit}; raise it or shorten those")
    if isinstance(engine, VllmEngine | TransformersEngine) and isinstance(config.model, TinyModel):
        most, limit = engine.max_model_tokens, config.model.max_length
        if most > limit:
            yield Finding(
                "actors.engine.max_model_tokens",
                f"must be <= model.max_length = {limit}, got {most}; set it to {limit}",
            )
    context = renderer.max_context_tokens
    if context is not None and context < renderer.max_prompt_tokens:
        yield Finding(
            "renderer.max_context_tokens",
            f"must be >= renderer.max_prompt_tokens = {renderer.max_prompt_tokens}, got {context}: "
            "a longest prompt would leave no turn",
        )
    if config.sampling.max_turn_tokens > renderer.max_response_tokens:
        yield Finding(
            "sampling.max_turn_tokens",
            f"must be <= renderer.max_response_tokens = {renderer.max_response_tokens}, "
            f"got {config.sampling.max_turn_tokens}: a turn is part of the response",
        )


def _layout(config: RunConfig) -> Iterator[Finding]:
    learner, actors = config.learner, config.actors
    is_shared = config.weights.transport == "ipc"
    if learner.num_ranks > 1 and learner.gpus_per_rank not in ("auto", 0, 1) and not is_shared:
        yield Finding(
            "learner.gpus_per_rank",
            f"must be 0 or 1 with {learner.num_ranks} ranks, got {learner.gpus_per_rank}: "
            "a rank drives one device and shares it with no other rank",
        )
    if learner.shard_size is not None and learner.num_ranks % learner.shard_size:
        yield Finding(
            "learner.shard_size",
            f"must divide learner.num_ranks = {learner.num_ranks}, got {learner.shard_size}: every "
            "group of so many ranks holds one copy of the parameters",
        )
    engine = actors.engine
    gpus = number(actors.gpus_per_actor)
    if isinstance(engine, VllmEngine) and 0 < gpus < engine.tensor_parallel_size > 1:
        yield Finding(
            "actors.gpus_per_actor",
            f"must be >= actors.engine.tensor_parallel_size = {engine.tensor_parallel_size}, "
            f"got {gpus:g}",
        )
    if isinstance(engine, VllmEngine) and is_shared and engine.tensor_parallel_size > 1:
        yield Finding(
            "weights.transport",
            "'ipc' needs engines that live on one GPU, got actors.engine.tensor_parallel_size = "
            f"{engine.tensor_parallel_size}; use 'nccl' or 'shared_files'",
        )
    if config.engines_sleep and config.replay.max_staleness:
        yield Finding(
            "actors.engine.sleep",
            "needs replay.max_staleness 0, got "
            f"{config.replay.max_staleness}: engines that sleep while the learner steps make "
            "nothing ahead of it; turn it off for asynchronous runs",
        )


def _lora(config: RunConfig) -> Iterator[Finding]:
    lora, transport = config.learner.lora, config.weights.transport
    if lora is None:
        if transport == "adapter":
            yield Finding(
                "weights.transport",
                "'adapter' carries LoRA adapters, and the learner trains all weights; use 'auto', "
                "or add `learner.lora: {}`",
            )
        return
    if transport == "adapter" and not isinstance(config.actors.engine, VllmEngine):
        yield Finding(
            "weights.transport",
            f"'adapter' needs actors.engine.kind 'vllm', got {config.actors.engine.kind!r}; use "
            "'shared_files', which carries weights with the adapters merged",
        )
    engine = config.actors.engine
    merges = transport not in ("auto", "adapter") or isinstance(engine, TransformersEngine)
    if merges and getattr(engine, "dtype", "float32") in HALF_DTYPES:
        yield Finding(
            "weights.transport" if isinstance(engine, VllmEngine) else "actors.engine.dtype",
            f"learner.lora is merged into the {engine.dtype} weights of engines, whose rounding loses"
            " most of a small update; use "
            + ("'adapter' or 'auto', " if isinstance(engine, VllmEngine) else "")
            + "actors.engine.dtype 'float32'",
        )
    if lora.path is not None:
        for key in lora.own_keys:
            yield Finding(
                f"learner.lora.{key}",
                "is decided by the adapter in learner.lora.path; remove one of the two",
            )
        if not Path(lora.path).expanduser().is_dir():
            yield Finding(
                "learner.lora.path",
                f"no such directory {lora.path!r}; name one with adapter_config.json in it",
            )
