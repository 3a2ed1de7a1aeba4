"""Environments by `kind`."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raylearner.cleanup import clean_up
from raylearner.config.actors import ReasoningTags
from raylearner.config.environment import (
    CustomEnvironment,
    EnvironmentSection,
    OpenAiProxy,
    SingleTurn,
    ToolUse,
)
from raylearner.config.section import load_reference
from raylearner.environments.custom import HostedEnvironment
from raylearner.environments.dialect import make_dialect
from raylearner.environments.protocol import Environment, Outcome, Reply
from raylearner.environments.tool_use import ToolUseEnvironment
from raylearner.errors import ConfigError
from raylearner.tools.catalogue import make_tool
from raylearner.tools.pages import ImageCheck
from raylearner.tools.service import START_WAIT_S, wait_for_service
from raylearner.tools.tool import Tool
from raylearner.types import Message, Prompt, StopReason


class EnvironmentFactory:
    """Creates an environment for each episode; owns the tools that all episodes of an actor share."""

    def __init__(
        self,
        config: EnvironmentSection,
        *,
        check_image: ImageCheck | None = None,
        reasoning_tags: ReasoningTags = "auto",
    ) -> None:
        """Images of tools must pass `check_image`; `reasoning_tags` are the renderer's.

        Raises `ConfigError` for a tool, a class or a program that cannot be made, or two tools of
        one name or tag.
        """
        sections = config.tools if isinstance(config, ToolUse) else ()
        self._tools: list[Tool] = [make_tool(section, check_image) for section in sections]
        for attribute in ("name", "tag"):
            values = [getattr(tool, attribute) for tool in self._tools]
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ConfigError(
                    f"environment.tools: two tools have the {attribute} {twice.pop()!r}"
                )
        self.make = self._choose(config, reasoning_tags)
        """Return a new environment for one episode."""

    def _choose(
        self, config: EnvironmentSection, reasoning_tags: ReasoningTags
    ) -> Callable[[], Environment]:
        match config:
            case SingleTurn():
                return SingleTurnEnvironment
            case CustomEnvironment():
                return partial(HostedEnvironment, load_reference(config.path), config)
            case ToolUse():
                dialect = make_dialect(config.dialect, self._tools, reasoning_tags)
                return partial(ToolUseEnvironment, config, self._tools, dialect)
            case OpenAiProxy():
                return _refuse_program

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools in the order of the configuration; empty where the environment takes none."""
        return self._tools

    def drain_metrics(self) -> dict[str, float]:
        """Return `tools/*` of all tools since the last call."""
        metrics: dict[str, float] = {}
        for tool in self._tools:
            metrics |= tool.drain_metrics()
        return metrics

    async def close(self) -> None:
        await clean_up(sys.exception(), *(tool.close for tool in self._tools))


async def wait_for_services(config: EnvironmentSection) -> None:
    """Wait until every service behind a tool answers. Raises `ConfigError` naming one that does not."""
    tools = config.tools if isinstance(config, ToolUse) else ()
    urls = {url for tool in tools if (url := getattr(tool, "url", None)) is not None}
    await asyncio.gather(*(wait_for_service(url, wait_s=START_WAIT_S) for url in urls))


def _refuse_program() -> Environment:
    raise AssertionError("programs play without environments")


class SingleTurnEnvironment:
    """Starts from the prompt's messages; the first completion ends the episode."""

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        return ()

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, message: Message) -> Reply:
        return Reply(is_done=True, stop_reason=StopReason.END)

    def outcome(self) -> Outcome:
        return Outcome()

    async def close(self) -> None:
        return None
