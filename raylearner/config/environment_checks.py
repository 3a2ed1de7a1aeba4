"""What single keys of the environment section cannot tell: the user's own programs and classes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from raylearner.config.environment import (
    PROGRAM_KEYWORDS,
    CustomEnvironment,
    OpenAiProxy,
    ToolUse,
)
from raylearner.config.finding import Finding
from raylearner.config.kind import load_reference
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError

ASYNC_METHODS = ("reset", "step", "close")
METHODS = ("outcome",)
ATTRIBUTES = ("stop", "tool_schemas")


def check_environment(config: RunConfig) -> list[Finding]:
    """Programs that cannot be called and classes that are no environment; both are imported."""
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
    """Names and tags that a turn could not tell apart; those of functions are known at the start."""
    for attribute in ("name", "tag"):
        first: dict[str, int] = {}
        for index, tool in enumerate(tool_use.tools):
            value: str | None = getattr(tool, attribute)
            other = index if value is None else first.setdefault(value, index)
            if other != index:
                yield Finding(
                    f"environment.tools.{index}.{attribute}",
                    f"{value!r} is that of environment.tools.{other} already; give each its own",
                )


def _proxy(proxy: OpenAiProxy) -> Iterator[Finding]:
    if (proxy.program is None) == (not proxy.command):
        both = "one of the two" if proxy.command else "environment.program or environment.command"
        yield Finding("environment", f"an openai_proxy plays one program; give {both}")
        return
    if proxy.program is None:
        if proxy.arguments:
            yield Finding(
                "environment.arguments",
                "are passed to a function; give a command its own in environment.command",
            )
        return
    if proxy.answer_from == "stdout":
        yield Finding(
            "environment.answer_from",
            "'stdout' is for a command; environment.program returns its answer",
        )
    for name in sorted(set(PROGRAM_KEYWORDS) & set(proxy.arguments)):
        yield Finding(f"environment.arguments.{name}", "is given by raylearner; use another name")
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
            f"{custom.path!r} has no {', '.join(missing)}; an environment has the async methods "
            f"{', '.join(ASYNC_METHODS)}, the method {METHODS[0]}, and the attributes "
            f"{' and '.join(ATTRIBUTES)} (raylearner.environments.protocol.Environment)",
        )
        return
    for name in ASYNC_METHODS:
        if not inspect.iscoroutinefunction(getattr(found, name)):
            yield Finding(key, f"{custom.path!r}: {name} must be written `async def`")
            return
    yield from _callable(key, custom.path, (), custom.arguments)


def _callable(
    key: str, path: str, given: Iterable[str], arguments: Mapping[str, Any]
) -> Iterator[Finding]:
    """What keeps `path` from being called with these names."""
    names = [*given, *arguments]
    try:
        function: Callable[..., Any] = load_reference(path)
        inspect.signature(function).bind(**dict.fromkeys(names))
    except ConfigError as error:
        yield Finding(key, str(error))
    except (TypeError, ValueError) as error:
        said = ", ".join(names) or "no arguments"
        yield Finding(key, f"{path!r} cannot be called with {said}: {error}")
