"""What an episode is."""

from typing import Annotated, Any, Literal

from pydantic import Field

from raylearner.config.kind import Reference
from raylearner.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from raylearner.config.tools import CalculatorTool, ToolSection

PROGRAM_KEYWORDS = ("base_url", "api_key", "messages", "columns")
"""What a program is called with, by name."""


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
    """Taken from the reward for each turn that neither calls a tool with arguments that fit nor answers,
    unless its length cut it; never shown."""
    observation_tag: str | None = "result"
    """Tag around what a tool answers; null for none."""


class OpenAiProxy(Section):
    """Any program with an OpenAI client, run as the episode against an endpoint of its own."""

    kind: Literal["openai_proxy"]
    program: Reference | None = None
    """`module:function`, sync (in a thread) or async, called with `base_url`, `api_key`, `messages`
    and `columns` of the prompt by name; returns the answer as text, or None."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to `program` as further keywords."""
    command: tuple[str, ...] = ()
    """In place of `program`: a command line. It finds OPENAI_BASE_URL and OPENAI_API_KEY in its
    environment and the prompt as JSON on its standard input."""
    answer_from: Literal["turn", "stdout"] = "turn"
    """Where rewards find a command's answer: in the policy's last turn, or in what it printed."""
    timeout_s: PositiveFloat = 300.0
    """An episode that takes longer fails; a command is killed with its children."""
    max_calls: PositiveInt = 32
    """Calls that are answered; further ones are told that the length is used up."""


class CustomEnvironment(Section):
    """An environment of the user's."""

    kind: Literal["custom"]
    path: Reference
    """`module:Class` with the methods of `raylearner.environments.protocol.Environment`; made once
    for each episode."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Passed to the class as keywords."""
    timeout_s: PositiveFloat = 300.0
    """An episode fails in which one call of `reset`, `step` or `close` takes longer."""


EnvironmentSection = Annotated[
    SingleTurn | ToolUse | OpenAiProxy | CustomEnvironment, Field(discriminator="kind")
]
