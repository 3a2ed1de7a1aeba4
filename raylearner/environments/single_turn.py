"""One completion, then the end."""

from collections.abc import Sequence
from typing import Any

from raylearner.environments.protocol import Outcome, Reply
from raylearner.types import Message, Prompt, StopReason


class SingleTurnEnvironment:
    """The prompt's own messages; the first completion ends the episode."""

    @property
    def stop(self) -> tuple[str, ...]:
        return ()

    @property
    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        return ()

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, message: Message) -> Reply:
        return Reply(is_done=True, stop_reason=StopReason.END)

    def outcome(self) -> Outcome:
        return Outcome()

    async def close(self) -> None:
        return None
