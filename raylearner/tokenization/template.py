"""A model's chat template: messages to texts in which only its own text is marked as control.

The contents of messages and tools are never control, whatever they spell: the template is rendered a
second time with the spellings in its contents broken, so all control tokens that are left are its own.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from raylearner.errors import RenderError
from raylearner.text import encodable_values
from raylearner.tokenization.control import ControlTokens, Marked
from raylearner.types import CALL_ID_LENGTH, IMAGE_MARK, Message

Json: TypeAlias = Mapping[str, Any]

STAND_INS = range(0x10FF00, 0x10FFFD)
"""Private characters, any of which may stand for a character of a control token."""
STAND_IN_TOOL = "raylearner_marked_tool"
STAND_IN_SCHEMA: Json = {
    "type": "function",
    "function": {
        "name": STAND_IN_TOOL,
        "description": "-",
        "parameters": {"type": "object", "properties": {}},
    },
}
_MARK = "raylearnermark"
_USER: Json = {"role": "user", "content": "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A form in which templates accept messages with tool calls."""

    has_text_arguments: bool = False
    """Arguments as JSON text, not as an object."""
    has_short_ids: bool = False
    """Ids must have nine letters or digits."""
    takes_several: bool = True
    """A turn may have more than one call."""


class ChatTemplate:
    """One tokenizer's template with its arguments. Immutable, shared by all episodes."""

    def __init__(self, tokenizer: Any, arguments: Json, control: ControlTokens) -> None:
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._control = control
        self._breaks = _breaks(control)

    def text(self, messages: Sequence[Json], tools: Sequence[Json], *, opens: bool = True) -> str:
        """Return the template's output; `opens` adds the header of the assistant's turn.

        Raises `RenderError` with the template's error.
        """
        return written(self._tokenizer, self._arguments, messages, tools, opens=opens)

    def render(
        self, messages: Sequence[Json], tools: Sequence[Json] = (), *, opens: bool = True
    ) -> Marked:
        """Return the marked text. Raises `RenderError`, also if contents cannot be distinguished
        from frames.
        """
        text = self.text(messages, tools, opens=opens)
        for breaks in self._breaks:
            stand_ins = self._stand_ins(text)

            def broken(content: str, breaks: re.Pattern[str] = breaks) -> str:
                return breaks.sub(lambda found: stand_ins[found[0]], content)  # noqa: B023

            shown = [_with_contents(message, broken) for message in messages]
            offered = [_with_contents(tool, broken) for tool in tools]
            if shown == list(messages) and offered == list(tools):
                return self._control.mark(text)
            try:
                marked = self._control.mark(self.text(shown, offered, opens=opens))
            except RenderError:
                continue
            for character, stand_in in stand_ins.items():
                marked = marked.replace(stand_in, character)
                marked = marked.replace(json.dumps(stand_in)[1:-1], character)
            if self._control.plain(marked) == text:
                return marked
        raise RenderError(
            "a message spells a control token, and the chat template changes messages so that it "
            "cannot be encoded as text"
        )

    def _stand_ins(self, text: str) -> dict[str, str]:
        """Return a stand-in, not in `text`, for each character that is broken."""
        unused = (chr(code) for code in STAND_INS if chr(code) not in text)
        broken = {c for text in self._control.texts for c in (text[0], text[_letter(text)])}
        return dict(zip(sorted(broken), unused, strict=False))


def written(
    tokenizer: Any, arguments: Json, messages: Sequence[Json], tools: Sequence[Json], *, opens: bool
) -> str:
    """Return the output of a tokenizer's chat template. Raises `RenderError`."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens,
                **arguments,
            )
        )
    except Exception as error:  # Jinja raises whatever a template raises
        raise RenderError(f"the chat template refused {len(messages)} messages: {error}") from error


def frame_token_ids(tokenizer: Any, arguments: Json, end_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens with which a template frames messages, whether or not they are declared
    special.

    DeepSeek's roles are not declared. Tokens that open thoughts and calls in a turn of the
    assistant are not among them: the policy may write those.
    """
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    spelling = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")

    def write(*messages: Json, opens: bool = False, tools: Sequence[Json] = ()) -> str:
        try:
            return written(tokenizer, arguments, messages, tools, opens=opens)
        except RenderError:
            return ""

    turn = {"role": "assistant", "content": _MARK}
    opening = write(_USER)
    header = write(_USER, opens=True).removeprefix(opening)
    _, _, after = write(_USER, turn, _USER).rpartition(_MARK)
    called_rest = ""
    for given in ({"mark": _MARK}, json.dumps({"mark": _MARK})):
        called = {**turn, "tool_calls": [call("123456789", STAND_IN_TOOL, given)]}
        answer = result("123456789", STAND_IN_TOOL, "-")
        text = write(_USER, called, answer, tools=[STAND_IN_SCHEMA])
        called_rest = called_rest or text.rpartition(_MARK)[2]
    ends = {text for text, i in added.items() if i in end_token_ids} | set(spelling.findall(after))
    places = (called_rest.find(end) for end in ends)
    place = min((place for place in places if place >= 0), default=len(called_rest))
    found = [
        *spelling.findall(opening),
        *spelling.findall(header)[:1],
        *spelling.findall(after),
        *spelling.findall(called_rest[place:]),
    ]
    return [added[text] for text in dict.fromkeys(found)]


