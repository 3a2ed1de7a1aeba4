"""Chat completions as OpenAI's API has them: requests read and checked, replies written, whole or as
events.

What would change the distribution that tokens are sampled from is never honored, since the learner
knows only the run's: numbers that differ are told in the reply, anything else is refused with 400.
"""

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from raylearner.data.dialogue import read_dialogue, read_tools
from raylearner.errors import DialogueError
from raylearner.text import encodable_values
from raylearner.types import Message

Json = dict[str, Any]

KEPT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Sampling numbers for which the run's own stand, whatever a request says."""
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
"""What may be written as long as it changes nothing."""
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
FinishReason = Literal["stop", "length", "tool_calls"]


class ChatRefusal(Exception):
    """A call that is answered with an error; `status` is HTTP's, `code` is for programs to read."""

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
    """A message of text."""

    @property
    def key(self) -> str:
        """Equal for messages that say the same; ids of an assistant's calls and its thoughts, which
        programs need not send back, are left out."""
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
    asked: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sampling numbers that the request names."""

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(str(tool["function"]["name"]) for tool in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """The assistant's message and what it took."""

    message: ChatMessage
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    kept: str = ""
    """Sampling numbers of the request that were not followed, in words; empty where none."""


class ChatSession(Protocol):
    """Answers the calls of one episode. Raises `ChatRefusal`."""

    async def complete(
        self, request: ChatRequest, *, is_wanted: Callable[[], Awaitable[bool]]
    ) -> ChatReply:
        """`is_wanted` tells whether the program still waits; what it does not get is not recorded."""
        ...


def read_request(body: object) -> ChatRequest:
    """Raises `ChatRefusal` with what is wrong and where."""
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
        asked={name: fields[name] for name in KEPT if isinstance(fields.get(name), int | float)},
    )


def whole(reply: ChatReply, request: ChatRequest) -> Json:
    """The reply as one object."""
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


def events(reply: ChatReply, request: ChatRequest) -> Iterator[str]:
    """The reply as server-sent events: all text in one, since it is recorded before it is told."""
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
                f"{name} must be {allowed} or absent, since tokens are sampled as the run's"
                f" configuration says; got {json.dumps(value)[:80]}",
                name,
                "unsupported_value",
            )


def _messages(value: object) -> tuple[ChatMessage, ...]:
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
        raise _bad(f"stop must be a text or at most {MAX_STOPS} texts, none empty", "stop")
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
