"""Checks of the prompts that episodes start from, made before Ray starts.

A prompt that is longer than its limit, or that the chat template refuses, would fail every episode of
its row, and end the run after a few steps.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raylearner.config.data import DataSource, FileData
from raylearner.config.environment import EnvironmentSection, SingleTurn, ToolUse
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.data import load_prompts
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.errors import ConfigError, RenderError
from raylearner.rewards.catalogue import check_rows
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Prompt

logger = logging.getLogger(__name__)

MAX_NAMED = 5
"""Maximum number of rows that a message names; the others are counted."""
UNBOUNDED = 2**31


def make_renderer(config: RunConfig, *, model: str | None = None) -> Renderer | None:
    """Return the renderer of a run before its model exists; None for a tiny vision-language model.

    `model` replaces `model.path`. Raises `ConfigError` where a tokenizer cannot be loaded.
    """
    if model is None and isinstance(config.model, TinyModel):
        if config.model.vision is not None:
            return None
        from raylearner.tiny.tokenizer import make_tokenizer

        return Renderer(make_tokenizer(UNBOUNDED), config.renderer)
    path = model if model is not None else getattr(config.model, "path", "")
    return Renderer.from_pretrained(path, config.renderer)


def load_rows(config: RunConfig, sources: Sequence[DataSource]) -> list[Prompt]:
    """Load the rows of sources, with the system prompt and examples of the configuration."""
    return load_prompts(
        sources,
        system_prompt=config.data.system_prompt,
        examples=config.data.examples,
        max_images=config.renderer.images.max_images,
    )


def check(config: RunConfig, *, report: Callable[[str], None]) -> None:
    """Check reward functions, and rows in files as `select_fitting` does.

    Rows are checked where a tokenizer is available offline.
    """
    check_rows(config.rewards, ())
    if not isinstance(config.model, TinyModel) and not Path(config.model.path).is_dir():
        return
    for key, sources in config.sources.items():
        files = [source for source in sources if isinstance(source, FileData)]
        renderer = make_renderer(config) if files else None
        if renderer is not None:
            prompts = load_rows(config, files)
            check_rows(config.rewards, prompts)
            select_fitting(config, prompts, renderer, key=key, report=report)


def select_fitting(
    config: RunConfig,
    prompts: Sequence[Prompt],
    renderer: Renderer,
    *,
    key: str,
    report: Callable[[str], None] = logger.warning,
) -> list[Prompt]:
    """Return the prompts that fit; with `data.long_prompts: drop`, longer ones are reported and left out.

    `key` is the key of their source. Custom environments and agent programs write their own first
    messages, so their prompts are returned unchanged. Raises `ConfigError` with all counts where a
    prompt is too long or refused by the template, and where none is left.
    """
    tools = _tools(config.environment)
    if tools is None:
        return list(prompts)
    limit = config.renderer.max_prompt_tokens
    unbounded = renderer.with_prompt_limit(UNBOUNDED)
    kept: list[Prompt] = []
    long: list[str] = []
    refused: list[str] = []
    for prompt in prompts:
        try:
            size = len(unbounded.render(renderer.stand_ins(prompt.messages), tools=tools))
        except RenderError as error:
            refused.append(f"{prompt.place or prompt.prompt_id}: {error}")
            continue
        if size <= limit:
            kept.append(prompt)
        else:
            long.append(f"{prompt.prompt_id} ({size})")
    if refused:
        raise ConfigError(
            f"{key}: {len(refused)} of {len(prompts)} prompts cannot be rendered:"
            f" {_list(refused, '; ')}"
        )
    if not long:
        return kept
    message = (
        f"{key}: {len(long)} of {len(prompts)} prompts are longer than renderer.max_prompt_tokens ="
        f" {limit} (tokens in brackets): {_list(long, ', ')}"
    )
    if config.data.long_prompts == "refuse" or not kept:
        raise ConfigError(
            f"{message}; raise that, shorten them, or leave them out with data.long_prompts: drop"
            if kept
            else f"{message}; none is left, raise that or shorten them"
        )
    needed = config.replay.groups_per_step if key == "data.train" else 0
    again = f", fewer than the {needed} of a step, so they repeat" if len(kept) < needed else ""
    report(f"{message}; they are left out, {len(kept)} remain{again}")
    return kept


def _tools(environment: EnvironmentSection) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools in the prompt; None where the first messages are not known."""
    if isinstance(environment, SingleTurn):
        return ()
    if not isinstance(environment, ToolUse):
        return None
    if not environment.dialect.announces_tools:
        return ()
    try:
        factory = EnvironmentFactory(environment)
    except ConfigError as error:  # perhaps only on this machine, not on those that run the tools
        logger.warning(
            "prompt lengths are not checked, since a tool cannot be created here: %s", error
        )
        return None
    try:
        return factory.make().tool_schemas
    finally:
        asyncio.run(factory.close())


def _list(items: Sequence[str], separator: str) -> str:
    more = f"{separator}and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return separator.join(items[:MAX_NAMED]) + more
