"""Services behind tools: calls over HTTP, and batches of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from raylearner.config.section import HttpSection
from raylearner.errors import ConfigError, ToolError
from raylearner.http_client import HttpClient, RequestFailed, quote
from raylearner.text import dump_json, encodable_json
from raylearner.tools.tool import ToolMetrics

BATCH_WINDOW_S, MAX_BATCH = 0.003, 64
"""Concurrent queries within this time share one request, up to the maximum below."""
START_WAIT_S = 60.0
"""Maximum time that a run waits for a service to answer when it starts."""
START_TRY_TIMEOUT_S, START_RETRY_S = 5.0, 0.5

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class BadReply(ToolError):
    """A reply of a service that does not have the expected form."""


class Service:
    """One tool's client of one service: returns a JSON value or raises `ToolError`, in bounded time.

    Owns its connections until `close`.
    """

    def __init__(self, name: str, url: str, section: HttpSection, metrics: ToolMetrics) -> None:
        """Raises `ConfigError` for an address or a proxy that cannot be used."""
        self._name = name
        self._url = url.rstrip("/")
        try:
            self._client = HttpClient(url, section, on_retry=metrics.count_retry)
        except ValueError as error:
            raise ConfigError(f"tools.url: {error}") from error

    async def post(
        self,
        path: str,
        body: object,
        reply: TypeAdapter[Answer],
        *,
        expected: str,
        should_retry: bool = True,
    ) -> Answer:
        """Return the validated reply to `body`; `expected` describes its form for error messages.

        Replies that are not JSON are retried, others of a wrong form are not.
        """
        try:
            return await self._client.post(
                path,
                dump_json(body).encode(),
                lambda content: _parse(content, reply),
                should_retry=should_retry,
            )
        except RequestFailed as error:
            kind = BadReply if error.has_answered else ToolError
            raise kind(f"{self._name}: {error}; expected {expected}") from error.__cause__

    def check_count(
        self, path: str, answers: list[Answer], questions: Sequence[object]
    ) -> list[Answer]:
        """Return `answers`. Raises `BadReply` unless there is one for each question."""
        if len(answers) != len(questions):
            raise BadReply(
                f"{self._name}: POST {self._url}{path} answered status 200 with {len(answers)}"
                f" answers; expected {len(questions)}, one for each question"
            )
        return answers

    async def close(self) -> None:
        await self._client.close()


class Batcher(Generic[Item, Answer]):
    """Joins calls within `window_s` of each other into one request, and gives each its own answer.

    A batch whose reply is bad is sent again one by one, once, so that one odd item does not fail
    the others. A cancelled caller does not affect the others.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        *,
        send_alone: Callable[[Item], Awaitable[Answer]],
        window_s: float,
        max_batch: int,
    ) -> None:
        self._send = send
        self._send_alone = send_alone
        self._window_s = window_s
        self._max_batch = max_batch
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[asyncio.Task[None], list[tuple[Item, asyncio.Future[Answer]]]] = {}

    async def call(self, item: Item) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self._max_batch:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._window_s, self._flush)
        return await future

    async def close(self) -> None:
        """Cancel requests in flight; their callers are cancelled too."""
        self._flush()
        running = dict(self._running)
        for task, batch in running.items():
            task.cancel()
            for _, future in batch:
                future.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(item, future) for item, future in self._waiting if not future.done()]
        self._waiting.clear()
        if batch:
            task = asyncio.get_running_loop().create_task(self._run(batch))
            self._running[task] = batch
            task.add_done_callback(lambda done: self._running.pop(done, None))

    async def _run(self, batch: list[tuple[Item, "asyncio.Future[Answer]"]]) -> None:
        try:
            answers = await self._send([item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        except BadReply as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:
                await asyncio.gather(*(self._run_alone(item, future) for item, future in batch))
        except Exception as error:  # raised in every caller, which handles it
            _fail(batch, error)

    async def _run_alone(self, item: Item, future: "asyncio.Future[Answer]") -> None:
        try:
            answer = await self._send_alone(item)
        except Exception as error:
            _fail([(item, future)], error)
        else:
            if not future.done():
                future.set_result(answer)


def _parse(content: bytes, reply: TypeAdapter[Answer]) -> Answer:
    try:
        return reply.validate_json(encodable_json(content))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise RequestFailed(
            f"answered status 200 {quote(content)}: {where + ': ' if where else ''}{problem['msg']}",
            is_transient=problem["type"] == "json_invalid",
            has_answered=True,
        ) from error


def _fail(batch: Sequence[tuple[object, "asyncio.Future[Any]"]], error: Exception) -> None:
    """Fail each caller with a separate exception: a shared one would collect all their tracebacks."""
    for _, future in batch:
        if not future.done():
            own = type(error)(*error.args) if isinstance(error, ToolError) else error
            own.__cause__ = error.__cause__
            future.set_exception(own)


async def wait_for_service(url: str, *, wait_s: float) -> None:
    """Wait until an HTTP server replies at `url`. Raises `ConfigError` after `wait_s`."""
    deadline = time.monotonic() + wait_s
    try:
        client = HttpClient(url, HttpSection(timeout_s=START_TRY_TIMEOUT_S))
    except ValueError as error:
        raise ConfigError(f"tools.url: {error}") from error
    try:
        while True:
            try:
                return await client.check_health()
            except RequestFailed as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"tools.url: nothing answers at {url!r} after {wait_s:g} s ({error}); start"
                        " the service, or correct the address"
                    ) from error
            await asyncio.sleep(START_RETRY_S)
    finally:
        await client.close()
