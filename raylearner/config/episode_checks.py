"""Check data, environment and rewards beyond single keys. The user's modules are imported."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raylearner.config.data import DataSource, FileData, ReasoningGymData, UserSampler
from raylearner.config.environment import (
    PROGRAM_KEYWORDS,
    CustomEnvironment,
    OpenAiProxy,
    ToolUse,
)
from raylearner.config.model_files import is_missing_directory
from raylearner.config.problems import Finding
from raylearner.config.rewards import (
    Judge,
    PairwiseJudge,
    RewardModel,
    ToolUseShaping,
    UserFunction,
)
from raylearner.config.schema import RunConfig
from raylearner.config.section import load_reference
from raylearner.errors import ConfigError


def check_data(config: RunConfig) -> list[Finding]:
    """Return errors of sources, missing files, and a sampler that cannot be imported."""
    return [*_evaluation(config), *_sources(config), *_sampler(config)]


def _evaluation(config: RunConfig) -> Iterator[Finding]:
    every = 0 if config.evaluation is None else config.evaluation.every_steps
    if every > 0 and not config.held_out:
        yield Finding(
            "evaluation.every_steps",
            f"must be 0 without data.evaluation, got {every}; add held-out prompts there",
        )
    taken = {source.source_name for source in config.data.evaluation or ()}
    for held_out in config.held_out:
        key, section = held_out.section_key, held_out.section
        if section.samples_per_prompt > 1 and not section.sampling.temperature:
            yield Finding(
                f"{key}.sampling.temperature",
                f"must be above 0 with {key}.samples_per_prompt={section.samples_per_prompt}, since greedy"
                " samples of a prompt are all the same",
            )
        if held_out.name in taken:
            yield Finding(
                f"{key}.name",
                f"{held_out.name!r} is already the name of another set or of a source of data.evaluation;"
                " set another name",
            )
        taken.add(held_out.name)


def _sources(config: RunConfig) -> Iterator[Finding]:
    for part, sources in config.sources.items():
        if not sources:
            yield Finding(part, "is an empty list; name a source")
        counts = Counter(source.source_name for source in sources)
        for index, source in enumerate(sources):
            key = f"{part}.{index}"
            if counts[source.source_name] > 1:
                yield Finding(
                    f"{key}.source",
                    f"{counts[source.source_name]} sources have the name {source.source_name!r}; set another"
                    " `source`",
                )
            yield from _source(key, source)


def _source(key: str, source: DataSource) -> Iterator[Finding]:
    if isinstance(source, FileData):
        if not Path(source.path).expanduser().is_file():
            yield Finding(f"{key}.path", f"no such file {source.path!r}")
    elif isinstance(source, ReasoningGymData):
        for name in ("size", "seed"):
            if name in source.parameters:
                yield Finding(
                    f"{key}.parameters.{name}",
                    f"is set by {key}.{'num_prompts' if name == 'size' else 'seed'}; remove it here",
                )


def _sampler(config: RunConfig) -> Iterator[Finding]:
    sampler = config.data.sampler
    if isinstance(sampler, UserSampler):
        try:
            load_reference(sampler.kind)
        except ConfigError as error:
            yield Finding("data.sampler.kind", str(error))


ASYNC_METHODS = ("reset", "step", "close")
METHODS = ("outcome",)
ATTRIBUTES = ("stop", "tool_schemas")


def check_environment(config: RunConfig) -> list[Finding]:
    """Return errors of programs and environment classes, which are imported."""
    match config.environment:
        case OpenAiProxy() as proxy:
            return list(_proxy(proxy))
        case CustomEnvironment() as custom:
            return list(_custom(custom))
        case ToolUse() as tool_use:
            return list(_tools(tool_use))
        case _:
            return []


def _tools(tool_use: ToolUse) -> Iterator[Finding]:
    """Tools that a turn could not distinguish."""
    first: dict[str, int] = {}
    for index, tool in enumerate(tool_use.tools):
        names = dict.fromkeys((tool.function_name, tool.tag))
        for name in names:
            if name in first:
                yield Finding(
                    f"environment.tools.{index}.name",
                    f"{name!r} is already the name or tag of environment.tools.{first[name]}; set"
                    " another name",
                )
                break
        for name in names:
            first.setdefault(name, index)


def _proxy(proxy: OpenAiProxy) -> Iterator[Finding]:
    if (proxy.program is None) == (not proxy.command):
        both = "only one of" if proxy.command else "one of"
        yield Finding("environment", f"needs {both} environment.program and environment.command")
        return
    if proxy.program is None:
        if proxy.arguments:
            yield Finding(
                "environment.arguments",
                "need environment.program; write arguments of a command into environment.command",
            )
        return
    if proxy.answer_from == "stdout":
        yield Finding(
            "environment.answer_from",
            "'stdout' needs environment.command; environment.program returns its answer",
        )
    for name in sorted(set(PROGRAM_KEYWORDS) & set(proxy.arguments)):
        yield Finding(f"environment.arguments.{name}", "is passed by raylearner; use another name")
        return
    yield from _callable("environment.program", proxy.program, PROGRAM_KEYWORDS, proxy.arguments)


def _custom(custom: CustomEnvironment) -> Iterator[Finding]:
    key = "environment.path"
    try:
        found = load_reference(custom.path)
    except ConfigError as error:
        yield Finding(key, str(error))
        return
    if not inspect.isclass(found):
        yield Finding(key, f"{custom.path!r} must be a class, got {type(found).__name__}")
        return
    missing = [
        name
        for name in (*ASYNC_METHODS, *METHODS, *ATTRIBUTES)
        if getattr(found, name, None) is None
    ]
    if missing:
        yield Finding(
            key,
            f"{custom.path!r} has no {', '.join(missing)}; an environment needs the async methods"
            f" {', '.join(ASYNC_METHODS)}, the method {METHODS[0]}, and the attributes"
            f" {' and '.join(ATTRIBUTES)} (raylearner.environments.protocol.Environment)",
        )
        return
    for name in ASYNC_METHODS:
        if not inspect.iscoroutinefunction(getattr(found, name)):
            yield Finding(key, f"{custom.path!r}: {name} must be `async def`")
            return
    yield from _callable(key, custom.path, (), custom.arguments)


def _callable(
    key: str, path: str, given: Iterable[str], arguments: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield an error if `path` cannot be called with these names."""
    names = [*given, *arguments]
    try:
        function: Callable[..., Any] = load_reference(path)
        inspect.signature(function).bind(**dict.fromkeys(names))
    except ConfigError as error:
        yield Finding(key, str(error))
    except (TypeError, ValueError) as error:
        listed = ", ".join(names) or "no arguments"
        yield Finding(key, f"{path!r} cannot be called with {listed}: {error}")


