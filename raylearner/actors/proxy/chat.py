"""Chat completions of the OpenAI API: validates requests, writes replies, as one object or as
events.

Parameters that would change the sampling distribution are not applied, since the learner assumes
the run's own: differing numbers are reported in the reply, others are refused with 400.
"""

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

from raylearner.data.dialogue import read_dialogue, read_tools
from raylearner.environments.dialect import Invalid, JsonDialect, ToolCall
from raylearner.errors import DialogueError
from raylearner.text import encodable_values
from raylearner.tokenization.reasoning import Reasoning
from raylearner.types import FunctionCall, Message, new_call_id

Json = dict[str, Any]

KEPT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Sampling parameters that the run's own values replace."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}
"""Parameters accepted with values that change nothing."""
HARMLESS = frozenset(
    {
        "model",
        "messages",
        "tools",
        "stream",
        "stream_options",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
MAX_STOPS = 16
MAX_MESSAGES = 10_000
FinishReason = Literal["stop", "length", "tool_calls"]


class ChatRefusal(Exception):
    """A call is answered with an error: HTTP's `status`, and a `code` for programs."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage(Message):
    """A text message."""

    @property
    def key(self) -> str:
        """Equal for messages with the same content; an assistant's call ids and thoughts, which programs
        need not send back, are left out."""
        calls = [[call.name, _canonical(call.arguments)] for call in self.calls]
        is_own = self.role == "assistant"
        content = self.content.strip() if is_own else self.content
        return json.dumps([self.role, content, calls, None if is_own else self.call_id, self.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call of the program, checked."""

    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[Json, ...] = ()
    may_call_tools: bool = True
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    is_streamed: bool = False
    should_stream_usage: bool = False
    requested: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sampling parameters of the request."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(str(tool["function"]["name"]) for tool in self.tools)

    @property
    def keys(self) -> tuple[str, ...]:
        """Identify the conversation: its tools, then its messages."""
        tools = json.dumps(self.tools, sort_keys=True)
        return (tools, *(message.key for message in self.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """The assistant's message and its cost in tokens."""

    message: ChatMessage
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    kept: str = ""
    """Description of the sampling parameters that were not applied; empty if none."""


class ChatSession(Protocol):
    """Answers the calls of one episode. Raises `ChatRefusal`."""

    async def complete(
        self, request: ChatRequest, *, is_wanted: Callable[[], Awaitable[bool]]
    ) -> ChatReply:
        """`is_wanted` returns whether the program still waits; a reply that it does not get is not
        recorded."""
        ...


def read_request(body: object) -> ChatRequest:
    """Return the request, checked. Raises `ChatRefusal` with the problem and its place."""
    if not isinstance(body, dict):
        raise _bad("the body must be a JSON object", "body")
    try:
        fields = cast(Json, encodable_values(body))
    except RecursionError as error:
        raise _bad("the body is nested too deeply", "body") from error
    _refuse_unsupported(fields)
    tools = _tools(fields.get("tools"))
    stream_options = fields.get("stream_options")
    options = cast(Json, stream_options) if isinstance(stream_options, dict) else {}
    return ChatRequest(
        model=str(fields.get("model") or "policy"),
        messages=_messages(fields.get("messages")),
        tools=tools,
        may_call_tools=bool(tools) and fields.get("tool_choice") != "none",
        stop=_stops(fields.get("stop")),
        max_tokens=_max_tokens(fields),
        is_streamed=bool(fields.get("stream")),
        should_stream_usage=bool(options.get("include_usage")),
        requested={
            name: fields[name] for name in KEPT if isinstance(fields.get(name), int | float)
        },
    )


def write_reply(reply: ChatReply, request: ChatRequest) -> Json:
    """Return the reply as one object."""
    message: Json = {"role": "assistant", "content": reply.message.content, "refusal": None}
    if reply.message.reasoning:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.calls:
        message["content"] = reply.message.content or None
        message["tool_calls"] = [call.wire() for call in reply.message.calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
    }
    return {**_head("chat.completion", request), "choices": [choice], "usage": _usage(reply)}


def write_events(reply: ChatReply, request: ChatRequest) -> Iterator[str]:
    """Yield the reply as server-sent events: all text in one, since it is recorded before."""
    head = _head("chat.completion.chunk", request)

    def event(delta: Json, finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    reasoning = reply.message.reasoning
    thought = {"reasoning_content": reasoning} if reasoning else {}
    yield event({"role": "assistant", "content": reply.message.content, **thought})
    for index, call in enumerate(reply.message.calls):
        yield event({"tool_calls": [{"index": index, **call.wire()}]})
    yield event({}, reply.finish_reason)
    if request.should_stream_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(reply)})}\n\n"
    yield "data: [DONE]\n\n"


def cut_at_stop(text: str, stops: Iterable[str]) -> str:
    """Return the text before the first stop string, as a program receives it; the tokens keep all."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def read_turn(
    turn: Message, request: ChatRequest, reasoning: Reasoning
) -> tuple[ChatMessage, Invalid | None]:
    """Return the policy's turn as a message, and the problem if its tool calls are malformed.

    Malformed calls stay text. A call that was cut at the turn's token limit is not judged.
    """
    message = ChatMessage(role="assistant", content=turn.content, reasoning=turn.reasoning)
    if not request.may_call_tools or not turn.content.strip():
        return message, None
    actions = JsonDialect(request.tool_names, reasoning=reasoning).parse(turn.content)
    calls = [action for action in actions if isinstance(action, ToolCall)]
    invalid = [action for action in actions if isinstance(action, Invalid)]
    if turn.is_cut:
        invalid = [action for action in invalid if not action.is_unfinished]
    if not calls or len(calls) < len(actions):
        return message, next(iter(invalid), None)
    function_calls = tuple(
        FunctionCall(call_id=new_call_id(), name=call.name, arguments=json.dumps(call.arguments))
        for call in calls
    )
    content = turn.content.partition(JsonDialect.opening)[0].strip()
    return replace(message, content=content, calls=function_calls), None


def _head(kind: str, request: ChatRequest) -> Json:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _usage(reply: ChatReply) -> Json:
    prompt, completion = reply.num_prompt_tokens, reply.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _bad(message: str, param: str, code: str = "invalid_value") -> ChatRefusal:
    return ChatRefusal(400, message, code=code, param=param)


def _refuse_unsupported(fields: Json) -> None:
    for name, value in fields.items():
        if value is None or name in HARMLESS or name in KEPT:
            continue
        if name not in NEUTRAL:
            raise _bad(f"{name} is not supported here", name, "unsupported_parameter")
        if value not in NEUTRAL[name]:
            allowed = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            raise _bad(
                f"{name} must be {allowed} or absent, since the run's configuration decides"
                f" how tokens are sampled; got {json.dumps(value)[:80]}",
                name,
                "unsupported_value",
            )


def _messages(value: object) -> tuple[ChatMessage, ...]:
    if isinstance(value, list) and len(cast(list[object], value)) > MAX_MESSAGES:
        raise _bad(f"messages must have at most {MAX_MESSAGES} entries", "messages")
    try:
        messages = read_dialogue(value)
    except DialogueError as error:
        raise _bad(str(error), error.where) from error
    return tuple(
        ChatMessage(
            role=message.role,
            content=message.content,
            calls=message.calls,
            call_id=message.call_id,
            name=message.name,
            reasoning=message.reasoning,
        )
        for message in messages
    )


def _tools(value: object) -> tuple[Json, ...]:
    try:
        return () if value is None else read_tools(value)
    except DialogueError as error:
        raise _bad(str(error), error.where) from error


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else cast(list[object], value or [])
    if len(stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad(f"stop must be a string or at most {MAX_STOPS} strings, none empty", "stop")
    return tuple(cast(list[str], stops))


def _max_tokens(fields: Json) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise _bad(f"{name} must be a whole number >= 1, got {json.dumps(value)[:80]}", name)
        return value
    return None


def _canonical(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)
