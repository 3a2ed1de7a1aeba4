"""The text that a chat template writes after an assistant turn, extracted from its rendering of a
dialogue.

The dialogue so far, a marked turn and the new messages are rendered together; the text after the
turn continues the transcript. Earlier turns stay as they were sampled, however the template changes
them.
"""

import re
import secrets
from collections.abc import Sequence

from raylearner.errors import RenderError
from raylearner.tokenization.control import ControlTokens, Marked
from raylearner.tokenization.template import (
    STAND_IN_SCHEMA,
    STAND_IN_TOOL,
    CallForm,
    ChatTemplate,
    Json,
    adapted,
    call,
    result,
)

_USER: Json = {"role": "user", "content": "-"}
_SYSTEM: Json = {"role": "system", "content": "-"}
_LONG_ID = "call_" + "0123456789ab" * 2
_FORMS = tuple(
    CallForm(has_text_arguments=is_text, has_short_ids=is_short)
    for is_text in (False, True)
    for is_short in (False, True)
)
_THOUGHTS = re.compile(r"</?think>|\s")


class RewritesHistory(RenderError):
    """A template changes text that it wrote before, so transcripts cannot grow by appending."""


class Continuation:
    """Continues dialogues by one chat template. Immutable, shared by all episodes."""

    def __init__(
        self, template: ChatTemplate, control: ControlTokens, end_token_ids: Sequence[int]
    ) -> None:
        self._template = template
        self._control = control
        self._end_token_ids = tuple(end_token_ids)
        self._turn = f"raylearner{secrets.token_hex(8)}"
        self.form = self._find_form()

    def after_turn(
        self,
        messages: Sequence[Json],
        *,
        history: Sequence[Json] = (),
        calls: Sequence[Json] = (),
        tools: Sequence[Json] = (),
    ) -> Marked:
        """Return the text from the end of an assistant's turn with `calls` to the header of the
        next.

        `history` is the dialogue before that turn; a user message replaces an empty one. Raises
        `RenderError` where the template refuses the dialogue or does not show each of the messages,
        in order.
        """
        earlier = list(map(self._taken, history)) or [_USER]
        dialogue = [*earlier, self.turn(self._turn, calls), *messages]
        _, found, rest = self._rendered(dialogue, tools).rpartition(self._turn)
        if not found:
            raise RenderError("the chat template drops an assistant turn")
        first = self._refuse_dropping(dialogue, len(dialogue) - len(messages), tools)
        return self._from_end(rest, first, dialogue, tools) if calls else rest

    def turn(self, content: str, calls: Sequence[Json]) -> Json:
        """Return a message of the assistant, whose last call has its content as an argument."""
        turn = {"role": "assistant", "content": content}
        if not calls:
            return turn
        kept = self._kept(calls)
        last = {**kept[-1]["function"], "arguments": {"mark": content}}
        return {**turn, "tool_calls": [*kept[:-1], {**kept[-1], "function": last}]}

    def refuse_rewriting(
        self,
        message: Json,
        *,
        calls: Sequence[Json] = (),
        tools: Sequence[Json] = (),
        has_system: bool = False,
    ) -> None:
        """Raises `RewritesHistory` where the text before a turn of the assistant changes once
        `message` follows it, and `RenderError` where the template refuses that.

        Thoughts that a template drops from earlier turns do not count: they stay as sampled.
        """
        opening = [_SYSTEM, _USER] if has_system else [_USER]
        whole = self._rendered([*opening, self.turn(self._turn, calls), message], tools)
        before, _, _ = whole.partition(self._turn)
        shown = self._template.render(opening, tools, opens=False)
        if not before.startswith(shown):
            raise RewritesHistory(
                "the chat template renders the messages before an assistant turn differently once "
                "more messages follow it, so a transcript cannot grow by appending"
            )
        opened = self._template.render(opening, tools)
        if calls or not opened.startswith(shown):
            return
        header, written = (_THOUGHTS.sub("", text.removeprefix(shown)) for text in (opened, before))
        more = written.removeprefix(header)  # control tokens that the policy writes itself
        is_same = written.startswith(header) and (not more or self._control.begins(more))
        if not is_same and not header.startswith(written):
            raise RewritesHistory(
                f"the chat template opens an assistant turn with {self._control.plain(header)!r} "
                f"and later renders it with {self._control.plain(written)!r}"
            )

    def _kept(self, calls: Sequence[Json]) -> list[Json]:
        return list(calls if self.form.takes_several else calls[-1:])

    def _taken(self, message: Json) -> Json:
        """Return a message of the history with no more calls than the template takes; of earlier
        turns only the sampled text is shown."""
        calls = message.get("tool_calls")
        return {**message, "tool_calls": self._kept(calls)} if calls else message

    def _rendered(self, dialogue: Sequence[Json], tools: Sequence[Json]) -> Marked:
        return self._template.render(adapted(dialogue, self.form), tools)

    def _from_end(
        self, rest: Marked, first: str, dialogue: Sequence[Json], tools: Sequence[Json]
    ) -> Marked:
        """Cut the closing of the call, which the policy samples itself.

        `first` is the text before the first message: an end token behind that does not end the
        turn.
        """
        place = self._control.first(rest, self._end_token_ids)
        if place is not None and len(self._control.plain(rest[:place])) < len(first):
            return rest[place:]
        without_calls = [
            {key: value for key, value in message.items() if key != "tool_calls"}
            for message in dialogue
        ]
        _, _, plain = self._rendered(without_calls, tools).rpartition(self._turn)
        if not plain or not rest.endswith(plain):
            raise RenderError(
                "the chat template does not show where a turn with tool calls ends: none of the end"
                f" tokens {[self._control.plain(self._control.name(i)) for i in self._end_token_ids]}"
                " follows its calls"
            )
        return plain

    def _refuse_dropping(self, dialogue: Sequence[Json], start: int, tools: Sequence[Json]) -> str:
        """Return the text between the turn and the first message shown. Raises `RenderError` for a
        dropped one."""
        marks = {i: f"{self._turn}x{i}x" for i in range(start, len(dialogue))}
        marked = [
            {**message, "content": marks[i]} if i in marks else message
            for i, message in enumerate(dialogue)
        ]
        text = self._template.text(adapted(marked, self.form), tools)
        place, first = 0, ""
        for i, mark in marks.items():
            if dialogue[i].get("tool_calls"):
                continue  # many templates show either content or calls
            place = text.find(mark, place)
            if place < 0:
                raise RenderError(
                    f"the chat template drops a {dialogue[i]['role']!r} message after an assistant"
                    " turn"
                )
            first = first or text[:place].rpartition(self._turn)[2]
        return first

    def _find_form(self) -> CallForm:
        """Return the first form of calls that the template accepts; the common one without any."""
        for form in _FORMS:
            if self._takes(form, 1):
                several = self._takes(form, 2)
                return CallForm(
                    has_text_arguments=form.has_text_arguments,
                    has_short_ids=form.has_short_ids,
                    takes_several=several,
                )
        return CallForm()

    def _takes(self, form: CallForm, num_calls: int) -> bool:
        ids = [f"{_LONG_ID}{i}" for i in range(num_calls)]
        calls = [call(call_id, STAND_IN_TOOL, {"mark": "-"}) for call_id in ids]
        dialogue = [
            _USER,
            {"role": "assistant", "content": "-", "tool_calls": calls},
            *(result(call_id, STAND_IN_TOOL, "-") for call_id in ids),
        ]
        try:
            self._template.text(adapted(dialogue, form), [STAND_IN_SCHEMA])
        except RenderError:
            return False
        return True


def calls_before(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """Return calls that the first messages answer, which templates expect before them."""
    calls: list[Json] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            break
        name = message.get("name") or first_name(tools)
        calls.append(call(message.get("tool_call_id") or stand_in_id(number), name, {}))
    return calls


def stand_in_result(tools: Sequence[Json]) -> Json:
    """Return a stand-in for the result of a tool."""
    return result(stand_in_id(0), first_name(tools), "=")


def first_name(tools: Sequence[Json]) -> str:
    """Return a stand-in for the tool of a turn whose call could not be read."""
    return str(tools[0]["function"]["name"]) if tools else STAND_IN_TOOL


def stand_in_id(number: int) -> str:
    return f"call{number:05}"
