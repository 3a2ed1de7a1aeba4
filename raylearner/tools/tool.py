"""The interface of a tool: a name, a tag, a schema and one call that returns an observation."""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from raylearner.errors import ToolError
from raylearner.text import make_encodable
from raylearner.types import Prompt

MAX_LATENCIES = 4096
LOG_EVERY = 100

log = logging.getLogger(__name__)

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
    cause: str = ""
    """The error of a tool that failed, which the policy is not shown."""

    __post_init__ = make_encodable


class ToolMetrics:
    """Counts and latency quantiles of one tool, drained once a learner step."""

    def __init__(self, name: str, *, own: Sequence[str] = ()) -> None:
        """`own` are counts that only this tool has."""
        self._name = name
        self._counts = dict.fromkeys(("calls", "errors", "retries", *own), 0)
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCIES)

    def count_call(self, *, latency_s: float, is_error: bool) -> None:
        self._counts["calls"] += 1
        self._counts["errors"] += is_error
        self._latencies.append(latency_s)

    def count_retry(self) -> None:
        self.count("retries")

    def count(self, key: str) -> int:
        """Increment a count and return it."""
        self._counts[key] += 1
        return self._counts[key]

    def drain(self) -> dict[str, float]:
        prefix = f"tools/{self._name}"
        values = {f"{prefix}/{key}": float(count) for key, count in self._counts.items()}
        ordered = sorted(self._latencies)
        for percent in (50, 90, 99) if ordered else ():
            place = min(len(ordered) - 1, len(ordered) * percent // 100)
            values[f"{prefix}/latency_s/p{percent}"] = ordered[place]
        self._counts = dict.fromkeys(self._counts, 0)
        self._latencies.clear()
        return values


class Tool(ABC):
    """Turns the arguments of a call into an observation; one instance serves many episodes.

    Wrong arguments of the policy are not a failure: the observation describes the error. The policy is
    shown that a tool failed without details such as addresses; the first failure and every hundredth
    are logged in full.
    """

    def __init__(
        self,
        name: str,
        tag: str,
        *,
        on_failure: Literal["observation", "fail"] = "observation",
        own: Sequence[str] = (),
    ) -> None:
        """`own` are counts that only this tool has."""
        self.name, self.tag = name, tag
        self.metrics = ToolMetrics(name, own=own)
        self._on_failure = on_failure
        self._num_failures = 0

    @property
    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return the function's JSON schema in the form that chat templates take."""

    @abstractmethod
    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        """Raises `BadArguments` for the policy's error, `ToolError` for a failure."""

    async def close(self) -> None:
        return None

    async def call(self, arguments: Arguments, *, prompt: Prompt) -> Observation:
        """Raises `ToolError` where the tool or its service fails and `on_failure` is `fail`."""
        started = time.monotonic()
        is_error = True
        try:
            observation = await self._call(arguments, prompt)
            is_error = False
            return observation
        except BadArguments as error:
            started = None  # not part of the tool's latency
            return Observation(text=f"error: {error}", is_error=True, is_refused=True)
        except ToolError as error:
            if self._num_failures % LOG_EVERY == 0:
                log.warning(
                    "tool %s failed (%d times so far): %s", self.name, self._num_failures + 1, error
                )
            self._num_failures += 1
            if self._on_failure == "fail":
                raise
            return Observation(
                text=f"error: {self.name} failed, try again later",
                is_error=True,
                is_failure=True,
                cause=str(error).partition("\n")[0],
            )
        finally:
            if started is None:
                self.metrics.count("calls")
            else:
                self.metrics.count_call(latency_s=time.monotonic() - started, is_error=is_error)

    def drain_metrics(self) -> dict[str, float]:
        """Return counts and latencies since the last call."""
        return self.metrics.drain()


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
        raise BadArguments(f"expected text {name!r}, got {type(value).__name__}")
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
