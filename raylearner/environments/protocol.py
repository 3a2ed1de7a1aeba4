"""The environment protocol: message space, one instance per episode."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raylearner.text import as_metrics, make_encodable
from raylearner.types import Message, Prompt, StopReason

ERROR_CHARACTERS = 300
"""Maximum length of a tool's error that an outcome carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The environment's answer to one turn of the policy; no messages and done ends the episode."""

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    stop_reason: StopReason = StopReason.END
    tool: str | None = None
    is_valid: bool = True
    """False where the turn was an invalid action; a turn cut at its token limit before its action
    is valid."""
    foreign_form: str | None = None
    """Form of a tool call in the turn that is not the configured form."""
    num_shown: int = 0
    """Number of entries of `shown` that this reply adds. Where it does not fit the episode, they
    count as not shown, except those whose images were shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Final report of an environment: counts for metrics, and a penalty subtracted from the reward."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])
    penalty: float = 0.0
    shown: tuple[str, ...] = ()
    """Ids of the passages and pages shown, in order."""
    tool_errors: dict[str, str] = field(default_factory=dict[str, str])
    """The last error of each tool that failed without failing the episode. A tool's calls and failures are
    the metrics `calls/<tool>` and `failures/<tool>`; the run ends above
    `replay.max_tool_failure_fraction`."""

    def __post_init__(self) -> None:
        """Make metrics that are not finite numbers NaN, which are counted and left out of means.

        Raises `ValueError` for a penalty that is not finite, since it would be the reward.
        """
        if not math.isfinite(self.penalty):
            raise ValueError(f"penalty must be a finite number, got {self.penalty!r}")
        object.__setattr__(self, "metrics", as_metrics(self.metrics))
        errors = {
            str(name): str(error)[:ERROR_CHARACTERS] for name, error in self.tool_errors.items()
        }
        object.__setattr__(self, "tool_errors", errors)
        make_encodable(self)


class Environment(Protocol):
    """One episode in message space: `reset`, then `step` until done, then `close`.

    Any exception is a failed trajectory: `ToolError` counts as a tool's failure, others as the
    environment's.
    """

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the next turn; they stay in the sampled text."""
        ...

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """Functions that the chat template announces; none for dialects of tags."""
        ...

    async def reset(self, prompt: Prompt) -> Sequence[Message]: ...

    async def step(self, message: Message) -> Reply:
        """Take the policy's turn: content, thoughts as `reasoning`, and whether it was cut at its
        token limit."""
        ...

    def outcome(self) -> Outcome: ...

    async def close(self) -> None: ...
