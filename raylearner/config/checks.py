"""What single keys cannot tell: combinations that would deadlock, crash or bias a run.

Nothing here touches the cluster or starts anything; only the paths that a run would open are
looked at.
"""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.engine_checks import check_sampling
from raylearner.config.episode_checks import check_data, check_environment, check_rewards
from raylearner.config.image_checks import check_images, image_notes
from raylearner.config.model_files import check_model, read_json
from raylearner.config.objective_checks import check_objective, objective_notes
from raylearner.config.problems import Finding
from raylearner.config.schema import (
    PretrainedModel,
    RunConfig,
    TinyModel,
    TransformersEngine,
    VllmEngine,
)
from raylearner.config.section import number


def num_policy_updates(config: RunConfig) -> int:
    """Optimizer updates of the policy in a whole run."""
    learner = config.learner
    critic_only = 0 if learner.critic is None else learner.critic.warmup_steps
    steps = max(0, config.run.num_steps - critic_only)
    return steps * learner.num_epochs * learner.num_mini_batches


def check_schedule(config: RunConfig) -> Iterator[Finding]:
    """A warm-up that never reaches its peak."""
    learner, updates = config.learner, num_policy_updates(config)
    if learner.learning_rate > 0 and learner.warmup_steps > updates > 0:
        reached = learner.learning_rate * updates / learner.warmup_steps
        yield Finding(
            "learner.warmup_steps",
            f"must be <= {updates}, the run's optimizer updates ({_terms(config)}), got"
            f" {learner.warmup_steps}: the learning rate would end at {reached:g}, before its peak"
            f" {learner.learning_rate:g}; shorten the warm-up, or raise run.num_steps",
        )


def schedule_notes(config: RunConfig) -> Iterator[str]:
    """A warm-up that is the whole run."""
    learner, updates = config.learner, num_policy_updates(config)
    if learner.learning_rate > 0 and learner.warmup_steps == updates > 0:
        decay = (
            ""
            if learner.schedule == "constant"
            else f", and the {learner.schedule} decay never begins"
        )
        yield (
            f"learner.warmup_steps: the warm-up of {learner.warmup_steps} is the whole run"
            f" ({_terms(config)} = {updates} updates): the last update alone has the peak rate"
            f" {learner.learning_rate:g}{decay}"
        )


def _terms(config: RunConfig) -> str:
    learner = config.learner
    steps = "run.num_steps"
    if learner.critic is not None and learner.critic.warmup_steps:
        steps = "(run.num_steps - learner.critic.warmup_steps)"
    return f"{steps} * learner.num_epochs * learner.num_mini_batches"


CONTEXT_KEY = "learner.context_parallel_size"

SEES_IMAGES = "must be 1 for a model that sees images: its image features are not cut into slices; set it to 1"

SLICED_LAYERS = ("full_attention", "sliding_attention")
"""What layers may be: others look past a slice of tokens without the attention that is exchanged."""


def check_context(config: RunConfig) -> Iterator[Finding]:
    """Clashes with the ranks, and with the model as far as files on this machine tell."""
    size, num_ranks = config.learner.context_parallel_size, config.learner.num_ranks
    if size == 1:
        return
    if num_ranks % size:
        yield Finding(
            CONTEXT_KEY,
            f"must divide learner.num_ranks = {num_ranks}, got {size}: ranks share micro-batches in"
            f" groups of that size; set it to one of {_listed(_divisors(num_ranks))}",
        )
    if (fault := _fault(config)) is not None:
        yield Finding(CONTEXT_KEY, fault)


def heads_fault(size: int, *, num_heads: int, num_kv_heads: int) -> str | None:
    """Why so many ranks cannot deal out a model's attention heads, if they cannot."""
    if _fits(size, num_heads, num_kv_heads):
        return None
    fitting = [n for n in range(1, num_heads + 1) if _fits(n, num_heads, num_kv_heads)]
    return (
        f"must divide the model's {num_heads} attention heads, and divide its {num_kv_heads}"
        f" key-value heads or be a multiple of them, got {size}; set it to one of {_listed(fitting)}"
    )


def _fits(size: int, num_heads: int, num_kv_heads: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _fault(config: RunConfig) -> str | None:
    model, size = config.model, config.learner.context_parallel_size
    if not isinstance(model, PretrainedModel):
        if model.vision is not None:
            return SEES_IMAGES
        return heads_fault(size, num_heads=model.num_heads, num_kv_heads=model.num_heads)
    found = read_json(Path(model.path).expanduser() / "config.json")
    if "vision_config" in found:
        return SEES_IMAGES
    num_heads = found.get("num_attention_heads")
    if not isinstance(num_heads, int):
        return None
    num_kv_heads = found.get("num_key_value_heads") or num_heads
    return heads_fault(size, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


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
