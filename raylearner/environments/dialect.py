"""The actions in a turn's text: tags, or the model's own JSON tool calls.

A dialect parses text into actions and has only the names of the tools. Malformed text becomes an
`Invalid` action whose reason is shown to the policy.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, cast

from pydantic import Field

from raylearner.config.actors import ReasoningTags
from raylearner.config.section import PositiveInt, Section
from raylearner.environments.foreign_calls import foreign_form
from raylearner.errors import ConfigError
from raylearner.text import encodable_values, load_json, outside, pairs
from raylearner.tokenization.reasoning import Reasoning
from raylearner.tools.tool import Tool

MAX_CALLS_PER_TURN = 16
SHOWN_CHARACTERS = 80
THINK = Reasoning((("<think>", "</think>"),))


JSON_FORM = '<tool_call>{"name": .., "arguments": {..}}</tool_call>'


class TagsDialect(Section):
    """Calls and answers between tags: `<search>query</search>`, `<answer>text</answer>`."""

    kind: Literal["tags"]
    match: Literal["first", "last"] = "first"
    """Pair that counts when a turn has several: the one that closes first, or the last one."""
    precedence: Literal["tool", "answer"] = "tool"
    """Pair that counts in a turn with both a tool call and an answer."""
    answer_tag: str = "answer"
    """Tag around the answer."""
    announces_tools: ClassVar[bool] = False
    """Whether the chat template gets the tools' schemas."""

    def describe_calls(self, tags: Sequence[str]) -> str:
        """Describe the form of calls of tools with these tags, for messages."""
        return " or ".join(f"<{tag}>..</{tag}>" for tag in tags)

    def write_call(self, name: str, tag: str, arguments: Mapping[str, Any]) -> str:
        values = list(arguments.values())
        text = str(values[0]) if len(values) == 1 else json.dumps(arguments)
        return f"<{tag}>{text}</{tag}>"


class JsonCallsDialect(Section):
    """The model's own tool-calling template: JSON calls, several per turn, run concurrently."""

    kind: Literal["json"]
    answer_tag: str | None = "answer"
    """Tag around the answer; with null, a turn without calls is the answer."""
    max_calls: PositiveInt = 16
    """Maximum number of calls run per turn."""
    announces_tools: ClassVar[bool] = True

    def describe_calls(self, tags: Sequence[str]) -> str:
        return JSON_FORM

    def write_call(self, name: str, tag: str, arguments: Mapping[str, Any]) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


