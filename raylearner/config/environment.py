"""What an episode is."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import NonNegativeFloat, PositiveInt, Section
from raylearner.config.tools import CalculatorTool, ToolSection


class SingleTurn(Section):
    """One completion, then the end."""

    kind: Literal["single_turn"]


class TagsDialect(Section):
    """Calls and answers between tags: `<search>query</search>`, `<answer>text</answer>`."""

    kind: Literal["tags"]
    match: Literal["first", "last"] = "first"
    """Which pair counts when a turn has several: the one that closes first, or from the right."""
    precedence: Literal["tool", "answer"] = "tool"
    """Which kind counts in a turn that has both."""
    answer_tag: str = "answer"
    """Tag around the answer."""


class JsonCallsDialect(Section):
    """The model's own tool-calling template: JSON calls, several a turn, run concurrently."""

    kind: Literal["json"]
    answer_tag: str | None = "answer"
    """Tag around the answer; null takes a turn without calls as the answer."""
    max_calls: PositiveInt = 16
    """Calls of one turn that are run."""


DialectSection = Annotated[TagsDialect | JsonCallsDialect, Field(discriminator="kind")]


class ToolUse(Section):
    """Turns with tools, ended by an answer."""

    kind: Literal["tool_use"]
    tools: tuple[ToolSection, ...] = (CalculatorTool(kind="calculator"),)
    """Tools on offer."""
    dialect: DialectSection = TagsDialect(kind="tags")
    """How a turn names its calls and its answer."""
    max_turns: PositiveInt = 4
    """Turns with tools; one last turn without tools follows."""
    invalid_action_penalty: NonNegativeFloat = 0.0
    """Taken from the reward for each turn with neither a tool call nor an answer; never shown."""
    observation_tag: str | None = "result"
    """Tag around what a tool answers; null for none."""


EnvironmentSection = Annotated[SingleTurn | ToolUse, Field(discriminator="kind")]
