"""Resolve `auto` for the GPUs of a cluster, and check the environment variables that a run needs.

The same configuration and GPUs give the same numbers. Explicit values are never changed.
"""

import importlib.util
import math
import netrc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from raylearner import credentials
from raylearner.config import speed
from raylearner.config.devices import UNKNOWN, Devices
from raylearner.config.engine_count import Supply, num_actors
from raylearner.config.image_checks import can_keep_caches
from raylearner.config.micro_batch import choose_budget
from raylearner.config.problems import Finding
from raylearner.config.schema import RunConfig, TransformersEngine, VllmEngine
from raylearner.config.section import number
from raylearner.errors import ConfigError

SHARE_STEP = 0.05
"""Shares of a GPU are rounded down to multiples of this, so that they fit."""

TOLERANCE_CPU, TOLERANCE_GPU, TOLERANCE_HALF = 1e-3, 0.05, 0.25
"""Default `weights.verify_tolerance` in nats: float32 on CPUs, float32 on GPUs (whose kernels may use TF32), half precision."""

AWAKE_SHARE = 0.75
"""Share of a GPU for all engines on it that sleep while the learner steps, which keeps its state."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without `auto`, and the decisions, one line each."""

    config: RunConfig
    decisions: tuple[str, ...]


def resolve(
    config: RunConfig,
    *,
    num_gpus: float,
    num_cpus: float = math.inf,
    devices: Devices = UNKNOWN,
) -> Resolved:
    """Return the configuration with every `auto` resolved for a cluster of these GPUs and CPUs.

    `devices` are those of the cluster's machines, whose memory decides how many engines share a GPU; by
    default it is unknown, and nothing is missing there.
    """
    _refuse_elastic_places(config)
    free = num_gpus - _rewards_gpus(config, num_gpus)
    decisions: list[str] = []
    gpu_bytes = devices.min_bytes
    if config.actors.num_actors == "auto":
        count, why = num_actors(config, Supply(gpus=free, cpus=num_cpus, gpu_bytes=gpu_bytes))
        actors = config.actors.model_copy(update={"num_actors": count})
        config = config.model_copy(update={"actors": actors})
        decisions += [why] if why else []
    per_rank, per_actor = _gpus(config, free)
    if num_gpus or "auto" in (config.learner.gpus_per_rank, config.actors.gpus_per_actor):
        shares = (
            f"{per_rank:g} for each learner rank ({config.learner.num_ranks}),"
            f" {per_actor:g} for each rollout actor ({config.actors.min_actors})"
        )
        decisions.append(
            f"GPUs: {num_gpus:g}; {shares}" if num_gpus else "no GPUs: all parts use CPUs"
        )
    engine = config.actors.engine
    if isinstance(engine, VllmEngine) and 0 < per_actor < 1:
        if "memory_fraction" not in engine.model_fields_set:
            share = per_actor
            if engine.sleep:
                share = AWAKE_SHARE / config.engines_per_rank
            fraction = round(engine.memory_fraction * share, 4)
            engine = engine.model_copy(update={"memory_fraction": fraction})
            decisions.append(f"each engine uses {fraction:g} of its GPU's memory")
    elif (
        isinstance(engine, TransformersEngine)
        and per_actor
        and "device" not in engine.model_fields_set
    ):
        engine = engine.model_copy(update={"device": "cuda"})
    if isinstance(engine, VllmEngine):
        is_eager = speed.is_eager(config, gpus_per_actor=per_actor, devices=devices)
        engine = engine.model_copy(update={"eager": is_eager})
    learner = config.learner.model_copy(
        update={
            "gpus_per_rank": per_rank,
            "compile": speed.should_compile(config, gpus_per_rank=per_rank, devices=devices),
        }
    )
    if learner.max_tokens_per_micro_batch == "auto":
        rank_bytes = None if gpu_bytes is None or not per_rank else gpu_bytes * min(per_rank, 1)
        budget, why = choose_budget(config, learner, rank_bytes=rank_bytes)
        learner = learner.model_copy(update={"max_tokens_per_micro_batch": budget})
        decisions += [why] if why else []
    weights = config.weights
    if weights.transport == "auto":
        transport = _transport(config, num_gpus, per_rank=per_rank, per_actor=per_actor)
        weights = weights.model_copy(update={"transport": transport})
        decisions.append(f"weights are pushed via {transport}")
    if weights.cache == "auto":
        is_ahead = config.replay.max_staleness > 0 and not config.engines_sleep
        can_keep = is_ahead and can_keep_caches(config)
        weights = weights.model_copy(update={"cache": "keep" if can_keep else "recompute"})
        if can_keep:
            decisions.append(
                "running requests keep their keys and values at a push (weights.cache: recompute computes"
                " them again)"
            )
    is_half = "float16" in f"{config.learner.compute_dtype} {getattr(engine, 'dtype', '')}"
    if weights.verify_statistic == "auto":
        weights = weights.model_copy(update={"verify_statistic": "mean" if is_half else "max"})
    if weights.verify_tolerance == "auto":
        tolerance = TOLERANCE_HALF if is_half else TOLERANCE_GPU if per_actor else TOLERANCE_CPU
        weights = weights.model_copy(update={"verify_tolerance": tolerance})
    resolved = config.model_copy(
        update={
            "learner": learner,
            "actors": config.actors.model_copy(
                update={"gpus_per_actor": per_actor, "engine": engine}
            ),
            "weights": weights,
        }
    )
    _refuse_impossible(resolved)
    return Resolved(resolved, (*decisions, *speed.decisions(config, resolved, devices)))


