"""Check combinations of keys that would deadlock, crash or bias a run.

Nothing is started. Only the paths that a run would open are inspected.
"""

from collections.abc import Iterator
from pathlib import Path

from raylearner.config.engine_checks import check_sampling
from raylearner.config.episode_checks import check_data, check_environment, check_rewards
from raylearner.config.image_checks import check_images, image_warnings
from raylearner.config.model_files import check_model, read_json
from raylearner.config.objective_checks import check_objective, objective_warnings
from raylearner.config.problems import Finding
from raylearner.config.schema import (
    PretrainedModel,
    RunConfig,
    TinyModel,
    TransformersEngine,
    VllmEngine,
)
from raylearner.config.section import number

HALF_DTYPES = ("bfloat16", "float16")
"""Precisions of engines in which LoRA adapters are not merged."""


def check(config: RunConfig) -> list[Finding]:
    """Return all errors of a configuration whose single values are valid."""
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


def warnings(config: RunConfig) -> list[str]:
    """Return warnings about a valid configuration, one line each."""
    found: list[str] = []
    learner, replay, actors = config.learner, config.replay, config.actors
    if learner.gpus_per_rank == 0 and learner.compute_dtype == "bfloat16":
        found.append(
            "learner.compute_dtype: bfloat16 on a CPU is slow and increases the difference to the engine;"
            " use float32"
        )
    in_flight = actors.max_actors * actors.max_concurrent_episodes
    claims = replay.group_size + replay.extra
    if replay.extra and in_flight < claims:
        found.append(
            f"replay.extra: the {claims} episodes of a group exceed the {in_flight} in flight at once, so"
            " extra episodes save no time"
        )
    offered = config.cluster.num_cpus
    if offered is not None and offered < config.cpus_needed:
        found.append(
            f"cluster.num_cpus: a local cluster of {offered} CPUs is too small for the actors, which"
            f" reserve {config.cpus_needed:g}; the number may exceed the cores of the machine"
        )
    if replay.on_stale == "train":
        found.append(
            "replay.on_stale: 'train' does not bound staleness; watch buffer/staleness/max"
        )
    episodes, ranks = config.episodes_per_step, learner.num_data_ranks
    if episodes % ranks:
        idle = f"; {ranks - episodes} ranks have none" if episodes < ranks else ""
        found.append(
            f"learner.num_ranks: the {episodes} episodes of a step (replay.groups_per_step *"
            f" replay.group_size = {replay.groups_per_step} * {replay.group_size}) are not a multiple of"
            f" {ranks} ranks; ranks with fewer tokens wait for the others{idle}"
        )
    found.extend(objective_warnings(config))
    found.extend(schedule_warnings(config))
    found.extend(image_warnings(config))
    return found


def _publishing(config: RunConfig) -> Iterator[Finding]:
    every, staleness = config.weights.every_steps, config.replay.max_staleness
    if every > staleness + 1:
        yield Finding(
            "weights.every_steps",
            f"must be <= replay.max_staleness + 1 = {staleness + 1}, got {every}: engines would fall more"
            f" than {staleness} versions behind, and no group would be admitted again; set it to"
            f" {staleness + 1}, or replay.max_staleness to {every - 1}",
        )


def _groups(config: RunConfig) -> Iterator[Finding]:
    replay = config.replay
    if replay.group_size < 2 and replay.partial_groups == "train":
        yield Finding(
            "replay.partial_groups",
            "'train' needs replay.group_size >= 2, since a partial group trains on at least two episodes;"
            " use 'drop'",
        )
    episodes, parts = config.episodes_per_step, config.learner.num_mini_batches
    if parts > episodes:
        yield Finding(
            "learner.num_mini_batches",
            f"must be <= replay.groups_per_step * replay.group_size = {episodes}, got {parts}: "
            "some updates would have no episodes",
        )


