"""A chat-completions endpoint of the OpenAI form, asked for one thing at a time.

Waits for: a place among the concurrent requests, then the service, never longer than the section
allows; bounded retries with a growing delay.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from raylearner import strict_json
from raylearner.config.rewards import Judge, PairwiseJudge
from raylearner.errors import JudgeRefused, RewardError
from raylearner.network import proxy_of
from raylearner.text import encodable_json

SHOWN_CHARACTERS = 300
MAX_REPLY_BYTES = 4 << 20
RETRIED_STATUSES = frozenset({408, 409, 425, 429})
PARAMETER_STATUSES = frozenset({400, 422})
"""Statuses of a request with parameters that the service does not take."""

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


class _Failure(Exception):
    """One request failed."""

    def __init__(self, text: str, *, is_transient: bool) -> None:
        super().__init__(text)
        self.is_transient = is_transient


class Endpoint:
    """Asks the model of a judge. Owns its connections from the first question until `close`."""

    def __init__(self, section: Judge | PairwiseJudge) -> None:
        self._section = section
        self._url = f"{section.url.rstrip('/')}/chat/completions"
        self._places = asyncio.Semaphore(section.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, request: str, parse: Callable[[str], Answer]) -> Answer:
        """What `parse` makes of the reply; it raises `ValueError` for one that it cannot read.

        Transport errors, statuses 5xx, 408, 409, 425 and 429, and replies that cannot be read are
        tried again. Raises `RewardError` with the address, what came, and how often it was tried.
        """
        section = self._section
        delay_s = section.retry_delay_s
        for number in range(1, section.retries + 2):
            try:
                async with self._places:
                    text = await self._reply(request)
                return _parsed(text, parse)
            except _Failure as failure:
                if number > section.retries or not failure.is_transient:
                    tries = f" ({number} tries)" if number > 1 else ""
                    error = RewardError if failure.is_transient else JudgeRefused
                    raise error(f"POST {self._url} {failure}{tries}") from failure.__cause__
            await asyncio.sleep(delay_s)
            delay_s *= 2
        raise AssertionError("at least one try")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _reply(self, request: str) -> str:
        section = self._section
        body: dict[str, Any] = {
            "model": section.model,
            "messages": [{"role": "user", "content": request}],
            **section.request_fields,
        }
        try:
            async with (
                asyncio.timeout(section.request_timeout_s),
                self._client().post(
                    self._url, json=body, headers=self._headers(), proxy=self._proxy()
                ) as response,
            ):
                content = await response.content.read(MAX_REPLY_BYTES)
                while len(content) < MAX_REPLY_BYTES and (more := await response.content.read(-1)):
                    content += more
                status = response.status
        except TimeoutError as error:
            raise _Failure(
                f"gave no reply within {section.request_timeout_s:g} s", is_transient=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            said = str(error) or type(error).__name__
            raise _Failure(f"failed: {said[:SHOWN_CHARACTERS]}", is_transient=True) from error
        if not 200 <= status < 300:
            is_transient = status >= 500 or status in RETRIED_STATUSES
            advice = _advice(section, content) if status in PARAMETER_STATUSES else ""
            raise _Failure(
                f"answered status {status} {_shown(content)}{advice}", is_transient=is_transient
            )
        return _text(content)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._section.max_concurrent),
                timeout=aiohttp.ClientTimeout(total=None),
                json_serialize=strict_json.dumps,
            )
        return self._session

    def _proxy(self) -> str | None:
        """Of services outside, as the environment says. Raises `RewardError` for one of another kind."""
        try:
            proxy = proxy_of(self._url)
        except ValueError as error:
            raise RewardError(f"POST {self._url}: {error}") from error
        return None if proxy is None else proxy.url

    def _headers(self) -> dict[str, str]:
        """The key never shows in errors. Raises `RewardError` when its variable is not set."""
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


def _text(content: bytes) -> str:
    """The text of a chat completion that ended by itself."""
    try:
        choice = _Reply.model_validate_json(encodable_json(content)).choices[0]
    except (ValidationError, IndexError) as error:
        raise _Failure(
            f"answered no chat completion: {_shown(content)}", is_transient=True
        ) from error
    if choice.finish_reason == "length":
        shown = repr(choice.message.text[-SHOWN_CHARACTERS:])
        raise _Failure(f"answered {shown}, cut by its length; raise max_tokens", is_transient=True)
    return choice.message.text


def _parsed(text: str, parse: Callable[[str], Answer]) -> Answer:
    try:
        return parse(text)
    except ValueError as error:
        raise _Failure(
            f"answered {text[:SHOWN_CHARACTERS]!r}: {error}", is_transient=True
        ) from error


def _advice(section: Judge | PairwiseJudge, content: bytes) -> str:
    """Which keys change what a service refused, by the names that its reply holds."""
    said = content.decode("utf-8", "replace")
    keys = {
        "tokens": "max_tokens_parameter (the limit's name) or max_tokens (null leaves it out)",
        "temperature": "temperature (null leaves it out)",
    }
    keys |= {name: f"extra_arguments.{name}" for name in section.extra_arguments}
    named = [advice for name, advice in keys.items() if name in said]
    return f"; change {' or '.join(named or keys.values())}"


def _shown(content: bytes) -> str:
    return repr(content[:SHOWN_CHARACTERS].decode("utf-8", "replace"))
