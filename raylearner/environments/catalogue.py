"""Environments by the `kind` that the YAML uses."""

import asyncio

from raylearner.config.environment import JsonCallsDialect, SingleTurn, ToolUse
from raylearner.config.tools import CalculatorTool, FunctionTool
from raylearner.environments.dialect import Dialect, JsonDialect, TagDialect
from raylearner.environments.protocol import Environment
from raylearner.environments.single_turn import SingleTurnEnvironment
from raylearner.environments.tool_use import ToolUseEnvironment
from raylearner.errors import ConfigError
from raylearner.tools.catalogue import make_tool
from raylearner.tools.http import wait_for_service
from raylearner.tools.protocol import Tool


class EnvironmentFactory:
    """Makes each episode its environment; owns the tools that all episodes of an actor share."""

    def __init__(self, config: SingleTurn | ToolUse) -> None:
        """Raises `ConfigError` for a tool that cannot be made, or two of one name or tag."""
        self._config = config
        sections = config.tools if isinstance(config, ToolUse) else ()
        self._tools: list[Tool] = [make_tool(section) for section in sections]
        for attribute in ("name", "tag"):
            values = [getattr(tool, attribute) for tool in self._tools]
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ConfigError(
                    f"environment.tools: two tools have the {attribute} {twice.pop()!r}"
                )
        self._dialect = make_dialect(config, self._tools) if isinstance(config, ToolUse) else None

    def make(self) -> Environment:
        """A fresh environment for one episode."""
        if isinstance(self._config, SingleTurn):
            return SingleTurnEnvironment()
        assert self._dialect is not None, "tool use has a dialect"
        return ToolUseEnvironment(self._config, self._tools, self._dialect)

    def drain_metrics(self) -> dict[str, float]:
        """`tools/*` of all tools since the last call."""
        metrics: dict[str, float] = {}
        for tool in self._tools:
            metrics |= tool.drain_metrics()
        return metrics

    async def close(self) -> None:
        for tool in self._tools:
            await tool.close()


async def wait_for_services(config: SingleTurn | ToolUse) -> None:
    """Until every service behind a tool answers. Raises `ConfigError` naming the one that does not."""
    if isinstance(config, SingleTurn):
        return
    waits = {
        section.url: section.http.start_wait_s
        for section in config.tools
        if not isinstance(section, CalculatorTool | FunctionTool) and section.url is not None
    }
    await asyncio.gather(*(wait_for_service(url, wait_s=s) for url, s in waits.items()))


def make_dialect(config: ToolUse, tools: list[Tool]) -> Dialect:
    dialect = config.dialect
    if isinstance(dialect, JsonCallsDialect):
        names = [tool.name for tool in tools]
        return JsonDialect(names, answer_tag=dialect.answer_tag, max_calls=dialect.max_calls)
    return TagDialect(
        {tool.tag: tool.name for tool in tools},
        answer_tag=dialect.answer_tag,
        match=dialect.match,
        precedence=dialect.precedence,
    )