def _rewards_gpus(config: RunConfig, num_gpus: float) -> int:
    """Return the number of whole GPUs that reward models use, which `auto` does not distribute."""
    taken = math.ceil(sum(model.gpus for model in config.rewards.models.values()))
    is_auto = "auto" in (config.learner.gpus_per_rank, config.actors.gpus_per_actor)
    if taken and is_auto and num_gpus - taken < 1:
        raise ConfigError(
            f"rewards.functions: reward models use {taken} of {num_gpus:g} GPUs, and 'auto' distributes"
            " whole GPUs; set learner.gpus_per_rank, actors.gpus_per_actor and gpus of the models to"
            " shares that fit, or score on the CPU (gpus: 0)"
        )
    return taken


def _gpus(config: RunConfig, num_gpus: float) -> tuple[float, float]:
    """Return the GPUs per rank and per actor.

    The learner has whole GPUs while one is left for the engines; ranks never share a GPU, which NCCL
    refuses. Otherwise GPUs are shared in equal parts.
    """
    ranks, actors = config.learner.num_ranks, config.actors.min_actors
    per_rank, per_actor = config.learner.gpus_per_rank, config.actors.gpus_per_actor
    engine = config.actors.engine
    if config.weights.transport == "ipc" and per_rank == per_actor == "auto":
        share = _floor(1 / (1 + config.engines_per_rank))
        if num_gpus < ranks or share <= 0:
            raise ConfigError(
                f"weights.transport: 'ipc' puts each of {ranks} learner ranks on a GPU with its share of"
                f" {actors} engines, at most {math.floor(1 / SHARE_STEP) - 1}, but there are {num_gpus:g}"
                " GPUs; lower learner.num_ranks or actors.num_actors"
            )
        return share, share
    whole = float(engine.tensor_parallel_size) if isinstance(engine, VllmEngine) else 1.0
    uses_gpu = not _runs_on_cpu(config)
    if per_actor == "auto" and (num_gpus < 1 or not uses_gpu):
        per_actor = 0.0
    if per_rank == "auto" and num_gpus < 1:
        per_rank = 0.0
    free = num_gpus - ranks * number(per_rank) - actors * number(per_actor)
    if per_rank == "auto":
        needed = 1.0 if per_actor == "auto" else 0.0
        if ranks > 1 or free >= ranks + needed:
            per_rank = 1.0
            free -= ranks
        elif per_actor == "auto" and whole == 1:
            share = _share(1 + actors, free)
            return share, share
        else:
            per_rank = min(1.0, _floor(free)) if free > 0 else 1.0
    if per_actor == "auto":
        is_scarce = free < actors * whole and whole == 1 and free >= 1
        per_actor = _share(actors, free) if is_scarce else whole
    return per_rank, per_actor


def _runs_on_cpu(config: RunConfig) -> bool:
    engine = config.actors.engine
    if isinstance(engine, TransformersEngine):
        return engine.device == "cpu" and "device" in engine.model_fields_set
    return not isinstance(engine, VllmEngine)


def _share(num_tenants: int, num_gpus: float) -> float:
    """Return the share of each of several equal tenants on whole GPUs."""
    per_gpu = math.ceil(num_tenants / math.floor(num_gpus))
    share = 1.0 if per_gpu == 1 else _floor(1 / per_gpu)
    if share <= 0:
        raise ConfigError(
            f"actors.num_actors: {num_tenants} actors and ranks on {num_gpus:g} GPUs are more than"
            f" {math.floor(1 / SHARE_STEP)} per GPU; lower it, or set gpus_per_actor and gpus_per_rank"
        )
    return share


def _floor(share: float) -> float:
    return round(math.floor(share / SHARE_STEP + 1e-9) * SHARE_STEP, 4)


def _transport(config: RunConfig, num_gpus: float, *, per_rank: float, per_actor: float) -> str:
    """NCCL refuses two ranks on one GPU; `ipc` needs all of them on the same one."""
    engine = config.actors.engine
    if not isinstance(engine, VllmEngine):
        return "shared_files"
    if config.learner.lora is not None and not (per_actor and engine.dtype == "float32"):
        return "adapter"
    if not (per_rank and per_actor):
        return "shared_files"
    if per_rank >= 1 and per_actor >= 1:
        return "nccl"
    is_one_gpu = not config.actors.is_elastic and num_gpus == 1 and config.learner.num_ranks == 1
    return "ipc" if is_one_gpu else "shared_files"