def call(call_id: str, name: str, arguments: object) -> Json:
    """Return a tool call of an assistant's message, as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, name: str, content: object) -> Json:
    """Return the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _breaks(control: ControlTokens) -> list[re.Pattern[str]]:
    """Return patterns of the characters of contents that are replaced, the surest way first.

    Without the first characters of control tokens contents cannot make one, not even several
    contents that a template joins. Templates that look for tags such as `</think>` in contents need
    these kept, so next only text that begins like a control token is broken, then only whole
    spellings, then these at a letter, which templates that escape contents keep. At last frame
    tokens that are not declared special, such as `<tool_response>`, may be spelled: templates look
    for those too.
    """
    spellings, declared = (
        sorted(texts, key=len, reverse=True) for texts in (control.texts, control.declared)
    )
    patterns = [
        [re.escape(spelling[0]) for spelling in spellings],
        [_at(spelling[:2], 0) for spelling in spellings],
        *([_at(text, 0) for text in texts] for texts in (spellings, declared)),
        *([_at(text, _letter(text)) for text in texts] for texts in (spellings, declared)),
    ]
    return [re.compile("|".join(dict.fromkeys(pattern)) or r"(?!)") for pattern in patterns]


def _at(text: str, place: int) -> str:
    """Return a pattern of the character of `text` at `place`, within the whole text only."""
    before, character, behind = text[:place], text[place], text[place + 1 :]
    return f"(?<={re.escape(before)}){re.escape(character)}(?={re.escape(behind)})"


def _letter(text: str) -> int:
    return next((i for i, character in enumerate(text) if character.isalnum()), 0)


def _with_contents(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {change(key): _with_contents(item, change) for key, item in items}
    if isinstance(value, list | tuple):
        return [_with_contents(item, change) for item in cast(Sequence[Any], value)]
    return value


def adapted(messages: Sequence[Json], form: CallForm) -> list[Json]:
    """Return the messages in the form that a template takes."""
    return [_adapted(message, form) for message in messages]


def _adapted(message: Json, form: CallForm) -> Json:
    found = dict(message)
    if "tool_call_id" in found:
        found["tool_call_id"] = _id(found["tool_call_id"], form)
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [
            {
                **call,
                "id": _id(call["id"], form),
                "function": {
                    **call["function"],
                    "arguments": _arguments(call["function"]["arguments"], form),
                },
            }
            for call in calls
        ]
    return found


def _id(call_id: str, form: CallForm) -> str:
    """Return the same short id for the same long one."""
    if not form.has_short_ids or (len(call_id) == CALL_ID_LENGTH and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:CALL_ID_LENGTH]


def _arguments(arguments: Any, form: CallForm) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if form.has_text_arguments else arguments


def template_message(message: Message) -> Json:
    """Return a message for templates: content as text, or in parts where there are images;
    arguments of calls as objects."""
    found: dict[str, object] = {"role": message.role, "content": _content(message)}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls:
        found["tool_calls"] = [
            call(
                made.call_id,
                made.name,
                encodable_values(encodable_values(json.loads(made.arguments))),
            )
            for made in message.calls
        ]
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def images_of(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Return all images of the messages, in order."""
    return tuple(image for message in messages for image in message.images)


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Return the texts before, between and behind all images of the messages, joined by newlines.

    Raises `RenderError` when the numbers of marks and images of a message differ.
    """
    texts: list[str] = []
    for message in messages:
        first, *others = _texts(message)
        texts[-1:] = [f"{texts[-1]}\n{first}" if texts else first, *others]
    return texts


def _texts(message: Message) -> list[str]:
    """Return the texts of one message; marks without images are ordinary text."""
    if not message.images:
        return [message.content]
    texts, num_images = message.content.split(IMAGE_MARK), len(message.images)
    if len(texts) != num_images + 1:
        raise RenderError(f"{len(texts) - 1} marks in the content for {num_images} images")
    return texts


def _content(message: Message) -> str | list[dict[str, str]]:
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    for index, text in enumerate(_texts(message)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts
