"""How tools talk to services: pooled connections, bounded calls, retries, batches, metrics.

Waits for: a place among the tool's concurrent requests, then the service, never longer than the
section allows.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from raylearner import strict_json
from raylearner.config.environment import HttpSection
from raylearner.errors import ConfigError, ToolError
from raylearner.text import encodable_json
from raylearner.tools.connection import BadHttp, Connections, TooLong
from raylearner.tools.protocol import BadArguments

SHOWN_CHARACTERS = 200
"""Characters of a bad reply that an error quotes."""
MAX_LATENCIES = 4096
START_TRY_TIMEOUT_S, START_RETRY_S = 5.0, 0.5
MAX_HEALTH_BYTES = 1 << 16
RETRIED_STATUSES = frozenset({408, 425, 429})

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class BadReply(ToolError):
    """The service answered, and not with what was expected."""


class ToolMetrics:
    """Counts and latency quantiles of one tool, drained once a learner step."""

    def __init__(self, name: str, *, own: Sequence[str] = ()) -> None:
        """`own` is what this tool counts besides."""
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
        """How many there are now since the last drain."""
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


class Service:
    """One tool's client of one service; promises a JSON value or a `ToolError`, in bounded time.

    Transport errors, statuses 5xx, 408, 425 and 429, and replies that are no JSON are tried again;
    other statuses and replies that are too long are not. Owns its connections until `close`.
    """

    def __init__(self, name: str, url: str, section: HttpSection, metrics: ToolMetrics) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._section = section
        self._metrics = metrics
        self._places = asyncio.Semaphore(section.max_concurrent)
        try:
            self._connections = Connections(url)
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
        """The reply to `body`, validated; `expected` is its form in words, for the error."""
        url = f"{self._url}{path}"
        payload = strict_json.dumps(body).encode()
        num_tries = self._section.retries + 1 if should_retry else 1
        delay_s = self._section.retry_delay_s
        for number in range(1, num_tries + 1):
            try:
                async with self._places:
                    content = await self._try(path, payload)
                return _parsed(content, reply)
            except _Failure as failure:
                if number == num_tries or not failure.is_transient:
                    tries = f" ({number} tries)" if number > 1 else ""
                    kind = BadReply if failure.has_answered else ToolError
                    raise kind(
                        f"{self._name}: POST {url} {failure}{tries}; expected {expected}"
                    ) from failure.__cause__
            self._metrics.count_retry()
            await asyncio.sleep(delay_s)
            delay_s *= self._section.retry_backoff
        raise AssertionError("at least one try")

    def matched(
        self, path: str, answers: list[Answer], questions: Sequence[object]
    ) -> list[Answer]:
        """`answers` as they are. Raises `BadReply` unless there is one for each question."""
        if len(answers) != len(questions):
            raise BadReply(
                f"{self._name}: POST {self._url}{path} answered status 200 with {len(answers)}"
                f" answers; expected {len(questions)}, one for each question"
            )
        return answers

    async def close(self) -> None:
        self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _try(self, path: str, payload: bytes) -> bytes:
        most = self._section.max_reply_bytes
        try:
            async with asyncio.timeout(self._section.timeout_s):
                reply = await self._connections.request("POST", path, payload, max_bytes=most)
        except TimeoutError as error:
            raise _Failure(f"gave no reply within {self._section.timeout_s:g} s") from error
        except TooLong as error:
            raise _Failure(
                f"answered more than {most} bytes", is_transient=False, has_answered=True
            ) from error
        except (BadHttp, OSError) as error:
            said = str(error) or type(error).__name__
            raise _Failure(f"failed: {said[:SHOWN_CHARACTERS]}") from error
        if not 200 <= reply.status < 300:
            is_transient = reply.status >= 500 or reply.status in RETRIED_STATUSES
            raise _Failure(
                f"answered status {reply.status} {_shown(reply.content)}",
                is_transient=is_transient,
                has_answered=True,
            )
        return reply.content


class Batcher(Generic[Item, Answer]):
    """Joins calls that come within `window_s` of each other into one, answers each its own.

    A batch that the service answers badly is sent again one by one, once, so that one odd item does
    not fail the others. A caller that gives up leaves the others' batch alone.
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
        """Cancels what is in flight; callers see the cancellation."""
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
        except Exception as error:  # reaches every caller, who is the boundary
            _fail(batch, error)

    async def _run_alone(self, item: Item, future: "asyncio.Future[Answer]") -> None:
        try:
            answer = await self._send_alone(item)
        except Exception as error:
            _fail([(item, future)], error)
        else:
            if not future.done():
                future.set_result(answer)


class _Failure(Exception):
    """One try failed."""

    def __init__(self, text: str, *, is_transient: bool = True, has_answered: bool = False) -> None:
        super().__init__(text)
        self.is_transient = is_transient
        self.has_answered = has_answered


def _parsed(content: bytes, reply: TypeAdapter[Answer]) -> Answer:
    try:
        return reply.validate_json(encodable_json(content))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise _Failure(
            f"answered status 200 {_shown(content)}: {where + ': ' if where else ''}{problem['msg']}",
            is_transient=problem["type"] == "json_invalid",
            has_answered=True,
        ) from error


def _fail(batch: Sequence[tuple[object, "asyncio.Future[Any]"]], error: Exception) -> None:
    """Each caller gets an exception of its own: a shared one would gather all their tracebacks."""
    for _, future in batch:
        if not future.done():
            own = type(error)(*error.args) if isinstance(error, ToolError) else error
            own.__cause__ = error.__cause__
            future.set_exception(own)


def _shown(content: bytes) -> str:
    text = content[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


async def wait_for_service(url: str, *, wait_s: float) -> None:
    """Until something speaks HTTP at `url`, whatever it says. Raises `ConfigError` after `wait_s`."""
    deadline = time.monotonic() + wait_s
    try:
        connections = Connections(url)
    except ValueError as error:
        raise ConfigError(f"tools.url: {error}") from error
    while True:
        try:
            async with asyncio.timeout(START_TRY_TIMEOUT_S):
                await connections.request("GET", "/health", b"", max_bytes=MAX_HEALTH_BYTES)
            connections.close()
            return
        except TooLong:
            return
        except (BadHttp, OSError) as error:
            if time.monotonic() >= deadline:
                said = str(error) or type(error).__name__
                raise ConfigError(
                    f"tools.url: nothing answers at {url!r} after {wait_s:g} s ({said}); start"
                    " the service, or correct the address"
                ) from error
        await asyncio.sleep(START_RETRY_S)


async def timed(call: Awaitable[Answer], metrics: ToolMetrics) -> Answer:
    """The answer of `call`, counted. Wrong arguments of the policy are neither an error of the tool nor
    part of its latency."""
    started = time.monotonic()
    try:
        answer = await call
    except BadArguments:
        metrics.count("calls")
        raise
    except BaseException:
        metrics.count_call(latency_s=time.monotonic() - started, is_error=True)
        raise
    metrics.count_call(latency_s=time.monotonic() - started, is_error=False)
    return answer
