"""The interface of a tool: a name, a tag, a schema and one call that returns an observation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from raylearner.text import make_encodable
from raylearner.types import Prompt

Arguments: TypeAlias = str | Mapping[str, Any]
"""Text between tags, or the object of a JSON call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An observation of the policy: text, and images, each with its `IMAGE_MARK` in the text and
    its page id."""

    text: str
    images: tuple[bytes, ...] = ()
    ids: tuple[str, ...] = ()
    """Ids of the passages or pages shown; with images, one for each image in order."""
    is_error: bool = False
    is_refused: bool = False
    """Whether the policy's arguments were wrong, so that nothing was called."""
    is_failure: bool = False
    """Whether the tool itself failed, or the service behind it."""

    __post_init__ = make_encodable


class Tool(Protocol):
    """Turns the arguments of a call into an observation; one instance serves many episodes.

    Wrong arguments of the policy are not a failure: the observation describes the error. `call`
    raises `ToolError` when the tool or its service fails and its section makes that fail the
    trajectory.
    """

    name: str
    tag: str

    @property
    def schema(self) -> dict[str, Any]:
        """Return the function's JSON schema in the form that chat templates take."""
        ...

    async def call(self, arguments: Arguments, *, prompt: Prompt) -> Observation: ...

    def drain_metrics(self) -> dict[str, float]:
        """Return counts and latencies since the last call."""
        ...

    async def close(self) -> None: ...


class BadArguments(ValueError):
    """The policy called a tool wrongly; the message is shown to it."""


def text_argument(arguments: Arguments, name: str) -> str:
    """Return the only argument of a tool that takes one text, from either dialect. Raises
    `BadArguments`."""
    if isinstance(arguments, str):
        value: object = arguments
    else:
        unknown = sorted(set(arguments) - {name})
        if unknown:
            raise BadArguments(f"unknown argument {unknown[0]!r}; expected {name!r}")
        value = arguments.get(name)
    if not isinstance(value, str):
        raise BadArguments(f"expected a text {name!r}, got {type(value).__name__}")
    if not value.strip():
        raise BadArguments(f"{name} is empty")
    return value.strip()


def function_schema(
    name: str, description: str, parameters: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a schema whose parameters are all required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: dict(value) for key, value in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def refused(error: BadArguments) -> Observation:
    return Observation(text=f"error: {error}", is_error=True, is_refused=True)
