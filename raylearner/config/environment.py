"""What an episode is."""

from typing import Annotated, Literal

from pydantic import Field

from raylearner.config.section import NonNegativeFloat, PositiveInt, Section


class SingleTurn(Section):
    """One completion, then the end."""

    kind: Literal["single_turn"]


class ToolUse(Section):
    """Turns with tools, ended by an answer."""

    kind: Literal["tool_use"]
    tools: tuple[Literal["calculator"], ...] = ("calculator",)
    """Tools on offer."""
    max_turns: PositiveInt = 4
    """Turns with tools; one last turn without tools follows."""
    invalid_action_penalty: NonNegativeFloat = 0.0
    """Taken from the reward for each turn with neither a tool call nor an answer; never shown."""
    tag_match: Literal["first", "last"] = "first"
    """Which pair of tags counts when a turn has several."""
    observation_tag: str = "result"
    """Tag around what a tool answers."""


EnvironmentSection = Annotated[SingleTurn | ToolUse, Field(discriminator="kind")]