def _lengths(config: RunConfig) -> Iterator[Finding]:
    renderer, engine = config.renderer, config.actors.engine
    longest = config.max_sequence_tokens
    parts = (
        f"renderer.max_prompt_tokens + renderer.max_response_tokens = "
        f"{renderer.max_prompt_tokens} + {renderer.max_response_tokens} = {longest}"
    )
    limits: dict[str, int] = {}
    if config.learner.max_tokens_per_micro_batch != "auto":
        limits["learner.max_tokens_per_micro_batch"] = config.learner.max_tokens_per_micro_batch
    if isinstance(engine, VllmEngine | TransformersEngine):
        limits["actors.engine.max_model_tokens"] = engine.max_model_tokens
    if isinstance(config.model, TinyModel):
        limits["model.max_length"] = config.model.max_length
    for key, limit in limits.items():
        if longest > limit:
            yield Finding(key, f"must be >= {parts}, got {limit}; raise this or lower those")
    if isinstance(engine, VllmEngine | TransformersEngine) and isinstance(config.model, TinyModel):
        tokens, limit = engine.max_model_tokens, config.model.max_length
        if tokens > limit:
            yield Finding(
                "actors.engine.max_model_tokens",
                f"must be <= model.max_length = {limit}, got {tokens}; set it to {limit}",
            )
    context = renderer.max_context_tokens
    if context is not None and context < renderer.max_prompt_tokens:
        yield Finding(
            "renderer.max_context_tokens",
            f"must be >= renderer.max_prompt_tokens = {renderer.max_prompt_tokens}, got {context}: "
            "the longest prompt would leave no room for a turn",
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
            "each rank has its own device",
        )
    if learner.shard_size is not None and learner.num_ranks % learner.shard_size:
        yield Finding(
            "learner.shard_size",
            f"must divide learner.num_ranks = {learner.num_ranks}, got {learner.shard_size}: each"
            " group of that many ranks holds one copy of the parameters",
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
            "'ipc' needs engines on one GPU, got actors.engine.tensor_parallel_size = "
            f"{engine.tensor_parallel_size}; use 'nccl' or 'shared_files'",
        )
    if config.engines_sleep and config.replay.max_staleness:
        yield Finding(
            "actors.engine.sleep",
            "needs replay.max_staleness 0, got "
            f"{config.replay.max_staleness}: engines that sleep while the learner steps generate nothing"
            " ahead of it; set it to false for asynchronous runs",
        )
    if config.engines_sleep and config.weights.cache == "keep":
        yield Finding(
            "weights.cache",
            "must be 'recompute' with actors.engine.sleep: engines that sleep free their keys and values",
        )


def _lora(config: RunConfig) -> Iterator[Finding]:
    lora, transport = config.learner.lora, config.weights.transport
    if lora is None:
        if transport == "adapter":
            yield Finding(
                "weights.transport",
                "'adapter' needs learner.lora, but the learner trains all weights; use 'auto', or add"
                " `learner.lora: {}`",
            )
        return
    if transport == "adapter" and not isinstance(config.actors.engine, VllmEngine):
        yield Finding(
            "weights.transport",
            f"'adapter' needs actors.engine.kind 'vllm', got {config.actors.engine.kind!r}; use "
            "'shared_files', which carries weights with merged adapters",
        )
    engine = config.actors.engine
    merges = transport not in ("auto", "adapter") or isinstance(engine, TransformersEngine)
    dtype = getattr(engine, "dtype", "float32")
    if merges and dtype in HALF_DTYPES:
        yield Finding(
            "weights.transport" if isinstance(engine, VllmEngine) else "actors.engine.dtype",
            f"merges learner.lora into {dtype} weights of engines, whose rounding loses most of a"
            " small update; use "
            + ("'adapter' or 'auto', " if isinstance(engine, VllmEngine) else "")
            + "actors.engine.dtype 'float32'",
        )
    if lora.path is not None:
        for key in lora.own_keys:
            yield Finding(
                f"learner.lora.{key}",
                "is determined by the adapter in learner.lora.path; remove one of the two",
            )
        if not Path(lora.path).expanduser().is_dir():
            yield Finding(
                "learner.lora.path",
                f"no such directory {lora.path!r}; name a directory with adapter_config.json",
            )