def _refuse_elastic_places(config: RunConfig) -> None:
    if config.actors.is_elastic and config.weights.transport == "ipc":
        raise ConfigError(
            "actors.num_actors: a range is not supported with weights.transport 'ipc', which reserves a place"
            " for each engine beside a learner rank; set a number, or another transport"
        )


def _refuse_impossible(config: RunConfig) -> None:
    transport, engine = config.weights.transport, config.actors.engine
    per_rank = number(config.learner.gpus_per_rank)
    per_actor = number(config.actors.gpus_per_actor)
    if transport == "shared_files":
        return
    if not isinstance(engine, VllmEngine):
        raise ConfigError(f"weights.transport: {transport!r} needs engines of kind vllm")
    if transport == "adapter":
        if per_actor and engine.dtype == "float32":
            raise ConfigError(
                "weights.transport: 'adapter' needs actors.engine.dtype bfloat16 or float16 on GPUs, where"
                " vLLM's adapter kernels do not support float32; change it, or use 'auto', which merges"
                " the adapters"
            )
        return
    if not (per_rank and per_actor):
        raise ConfigError(
            f"weights.transport: {transport!r} needs learner and engines on GPUs; use shared_files"
        )
    total = per_rank + config.engines_per_rank * per_actor
    if transport == "ipc" and total > 1 + 1e-9:
        raise ConfigError(
            f"weights.transport: 'ipc' puts a learner rank and {config.engines_per_rank} engines on one"
            f" GPU, but learner.gpus_per_rank {per_rank:g} and actors.gpus_per_actor {per_actor:g} add up"
            f" to {total:g}; lower them to at most 1 in total"
        )
    if transport == "nccl" and (per_rank < 1 or per_actor < 1):
        raise ConfigError(
            "weights.transport: 'nccl' needs a separate GPU for every rank and engine, got"
            f" learner.gpus_per_rank {per_rank:g} and actors.gpus_per_actor {per_actor:g}; use ipc where"
            " each rank shares its GPU with engines, else shared_files"
        )


SUFFIX = "_variable"
"""Ending of keys whose value is the name of an environment variable."""
WANDB_KEY = "WANDB_API_KEY"
HUB_TOKEN = "HF_TOKEN"


def named_variables(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield dotted key and environment variable for every key that names one."""
    yield from _named(config.model_dump(), "")


def wants_wandb_key(config: RunConfig) -> bool:
    """Return whether a run logs in to Weights & Biases."""
    wandb = config.recorded.wandb
    return wandb is not None and wandb.mode == "online"


def check_credentials(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield values that contain a credential: run directories, trackers and jobs would store it."""
    for key, value in _texts(config.model_dump(), ""):
        if found := credentials.find(value, environment):
            yield Finding(
                key,
                f"contains {found}, which the run directory and trackers would store; read it from an"
                " environment variable where it is used",
            )


def _texts(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every text of a configuration with its dotted key."""
    if isinstance(tree, Mapping):
        pairs = list(cast(Mapping[Any, Any], tree).items())
    elif isinstance(tree, list | tuple):
        pairs = list(enumerate(cast(list[Any], tree)))
    else:
        if isinstance(tree, str):
            yield key, tree
        return
    for part, value in pairs:
        yield from _texts(value, f"{key}.{part}".removeprefix("."))


def check_variables(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield variables, packages and logins that a run in this environment would lack."""
    for key, name in named_variables(config):
        if not environment.get(name):
            yield Finding(
                key,
                f"the environment variable {name} is not set; export it where the run starts, or set this"
                " to null for a service without a key",
            )
    if config.recorded.wandb is None:
        return
    if importlib.util.find_spec("wandb") is None:
        yield Finding(
            "observability.wandb",
            "the package wandb is not installed; run `pip install wandb`, or set this to null",
        )
    elif wants_wandb_key(config) and not _is_logged_in(environment):
        yield Finding(
            "observability.wandb",
            f"not logged in to Weights & Biases; run `wandb login`, set {WANDB_KEY}, or set"
            " observability.wandb.mode to offline",
        )


def _is_logged_in(environment: Mapping[str, str]) -> bool:
    """Return whether wandb finds a key in a variable or in the netrc file."""
    if environment.get(WANDB_KEY) or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    given = environment.get("NETRC")
    home = Path(environment.get("HOME") or Path.home())
    for path in [Path(given)] if given else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(str(path)).hosts.get(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _named(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        pairs = list(cast(Mapping[str, Any], tree).items())
    elif isinstance(tree, list | tuple):
        pairs = [(str(i), value) for i, value in enumerate(cast(list[Any], tree))]
    else:
        if isinstance(tree, str) and key.endswith(SUFFIX):
            yield key, tree
        return
    for part, value in pairs:
        if not part.endswith("arguments"):  # those of user code and services
            yield from _named(value, f"{key}.{part}".removeprefix("."))
