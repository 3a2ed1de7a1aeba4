"""The HTTP client of tools and judges: requests limited in time, size and number, retried by one policy.

External services may be called through a proxy, see `raylearner.network`. No cookies and no content
encodings: a reply's size limit holds for the bytes that are parsed. No redirects: what is sent, and the
keys with it, go to the configured address alone.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from raylearner.config.section import HttpSection
from raylearner.network import proxy_of

RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""Statuses that are retried, besides all from 500 on."""
SHOWN_CHARACTERS = 200
"""Characters of a bad reply that an error quotes."""
MAX_HEALTH_BYTES = 1 << 16
HEADERS = {
    "User-Agent": "raylearner",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}
PROXY_AUTHORIZATION = "Proxy-Authorization"

Answer = TypeVar("Answer")


class RequestFailed(Exception):
    """A request finally failed: `POST <url>`, the reason and the number of tries."""

    def __init__(
        self,
        reason: str,
        *,
        is_transient: bool = True,
        has_answered: bool = False,
        status: int | None = None,
        content: bytes = b"",
    ) -> None:
        """`has_answered` is set if a reply arrived; `status` and `content` are those of a refusal."""
        super().__init__(reason)
        self.is_transient = is_transient
        self.has_answered = has_answered
        self.status = status
        self.content = content
        self.request = ""
        self.num_tries = 1

    def __str__(self) -> str:
        tries = f" ({self.num_tries} tries)" if self.num_tries > 1 else ""
        return f"{self.request} {self.args[0]}{tries}"


class HttpClient:
    """Client of one service. Opens connections as requests need them and keeps them until `close`.

    Waits for a place among the concurrent requests, then for the service, never longer than the
    section allows.
    """

    def __init__(
        self,
        url: str,
        section: HttpSection,
        *,
        on_retry: Callable[[], object] = lambda: None,
    ) -> None:
        """Raises `ValueError` unless `url` is http or https with a host, and its proxy an HTTP proxy."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(f"{url!r} is not an address; expected http://host:port")
        _ = parts.port  # raises for one that is not a number
        self._base = url.rstrip("/")
        self._section = section
        self._on_retry = on_retry
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else True
        self._proxy = proxy_of(url)
        self._headers, self._proxy_headers = dict(HEADERS), dict[str, str]()
        if self._proxy is not None and self._proxy.authorization is not None:
            is_tunnel = parts.scheme == "https"  # only the proxy reads these headers
            headers = self._proxy_headers if is_tunnel else self._headers
            headers[PROXY_AUTHORIZATION] = self._proxy.authorization
        self._places = asyncio.Semaphore(section.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self,
        path: str,
        body: bytes,
        parse: Callable[[bytes], Answer],
        *,
        headers: Mapping[str, str] | None = None,
        should_retry: bool = True,
    ) -> Answer:
        """Return the result of `parse` on the reply's content.

        Transport errors, statuses from 500 on, 408, 409, 425 and 429 are retried, and so is a
        transient `RequestFailed` of `parse`. Raises `RequestFailed` after the last try.
        """
        section = self._section
        num_tries = section.retries + 1 if should_retry else 1
        delay_s = section.retry_delay_s
        for number in range(1, num_tries + 1):
            try:
                async with self._places:
                    content = await self._request("POST", path, body, headers)
                return parse(content)
            except RequestFailed as failure:
                if number == num_tries or not failure.is_transient:
                    failure.request, failure.num_tries = f"POST {self._base}{path}", number
                    raise
            self._on_retry()
            await asyncio.sleep(delay_s)
            delay_s *= section.retry_backoff
        raise AssertionError("at least one try")

    async def check_health(self) -> None:
        """Raises `RequestFailed` unless `GET /health` is answered, with any status."""
        try:
            await self._request("GET", "/health", b"", None)
        except RequestFailed as failure:
            if not failure.has_answered:
                failure.request = f"GET {self._base}/health"
                raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None
    ) -> bytes:
        section = self._section
        try:
            async with asyncio.timeout(section.timeout_s):
                try:
                    status, content = await self._exchange(method, path, body, headers)
                except aiohttp.ServerDisconnectedError:  # as it may with one that was idle
                    status, content = await self._exchange(method, path, body, headers)
        except TimeoutError as error:
            raise RequestFailed(f"gave no reply within {section.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise RequestFailed(f"failed: {reason[:SHOWN_CHARACTERS]}") from error
        if not 200 <= status < 300:
            raise RequestFailed(
                f"answered status {status} {quote(content)}",
                is_transient=status >= 500 or status in RETRIED_STATUSES,
                has_answered=True,
                status=status,
                content=content,
            )
        return content

    async def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
            )
        async with self._session.request(
            method,
            f"{self._base}{path}",
            data=body,
            headers=headers,
            proxy=None if self._proxy is None else str(self._proxy),
            proxy_headers=self._proxy_headers,
            allow_redirects=False,
        ) as response:
            if 300 <= response.status < 400:
                response.close()
                target = response.headers.get("Location", "")[:SHOWN_CHARACTERS]
                raise RequestFailed(
                    f"returned status {response.status}, a redirect to {target!r}; redirects are not"
                    " followed: correct the url",
                    is_transient=False,
                    has_answered=True,
                    status=response.status,
                )
            coding = response.headers.get("Transfer-Encoding", "chunked")
            if coding.lower() != "chunked":
                response.close()
                raise RequestFailed(f"replied in the transfer encoding {coding[:40]!r}")
            most = self._section.max_reply_bytes
            length = response.content_length
            content = bytearray()
            if length is None or length <= most:
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > most:
                        break
                else:
                    return response.status, bytes(content)
            response.close()
            raise RequestFailed(
                f"sent more than {most} bytes", is_transient=False, has_answered=True
            )


def quote(content: bytes) -> str:
    """Return the start of a reply for an error message."""
    text = content[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")