def num_policy_updates(config: RunConfig) -> int:
    """Return the number of optimizer updates of the policy in the run."""
    learner = config.learner
    critic_only = 0 if learner.critic is None else learner.critic.warmup_steps
    steps = max(0, config.run.num_steps - critic_only)
    return steps * learner.num_epochs * learner.num_mini_batches


def check_schedule(config: RunConfig) -> Iterator[Finding]:
    """Yield an error if the warm-up never reaches its peak."""
    learner, updates = config.learner, num_policy_updates(config)
    if learner.learning_rate > 0 and learner.warmup_steps > updates > 0:
        reached = learner.learning_rate * updates / learner.warmup_steps
        yield Finding(
            "learner.warmup_steps",
            f"must be <= {updates}, the optimizer updates of the run ({_terms(config)}), got"
            f" {learner.warmup_steps}: the learning rate would end at {reached:g}, before its peak"
            f" {learner.learning_rate:g}; shorten the warm-up, or raise run.num_steps",
        )


def schedule_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning if the warm-up takes the whole run."""
    learner, updates = config.learner, num_policy_updates(config)
    if learner.learning_rate > 0 and learner.warmup_steps == updates > 0:
        decay = (
            ""
            if learner.schedule == "constant"
            else f", and the {learner.schedule} decay never begins"
        )
        yield (
            f"learner.warmup_steps: the warm-up of {learner.warmup_steps} updates takes the whole run"
            f" ({_terms(config)} = {updates}): only the last update has the peak learning rate"
            f" {learner.learning_rate:g}{decay}"
        )


def _terms(config: RunConfig) -> str:
    learner = config.learner
    steps = "run.num_steps"
    if learner.critic is not None and learner.critic.warmup_steps:
        steps = "(run.num_steps - learner.critic.warmup_steps)"
    return f"{steps} * learner.num_epochs * learner.num_mini_batches"


CONTEXT_KEY = "learner.context_parallel_size"

NO_VISION_CONTEXT = "must be 1 for a vision-language model, whose image features are not split"

SLICED_LAYERS = ("full_attention", "sliding_attention")
"""Types of layers that context parallelism supports; others read past a slice of tokens outside the
attention that ranks exchange."""


def check_context(config: RunConfig) -> Iterator[Finding]:
    """Yield errors in the number of ranks and, for models with local files, in the model."""
    size, num_ranks = config.learner.context_parallel_size, config.learner.num_ranks
    if size == 1:
        return
    if num_ranks % size:
        yield Finding(
            CONTEXT_KEY,
            f"must divide learner.num_ranks = {num_ranks}, got {size}: ranks share micro-batches in"
            f" groups of that size; set it to one of {_listed(_divisors(num_ranks))}",
        )
    if (error := _model_error(config)) is not None:
        yield Finding(CONTEXT_KEY, error)


def context_error(size: int, *, num_heads: int, num_kv_heads: int) -> str | None:
    """Return the error if `size` ranks cannot divide the attention heads of a model."""
    if _fits(size, num_heads, num_kv_heads):
        return None
    fitting = [n for n in range(1, num_heads + 1) if _fits(n, num_heads, num_kv_heads)]
    return (
        f"must divide the model's {num_heads} attention heads, and divide its {num_kv_heads}"
        f" key-value heads or be a multiple of them, got {size}; set it to one of {_listed(fitting)}"
    )


def _fits(size: int, num_heads: int, num_kv_heads: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _model_error(config: RunConfig) -> str | None:
    model, size = config.model, config.learner.context_parallel_size
    if not isinstance(model, PretrainedModel):
        if model.vision is not None:
            return NO_VISION_CONTEXT
        return context_error(size, num_heads=model.num_heads, num_kv_heads=model.num_heads)
    found = read_json(model.folder / "config.json")
    if "vision_config" in found:
        return NO_VISION_CONTEXT
    num_heads = found.get("num_attention_heads")
    if not isinstance(num_heads, int):
        return None
    num_kv_heads = found.get("num_key_value_heads") or num_heads
    return context_error(size, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