PENALTY_NAME = "invalid_action_penalty"


def check_rewards(config: RunConfig) -> list[Finding]:
    """Return functions that cannot be imported, empty ranges, and rewards that no episode could get."""
    return [*_section(config), *_functions(config), *_needs(config)]


def _section(config: RunConfig) -> Iterator[Finding]:
    rewards = config.rewards
    if not rewards.functions:
        yield Finding("rewards.functions", "is empty; add at least one function")
    if rewards.clip is not None and rewards.clip[0] >= rewards.clip[1]:
        low, high = rewards.clip
        yield Finding(
            "rewards.clip", f"must have a minimum below the maximum, got {low:g} and {high:g}"
        )
    for index, name in enumerate(rewards.names):
        if name == PENALTY_NAME:
            yield Finding(
                f"rewards.functions.{index}.name",
                f"{name!r} is reserved for the penalty of the environment; choose another name",
            )
    if rewards.sees_groups and config.replay.play_greedy:
        yield Finding(
            "replay.play_greedy",
            "must be false with reward functions of groups, since the greedy episode is not in a group; set"
            " it to false, or use functions of episodes",
        )


def _functions(config: RunConfig) -> Iterator[Finding]:
    for index, function in enumerate(config.rewards.functions):
        key = f"rewards.functions.{index}"
        match function:
            case Judge() | PairwiseJudge() if problem := _overridden(function):
                yield Finding(f"{key}.extra_arguments", problem)
            case UserFunction():
                try:
                    load_reference(function.kind)
                except ConfigError as error:
                    yield Finding(f"{key}.kind", str(error))
            case ToolUseShaping() if function.min > function.max:
                yield Finding(
                    f"{key}.min", f"must be <= max = {function.max:g}, got {function.min:g}"
                )
            case Judge() if function.min_score >= function.max_score:
                yield Finding(
                    f"{key}.min_score",
                    f"must be < max_score = {function.max_score:g}, got {function.min_score:g}",
                )
            case RewardModel() if is_missing_directory(function.path):
                yield Finding(
                    f"{key}.path",
                    f"no such directory {function.path!r}; name a checkpoint directory or a hub id",
                )
            case _:
                pass


def _overridden(function: Judge | PairwiseJudge) -> str | None:
    """Return an error for fields that other keys set, or that would change the form of the reply."""
    own = ["model", "messages", "temperature", "max_tokens", "stream", "n"]
    found = [name for name in own if name in function.extra_arguments]
    return f"must not have {', '.join(found)}; other keys of the judge set these" if found else None


def _needs(config: RunConfig) -> Iterator[Finding]:
    """Yield rewards that no prompt of the run could get."""
    kinds = {source.kind for source in config.data.train}
    for index, function in enumerate(config.rewards.functions):
        if function.kind == "reasoning_gym" and "reasoning_gym" not in kinds:
            yield Finding(
                f"rewards.functions.{index}.kind",
                "'reasoning_gym' needs a source of that kind in data.train",
            )
        if function.kind == "tool_use" and config.environment.kind == "single_turn":
            yield Finding(
                f"rewards.functions.{index}.kind",
                "'tool_use' needs tool calls, but environment.kind is 'single_turn'",
            )
        if function.kind == "retrieval_hit" and not _shows_pages(config):
            yield Finding(
                f"rewards.functions.{index}.kind",
                "'retrieval_hit' needs a tool that shows pages; add page_search or page_fetch to"
                " environment.tools",
            )


def _shows_pages(config: RunConfig) -> bool:
    environment = config.environment
    if isinstance(environment, ToolUse):
        return any(tool.kind in ("page_search", "page_fetch") for tool in environment.tools)
    return isinstance(environment, CustomEnvironment)
