"""What every server of ours checks before it answers.

A server listens on this machine alone unless its user says otherwise. That keeps other machines out, but
not web pages in a browser here: a page can send requests to any port of this machine, and reads the
answers once its own name resolves to 127.0.0.1. So a request must name a host that the server knows, and
a page that is not the server's own is refused. Bodies are bounded in size and in time.
"""

import asyncio
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from raylearner.network import LOOPBACK, own_addresses

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
"""Maximum time for a request's body to arrive."""
UNKNOWN_HOST, FOREIGN_PAGE, TOO_SLOW, TOO_LARGE = 421, 403, 408, 413

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names by which requests may call a server."""

    names: frozenset[str]
    accepts_addresses: bool
    """Whether any address in numbers is accepted: no name is behind it that could be made to resolve to us."""

    @classmethod
    def of(cls, bound: str, extra: Iterable[str] = ()) -> "Hosts":
        """Return the hosts of a server bound to the address `bound`."""
        is_local = bound in LOOPBACK
        names = [*LOOPBACK, bound, *extra, *(() if is_local else own_addresses())]
        return cls(frozenset(name.lower() for name in names), accepts_addresses=not is_local)

    def refusal(self, hosts: list[str], origin: str | None) -> tuple[int, str] | None:
        """Return status and reason to refuse a request with these headers, or None."""
        if len(hosts) != 1 or not self._has(_name(hosts[0])):
            named = repr(hosts[0][:80]) if hosts else "no host"
            return (
                UNKNOWN_HOST,
                f"the Host header names {named}, which is not a name of this server",
            )
        if origin is not None and urlsplit(origin).netloc.lower() != hosts[0].strip().lower():
            return FOREIGN_PAGE, "requests from other web pages are refused"
        return None

    def _has(self, name: str) -> bool:
        return name in self.names or (self.accepts_addresses and _is_address(name))


def _name(header: str) -> str:
    """Return the host of a Host header in lower case; empty if it has none."""
    try:
        return (urlsplit(f"//{header.strip()}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(slots=True, kw_only=True)
class Guard:
    """Wraps an ASGI application: refuses by `hosts`, and bounds the bodies that it reads."""

    app: App
    hosts: Hosts
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = BODY_TIMEOUT_S

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close"})
        found = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        given = dict(found)
        refusal = self.hosts.refusal([v for n, v in found if n == b"host"], given.get(b"origin"))
        length = given.get(b"content-length", "")
        if refusal is None and length.isdecimal() and int(length) > self.max_body_bytes:
            refusal = self._too_large()
        if refusal is not None:
            return await _answer(send, *refusal)
        request = _Request(guard=self, receive=receive, send=send)
        try:
            await self.app(scope, request.read, request.write)
        except Exception:
            if not request.is_refused:
                raise

    def _too_large(self) -> tuple[int, str]:
        return TOO_LARGE, f"the body has more than {self.max_body_bytes} bytes"


@dataclass(slots=True, kw_only=True)
class _Request:
    """Counts one body while the application reads it. One that is refused looks like a client that left."""

    guard: Guard
    receive: Receive
    send: Send
    num_bytes: int = 0
    is_complete: bool = False
    is_refused: bool = False
    _deadline: float | None = field(default=None)

    async def read(self) -> Message:
        if self.is_refused:
            return {"type": "http.disconnect"}
        if self.is_complete:
            return await self.receive()
        now = time.monotonic()
        self._deadline = self._deadline or now + self.guard.body_timeout_s
        try:
            async with asyncio.timeout(self._deadline - now):
                message = await self.receive()
        except TimeoutError:
            limit_s = self.guard.body_timeout_s
            return await self._refuse(TOO_SLOW, f"the body did not arrive within {limit_s:g} s")
        self.num_bytes += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        if self.num_bytes > self.guard.max_body_bytes:
            return await self._refuse(*self.guard._too_large())
        return message

    async def write(self, message: Message) -> None:
        if not self.is_refused:
            await self.send(message)

    async def _refuse(self, status: int, reason: str) -> Message:
        self.is_refused = True
        await _answer(self.send, status, reason)
        return {"type": "http.disconnect"}


async def _answer(send: Send, status: int, reason: str) -> None:
    """Answer in the form of the OpenAI API, with a header that stops its clients from retrying."""
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": str(status)}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-should-retry", b"false"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