DialectSection = Annotated[TagsDialect | JsonCallsDialect, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the tool `name`: the text between its tags, or the object of its JSON."""

    name: str
    arguments: str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's answer; it ends the episode."""

    text: str


@dataclass(frozen=True, slots=True)
class Invalid:
    """Neither a call nor an answer, with the reason as text for the policy."""

    reason: str
    foreign_form: str | None = None
    """Form of a call in the turn that is not the configured form."""
    is_unfinished: bool = False
    """Whether a longer turn might have held an action."""


Action: TypeAlias = ToolCall | Answer | Invalid


def choose_thoughts(reasoning_tags: object) -> Reasoning:
    """Return the reasoning tags that `JsonDialect` skips.

    None where tags are configured, since turns then come without their thoughts, or where reasoning is
    ordinary text.
    """
    return THINK if reasoning_tags == "auto" else Reasoning()


class Dialect(Protocol):
    """Parses a policy's text into at least one action, without raising."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn; they stay in its text."""
        ...

    def parse(self, text: str) -> list[Action]: ...


def make_dialect(
    section: DialectSection, tools: Sequence[Tool], reasoning_tags: ReasoningTags = "auto"
) -> Dialect:
    match section:
        case TagsDialect():
            return TagDialect(
                {tool.tag: tool.name for tool in tools},
                answer_tag=section.answer_tag,
                match=section.match,
                precedence=section.precedence,
            )
        case JsonCallsDialect():
            return JsonDialect(
                [tool.name for tool in tools],
                answer_tag=section.answer_tag,
                max_calls=section.max_calls,
                reasoning=choose_thoughts(reasoning_tags),
            )


class TagDialect:
    """Reads calls from `<search>query</search>` and answers from `<answer>text</answer>`, one
    action a turn.

    `match` chooses the pair that counts: `first` closes first, `last` is searched from the right,
    closing tag before opening tag. A kind of lower precedence counts only in a turn without the
    other.
    """

    def __init__(
        self,
        tools: Mapping[str, str],
        *,
        answer_tag: str = "answer",
        match: Literal["first", "last"] = "first",
        precedence: Literal["tool", "answer"] = "tool",
    ) -> None:
        """`tools` maps each tag to its tool's name."""
        for tag in (*tools, answer_tag):
            if not re.fullmatch(r"[A-Za-z_][\w.-]*", tag):
                raise ConfigError(
                    f"environment: {tag!r} is not a tag; expected letters, digits, - _ ."
                )
        if answer_tag in tools:
            raise ConfigError(
                f"environment: tag {answer_tag!r} is both the answer and {tools[answer_tag]!r}"
            )
        self._tools = dict(tools)
        self._answer_tag = answer_tag
        self._match = match
        self._precedence = precedence

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(f"</{tag}>" for tag in (*self._tools, self._answer_tag))

    def parse(self, text: str) -> list[Action]:
        found = [
            (tag, *pair)
            for tag in (*self._tools, self._answer_tag)
            if (pair := self._pair(text, tag))
        ]
        calls = [pair for pair in found if pair[0] != self._answer_tag]
        answers = [pair for pair in found if pair[0] == self._answer_tag]
        first, second = (calls, answers) if self._precedence == "tool" else (answers, calls)
        candidates = first or second
        choose = min if self._match == "first" else max
        if candidates:
            tag, start, end = choose(candidates, key=lambda pair: pair[2])
            if tag != self._answer_tag:
                return [ToolCall(self._tools[tag], text[start:end])]
            foreign = self._foreign_form(outside(text, [(start, end)]))
            if foreign is None:
                return [Answer(text[start:end].strip())]
        else:
            foreign = self._foreign_form(text)
        if foreign is not None:
            return [Invalid(f"{_not_read(foreign)}; {self._forms()}", foreign_form=foreign)]
        return [Invalid(self._complaint(text), is_unfinished=True)]

    def _foreign_form(self, text: str) -> str | None:
        """Return the form of calls that name a tool, or its tag, in another form than its tag."""
        names = set(self._tools.values())
        return foreign_form(text, names | set(self._tools), tags=names - set(self._tools))

    def _pair(self, text: str, tag: str) -> tuple[int, int] | None:
        """Return start and end of the content of the pair that counts."""
        opening, closing = f"<{tag}>", f"</{tag}>"
        if self._match == "last":
            end = text.rfind(closing)
            start = text.rfind(opening, 0, end) if end >= 0 else -1
        else:
            start = text.find(opening)
            end = text.find(closing, start) if start >= 0 else -1
        return (start + len(opening), end) if start >= 0 and end >= 0 else None

    def _complaint(self, text: str) -> str:
        for tag in (*self._tools, self._answer_tag):
            if f"<{tag}>" in text:
                return f"<{tag}> is not closed with </{tag}>"
            if f"</{tag}>" in text:
                return f"</{tag}> has no <{tag}> before it"
        return self._forms()

    def _forms(self) -> str:
        forms = " or ".join(f"<{tag}>...</{tag}>" for tag in self._tools)
        calls = f"call a tool with {forms}, or " if forms else ""
        return f"{calls}answer with <{self._answer_tag}>...</{self._answer_tag}>"


class JsonDialect:
    """Reads `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, several a turn, as Hermes and
    Qwen write it.

    Thoughts between the tags of `reasoning` are skipped. With an answer tag, that pair is the
    answer; without one, a turn without calls is the answer. Calls win over an answer, also invalid
    ones in another form.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
    form = JSON_FORM

    def __init__(
        self,
        tools: Sequence[str],
        *,
        answer_tag: str | None = None,
        max_calls: int = MAX_CALLS_PER_TURN,
        reasoning: Reasoning = THINK,
    ) -> None:
        self._tools = tuple(tools)
        self._answers = TagDialect({}, answer_tag=answer_tag) if answer_tag else None
        self._max_calls = max_calls
        self._reasoning = reasoning
        self._answer_tag = answer_tag

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn besides the end of the message; they stay in its text."""
        return self._answers.stop if self._answers else ()

    def parse(self, text: str) -> list[Action]:
        spoken = outside(text, self._reasoning.thoughts(text).spans)
        blocks = self._blocks(spoken)
        if not blocks:
            foreign = self._foreign_form(spoken)
            if foreign is not None:
                return [
                    Invalid(f"{_not_read(foreign)}; expected {self.form}", foreign_form=foreign)
                ]
            if self.closing in spoken:
                return [Invalid(f"{self.closing} has no {self.opening} before it")]
            if self._answers is None and spoken.strip():
                return [Answer(spoken.strip())]
            if self._answers is None:
                return [Invalid("the turn is empty", is_unfinished=True)]
            return [self._with_form(action) for action in self._answers.parse(spoken)]
        is_open = self.closing not in spoken.rpartition(self.opening)[2]
        actions: list[Action] = []
        for number, block in enumerate(blocks[: self._max_calls], start=1):
            which = f"tool call {number}" if len(blocks) > 1 else "the tool call"
            action = self._action(block, which)
            if isinstance(action, Invalid) and is_open and number == len(blocks):
                action = replace(action, is_unfinished=True)
            actions.append(action)
        if len(blocks) > self._max_calls:
            actions.append(
                Invalid(f"{len(blocks)} tool calls in one turn, at most {self._max_calls} are run")
            )
        return actions

    def _blocks(self, text: str) -> list[str]:
        """Return the texts between the tags; a last one that is not closed extends to the end."""
        return [part.partition(self.closing)[0].strip() for part in text.split(self.opening)[1:]]

    def _with_form(self, action: Action) -> Action:
        """Add the form of calls to the reason of a missing answer."""
        if not isinstance(action, Invalid) or not self._tools:
            return action
        return replace(action, reason=f"call a tool with {self.form}, or {action.reason}")

    def _foreign_form(self, text: str) -> str | None:
        if self._answer_tag is not None:
            opening, closing = f"<{self._answer_tag}>", f"</{self._answer_tag}>"
            found = pairs(text, opening, closing)
            text = outside(text, [(a - len(opening), b + len(closing)) for a, b in found])
        return foreign_form(text, self._tools, tags=self._tools)

    def _action(self, block: str, which: str) -> ToolCall | Invalid:
        try:
            value = encodable_values(load_json(block))
        except json.JSONDecodeError as error:
            foreign = foreign_form(f"{self.opening}{block}", self._tools, reads_json=True)
            if foreign is not None:
                reason = f"{which} cannot be read: it is written as {foreign}; expected {self.form}"
                return Invalid(reason, foreign_form=foreign)
            near = block[max(0, error.pos - 20) : error.pos + 20]
            return Invalid(
                f"{which} is not JSON: {error.msg} at character {error.pos}, near"
                f" {near[:SHOWN_CHARACTERS]!r}"
            )
        except (RecursionError, ValueError) as error:  # too deep, or an integer too long
            return Invalid(f"{which} is not valid JSON: {error}")
        form = 'expected {"name": .., "arguments": {..}}'
        if not isinstance(value, dict):
            return Invalid(f"{which} is a JSON {_json_kind(value)}; {form}")
        fields = cast(dict[str, Any], value)
        name = fields.get("name")
        if not isinstance(name, str):
            return Invalid(f"{which} has no name; {form}")
        if name not in self._tools:
            shown = name[:SHOWN_CHARACTERS]
            return Invalid(
                f"{which} names {shown!r}; there is {', '.join(self._tools) or 'no tool'}"
            )
        return self._with_arguments(
            name, fields.get("arguments", fields.get("parameters", {})), which
        )

    def _with_arguments(self, name: str, arguments: Any, which: str) -> ToolCall | Invalid:
        if isinstance(arguments, str):  # some models put JSON in a string, as the wire form does
            try:
                arguments = encodable_values(load_json(arguments))
            except (RecursionError, ValueError):
                return Invalid(
                    f"{which}: the arguments of {name} are text that is not a JSON object"
                )
        if not isinstance(arguments, dict):
            kind = _json_kind(arguments)
            return Invalid(
                f"{which}: the arguments of {name} are a JSON {kind}, expected an object"
            )
        return ToolCall(name, cast(dict[str, Any], arguments))


def _not_read(form: str) -> str:
    return f"a tool call written as {form} cannot be read here"


def _json_kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            return "list"
        case _:
            return "object"
