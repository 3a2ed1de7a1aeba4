"""Validation of dialogues: rows, examples, messages of environments, and calls of programs.

All are converted to `Message`s by the same rules of roles, order and fields, or are refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from raylearner.config.problems import did_you_mean, shown
from raylearner.errors import DialogueError
from raylearner.text import encodable_values
from raylearner.types import FunctionCall, Message, Role, new_call_id

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
FIELDS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
"""Known keys of a message. Other keys may be present as long as they are null or empty."""
_CALL_FIELDS = ("id", "type", "function", "index")
_FUNCTION_FIELDS = ("name", "arguments")


def read_dialogue(
    value: object,
    *,
    image_mark: str | None = None,
    drops_nulls: bool = False,
    prefill: bool = False,
) -> tuple[Message, ...]:
    """Read messages of OpenAI's API, `Message`s, or the JSON text of such a list.

    `image_mark` replaces parts of type image, which are refused without it. `drops_nulls` leaves
    out null arguments of calls, which tables of fixed columns add. `prefill` lets the assistant's
    message come last, for the policy to continue. Raises `DialogueError`.
    """
    entries = _loaded(value, "messages")
    if not isinstance(entries, list | tuple) or not entries:
        raise DialogueError(
            "messages", f"must be a list with at least one message, got {shown(entries)}"
        )
    messages = tuple(
        entry
        if isinstance(entry, Message)
        else _message(entry, f"messages[{i}]", image_mark, drops_nulls)
        for i, entry in enumerate(cast(Sequence[object], entries))
    )
    check_order(messages, prefill=prefill)
    return messages


def check_order(messages: Sequence[Message], *, prefill: bool = False) -> None:
    """Raises `DialogueError` for results without a call, and for a final assistant turn unless the
    policy continues it.
    """
    calls: set[str] | None = None
    for i, message in enumerate(messages):
        if message.role == "assistant":
            calls = {call.call_id for call in message.calls}
        elif message.role != "tool":
            calls = None
        elif calls is None:
            raise DialogueError(
                f"messages[{i}]", "is a tool message; expected an assistant message before it"
            )
        elif calls and message.call_id is not None and message.call_id not in calls:
            raise DialogueError(
                f"messages[{i}].tool_call_id",
                f"{message.call_id!r} is not one of the calls before it ({', '.join(sorted(calls))})",
            )
    last = messages[-1]
    if last.role == "assistant" and not prefill:
        raise DialogueError(
            f"messages[{len(messages) - 1}]",
            "is the last message and the assistant's, so the policy would continue it; remove an "
            "expected answer",
            is_last=True,
        )
    if last.role == "assistant" and (last.calls or last.images or not last.content):
        raise DialogueError(
            f"messages[{len(messages) - 1}]", "must be text, which the policy continues"
        )


def wire(message: Message) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API, without its images."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls:
        found["tool_calls"] = [call.wire() for call in message.calls]
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def read_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Read schemas of functions, or the JSON text of a list of them. Raises `DialogueError`."""
    entries = _loaded(value, "tools")
    if not isinstance(entries, list | tuple):
        raise DialogueError("tools", f"must be a list, got {shown(entries)}")
    tools: list[dict[str, Any]] = []
    for i, entry in enumerate(cast(Sequence[object], entries)):
        tool = _fields(entry, f"tools[{i}]")
        if tool.get("type") != "function":
            raise DialogueError(
                f"tools[{i}].type", f"must be 'function', got {shown(tool.get('type'))}"
            )
        function = _fields(tool.get("function"), f"tools[{i}].function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise DialogueError(f"tools[{i}].function.name", "must be a name")
        tools.append(encodable_values(tool))
    return tuple(tools)


def _message(value: object, where: str, image_mark: str | None, drops_nulls: bool) -> Message:
    fields = _fields(value, where)
    named = str(fields.get("role"))
    if named not in ROLES:
        raise DialogueError(
            f"{where}.role",
            f"must be one of {', '.join(ROLES)}, got {shown(fields.get('role'))}"
            f"{did_you_mean(named, ROLES)}",
        )
    role = ROLES[named]
    _refuse_unknown(fields, FIELDS, where)
    calls = _calls(fields.get("tool_calls"), f"{where}.tool_calls", drops_nulls)
    for name, belongs in (
        ("reasoning_content", "assistant"),
        ("tool_calls", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if fields.get(name) not in (None, "", [], ()) and role != belongs:
            raise DialogueError(f"{where}.{name}", f"belongs to the role {belongs!r}, not {role!r}")
    content = fields.get("content")
    if content is None and not calls and not fields.get("reasoning_content"):
        raise DialogueError(f"{where}.content", "must be text, got null")
    return Message(
        role=role,
        content="" if content is None else _content(content, f"{where}.content", image_mark),
        calls=calls,
        call_id=_text(fields, "tool_call_id", where),
        name=_text(fields, "name", where),
        reasoning=_text(fields, "reasoning_content", where) or "",
    )


def _content(value: object, where: str, image_mark: str | None) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise DialogueError(f"{where}", f"must be text or a list of parts, got {shown(value)}")
    texts: list[str] = []
    for i, part in enumerate(cast(Sequence[object], value)):
        fields = _fields(part, f"{where}[{i}]")
        if fields.get("type") == "text" and isinstance(fields.get("text"), str):
            texts.append(fields["text"])
        elif fields.get("type") == "image" and image_mark is not None:
            texts.append(image_mark)
        else:
            raise DialogueError(
                f"{where}[{i}]",
                f"must be a part of type text"
                f"{' or image' if image_mark is not None else ''}, got {shown(part)}",
            )
    return "".join(texts)


def _calls(value: object, where: str, drops_nulls: bool) -> tuple[FunctionCall, ...]:
    entries = [] if value is None else _loaded(value, where)
    if not isinstance(entries, list | tuple):
        raise DialogueError(f"{where}", f"must be a list of calls, got {shown(entries)}")
    calls: list[FunctionCall] = []
    for i, entry in enumerate(cast(Sequence[object], entries)):
        call = _fields(entry, f"{where}[{i}]")
        _refuse_unknown(call, _CALL_FIELDS, f"{where}[{i}]")
        function = _fields(call.get("function"), f"{where}[{i}].function")
        _refuse_unknown(function, _FUNCTION_FIELDS, f"{where}[{i}].function")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise DialogueError(f"{where}[{i}].function.name", f"must be a name, got {shown(name)}")
        given = function.get("arguments")
        place = f"{where}[{i}].function.arguments"
        arguments = {} if given in (None, "") else _fields(_loaded(given, place), place)
        if drops_nulls:
            arguments = _without_nulls(arguments)
        calls.append(
            FunctionCall(
                call_id=_text(call, "id", f"{where}[{i}]") or new_call_id(),
                name=name,
                arguments=json.dumps(arguments, ensure_ascii=False),
            )
        )
    return tuple(calls)


def _loaded(value: object, where: str) -> object:
    """Parse a JSON text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DialogueError(f"{where}", f"text that is not JSON: {error}") from error


def _fields(value: object, where: str) -> dict[str, Any]:
    found = _loaded(value, where)
    if not isinstance(found, Mapping):
        raise DialogueError(f"{where}", f"must be an object, got {shown(found)}")
    return dict(cast(Mapping[str, Any], found))


def _refuse_unknown(fields: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None and value not in ("", [], {}):
            raise DialogueError(f"{where}.{name}", f"unknown field{did_you_mean(name, known)}")


def _text(fields: Mapping[str, Any], name: str, where: str) -> str | None:
    value = fields.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise DialogueError(f"{where}.{name}", f"must be text, got {shown(value)}")
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {key: _without_nulls(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast(list[Any], value)]
    return value
