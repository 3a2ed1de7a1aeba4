"""A chat-completions endpoint of the OpenAI form, as a judge uses it."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raylearner.config.rewards import Judge, PairwiseJudge
from raylearner.errors import ConfigError, JudgeRefused, RewardError
from raylearner.http_client import SHOWN_CHARACTERS, HttpClient, RequestFailed, quote
from raylearner.text import dump_json, encodable_json

PATH = "/chat/completions"
PARAMETER_STATUSES = frozenset({400, 422})
"""Statuses of a request with parameters that the service does not support."""

Answer = TypeVar("Answer")


class _Part(BaseModel):
    type: str = ""
    text: str = ""


class _Message(BaseModel):
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        """Without parts of other types, such as thoughts."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if part.type in ("text", ""))
        return self.content or ""


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Reply(BaseModel):
    choices: list[_Choice]


class Endpoint:
    """Asks the model of a judge. Owns its connections from the first question until `close`."""

    def __init__(self, section: Judge | PairwiseJudge) -> None:
        """Raises `ConfigError` for an address or a proxy that cannot be used."""
        self._section = section
        try:
            self._client = HttpClient(section.url, section.http)
        except ValueError as error:
            raise ConfigError(f"rewards.functions: url: {error}") from error

    async def ask(self, request: str, parse: Callable[[str], Answer]) -> Answer:
        """Return the result of `parse` on the reply's text; it raises `ValueError` for a bad one.

        Replies that cannot be read are retried too. Raises `RewardError` with the address, the reply
        and the number of tries, and `JudgeRefused` where further tries would not help.
        """
        section = self._section
        body: dict[str, Any] = {
            "model": section.model,
            "messages": [{"role": "user", "content": request}],
            **section.request_fields,
        }
        try:
            return await self._client.post(
                PATH,
                dump_json(body).encode(),
                lambda content: _parse(_read_text(content), parse),
                headers=self._headers(),
            )
        except RequestFailed as error:
            kind = RewardError if error.is_transient else JudgeRefused
            advice = _advise(section, error) if error.status in PARAMETER_STATUSES else ""
            raise kind(f"{error}{advice}") from error.__cause__

    async def close(self) -> None:
        await self._client.close()

    def _headers(self) -> dict[str, str]:
        """Return the key, which never shows in errors. Raises `RewardError` when it is not set."""
        variable = self._section.api_key_variable
        if variable is None:
            return {}
        key = os.environ.get(variable)
        if not key:
            raise RewardError(
                f"the environment variable {variable} (api_key_variable) is not set where rewards"
                " are computed"
            )
        return {"Authorization": f"Bearer {key}"}


def _read_text(content: bytes) -> str:
    """Return the text of a chat completion that was not truncated."""
    try:
        choice = _Reply.model_validate_json(encodable_json(content)).choices[0]
    except (ValidationError, IndexError) as error:
        raise RequestFailed(
            f"did not return a chat completion: {quote(content)}", has_answered=True
        ) from error
    if choice.finish_reason == "length":
        shown = repr(choice.message.text[-SHOWN_CHARACTERS:])
        raise RequestFailed(
            f"returned {shown}, truncated at the token limit; raise max_tokens", has_answered=True
        )
    return choice.message.text


def _parse(text: str, parse: Callable[[str], Answer]) -> Answer:
    try:
        return parse(text)
    except ValueError as error:
        raise RequestFailed(
            f"answered {text[:SHOWN_CHARACTERS]!r}: {error}", has_answered=True
        ) from error


def _advise(section: Judge | PairwiseJudge, refusal: RequestFailed) -> str:
    """Name the keys that change the parameters that a service refused, by the names in its reply."""
    reply = refusal.content.decode("utf-8", "replace")
    keys = {
        "tokens": "max_tokens (null leaves it out; extra_arguments adds a limit of another name)",
        "temperature": "temperature (null leaves it out)",
    }
    keys |= {name: f"extra_arguments.{name}" for name in section.extra_arguments}
    named = [advice for name, advice in keys.items() if name in reply]
    return f"; change {' or '.join(named or keys.values())}"
