"""What a tool is: a name, a tag and one call."""

from typing import Protocol

from raylearner.types import Prompt


class Tool(Protocol):
    """Turns the text of a call into the text of an observation.

    `call` raises `ToolError` when the tool or the service behind it fails; bad arguments of the
    policy are no failure, they come back as an observation that says what is wrong.
    """

    name: str
    tag: str

    async def call(self, argument: str, *, prompt: Prompt) -> str: ...
