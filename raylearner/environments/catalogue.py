"""Environments by the `kind` that the YAML uses."""

import asyncio
import sys
from collections.abc import Sequence

from raylearner.cleanup import clean_up
from raylearner.config.actors import ReasoningTags
from raylearner.config.environment import (
    CalculatorTool,
    CustomEnvironment,
    EnvironmentSection,
    FunctionTool,
    JsonCallsDialect,
    SingleTurn,
    ToolUse,
)
from raylearner.config.section import load_reference
from raylearner.environments.custom import HostedEnvironment
from raylearner.environments.dialect import (
    Dialect,
    JsonDialect,
    TagDialect,
    thoughts_of_dialects,
)
from raylearner.environments.protocol import Environment
from raylearner.environments.single_turn import SingleTurnEnvironment
from raylearner.environments.tool_use import ToolUseEnvironment
from raylearner.errors import ConfigError
from raylearner.tools.catalogue import make_tool
from raylearner.tools.http import START_WAIT_S, wait_for_service
from raylearner.tools.pages import ImageCheck
from raylearner.tools.protocol import Tool


class EnvironmentFactory:
    """Makes each episode its environment; owns the tools that all episodes of an actor share."""

    def __init__(
        self,
        config: EnvironmentSection,
        *,
        check_image: ImageCheck | None = None,
        reasoning_tags: ReasoningTags = "auto",
    ) -> None:
        """`check_image` is what images of tools must pass besides, `reasoning_tags` are the renderer's.

        Raises `ConfigError` for a tool, a class or a program that cannot be made, or two tools of
        one name or tag.
        """
        self._config = config
        self._custom = (
            load_reference(config.path) if isinstance(config, CustomEnvironment) else None
        )
        sections = config.tools if isinstance(config, ToolUse) else ()
        self._tools: list[Tool] = [make_tool(section, check_image) for section in sections]
        for attribute in ("name", "tag"):
            values = [getattr(tool, attribute) for tool in self._tools]
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ConfigError(
                    f"environment.tools: two tools have the {attribute} {twice.pop()!r}"
                )
        self._dialect = (
            make_dialect(config, self._tools, reasoning_tags)
            if isinstance(config, ToolUse)
            else None
        )

    @property
    def tools(self) -> Sequence[Tool]:
        """In the order of the configuration; empty where the environment takes none."""
        return self._tools

    def make(self) -> Environment:
        """Return a fresh environment for one episode; `openai_proxy` has none, its program plays."""
        if isinstance(self._config, SingleTurn):
            return SingleTurnEnvironment()
        if isinstance(self._config, CustomEnvironment):
            assert self._custom is not None, "loaded with the factory"
            return HostedEnvironment(self._custom, self._config)
        assert isinstance(self._config, ToolUse), "programs play without environments"
        assert self._dialect is not None, "tool use has a dialect"
        return ToolUseEnvironment(self._config, self._tools, self._dialect)

    def drain_metrics(self) -> dict[str, float]:
        """`tools/*` of all tools since the last call."""
        metrics: dict[str, float] = {}
        for tool in self._tools:
            metrics |= tool.drain_metrics()
        return metrics

    async def close(self) -> None:
        await clean_up(sys.exception(), *(tool.close for tool in self._tools))


async def wait_for_services(config: EnvironmentSection) -> None:
    """Until every service behind a tool answers. Raises `ConfigError` naming the one that does not."""
    if not isinstance(config, ToolUse):
        return
    urls = {
        section.url
        for section in config.tools
        if not isinstance(section, CalculatorTool | FunctionTool) and section.url is not None
    }
    await asyncio.gather(*(wait_for_service(url, wait_s=START_WAIT_S) for url in urls))


def make_dialect(
    config: ToolUse, tools: list[Tool], reasoning_tags: ReasoningTags = "auto"
) -> Dialect:
    dialect = config.dialect
    if isinstance(dialect, JsonCallsDialect):
        names = [tool.name for tool in tools]
        return JsonDialect(
            names,
            answer_tag=dialect.answer_tag,
            max_calls=dialect.max_calls,
            reasoning=thoughts_of_dialects(reasoning_tags),
        )
    return TagDialect(
        {tool.tag: tool.name for tool in tools},
        answer_tag=dialect.answer_tag,
        match=dialect.match,
        precedence=dialect.precedence,
    )
