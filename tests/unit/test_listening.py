"""Who is answered by servers of ours, and how much they read."""

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request
from run_directories import make_record, write_run
from servers import served

from raylearner.actors.proxy.chat_server import ChatServer
from raylearner.listening import Guard, Hosts
from raylearner.observability.viewer.app import make_app as viewer_app
from raylearner.observability.viewer.runs import Library
from raylearner.services.server import make_app

LIMIT = 1000
NOBODY: Any = object()
"""A session that no call reaches."""


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("127.0.0.1", "localhost", None),
        ("127.0.0.1", "LocalHost.:8000", None),
        ("127.0.0.1", "127.0.0.1:1", None),
        ("127.0.0.1", "[::1]:1", None),
        ("127.0.0.1", "evil.example", 421),
        ("127.0.0.1", "localhost.evil.example:80", 421),
        ("127.0.0.1", "127.0.0.1.evil.example", 421),
        ("127.0.0.1", "127.0.0.1@evil.example", 421),
        ("127.0.0.1", "evil.example:127.0.0.1", 421),
        ("127.0.0.1", "10.0.0.7", 421),
        ("127.0.0.1", "", 421),
        ("127.0.0.1", "[", 421),
        ("0.0.0.0", "10.0.0.7:80", None),
        ("0.0.0.0", "evil.example", 421),
        ("0.0.0.0", "named.example", None),
        ("10.0.0.7", "10.0.0.7:80", None),
        ("::", "[fe80::1]:80", None),
    ],
)
def test_a_request_must_name_a_host_that_the_server_knows(
    bound: str, host: str, status: int | None
) -> None:
    refusal = Hosts.of(bound, ["named.example"]).refusal([host], None)
    assert (refusal and refusal[0]) == status


@pytest.mark.parametrize(
    ("hosts", "origin", "status"),
    [
        (["localhost:1"], "http://localhost:1", None),
        (["localhost:1"], "http://localhost:2", 403),
        (["localhost:1"], "https://evil.example", 403),
        (["localhost:1"], "null", 403),
        (["localhost", "evil.example"], None, 421),
        ([], None, 421),
    ],
)
def test_foreign_pages_and_ambiguous_hosts_are_refused(
    hosts: list[str], origin: str | None, status: int | None
) -> None:
    refusal = Hosts.of("127.0.0.1").refusal(hosts, origin)
    assert (refusal and refusal[0]) == status


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    app = make_app("test")

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    guard = Guard(app=app, hosts=Hosts.of("127.0.0.1"), max_body_bytes=LIMIT, body_timeout_s=0.3)
    with served(guard) as url:
        yield url.removeprefix("http://")


def ask(
    address: str, method: str = "GET", path: str = "/health", body: Any = None, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given, encode_chunked=not isinstance(body, bytes))
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_a_guarded_service_answers_only_its_own_clients(guarded: str) -> None:
    assert ask(guarded)[0] == 200
    assert ask(guarded, Host="evil.example")[0] == 421
    assert ask(guarded, Origin="http://evil.example")[0] == 403
    assert ask(guarded, Origin=f"http://{guarded}")[0] == 200


def test_body_size_is_limited_with_and_without_chunks(guarded: str) -> None:
    assert ask(guarded, "POST", "/size", b"x" * LIMIT) == (200, b"1000")
    assert ask(guarded, "POST", "/size", b"x" * (LIMIT + 1))[0] == 413
    assert (
        ask(guarded, "POST", "/size", iter([b"x" * LIMIT]), Transfer_Encoding="chunked")[0] == 200
    )
    many = iter([b"x" * 100] * 11)
    assert ask(guarded, "POST", "/size", many, Transfer_Encoding="chunked")[0] == 413
    assert ask(guarded)[0] == 200


def test_a_body_that_does_not_arrive_times_out(guarded: str) -> None:
    connection = http.client.HTTPConnection(guarded, timeout=10)
    connection.putrequest("POST", "/size")
    connection.putheader("Content-Length", "10")
    connection.endheaders(b"x")
    assert connection.getresponse().status == 408
    connection.close()


def test_the_viewer_refuses_other_hosts_and_paths(tmp_path: Path) -> None:
    (tmp_path / "secret.html").write_text("a secret")
    write_run(tmp_path / "run", steps={1: [make_record()]})
    with served(viewer_app(Library([tmp_path]))) as url:
        address = url.removeprefix("http://")
        assert ask(address, Host="evil.example")[0] == 421
        assert ask(address, Origin="http://evil.example")[0] == 403
        assert ask(address, path="/")[0] == 200
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall(b"GET /static/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ask(address, path="/")[0] == 200
        files = (
            "/secret.html",
            "/../secret.html",
            "//secret.html",
            "/static/../secret.html",
            "/%00",
        )
        runs = ("/api/run?run=../secret", "/api/run?run=%2e%2e", "/api/run?run=.", "/api/run?run=")
        image = "/api/image?run=run&name=..%2f..%2fsecret.html"
        for path in (*files, *runs, image):
            status, body = ask(address, path=path)
            assert status == 404, path
            assert b"a secret" not in body


@asynccontextmanager
async def chat_server() -> AsyncIterator[tuple[ChatServer, str]]:
    server = ChatServer.start()
    try:
        yield server, server.base_url.removeprefix("http://").removesuffix("/v1")
    finally:
        await server.close()


async def test_the_proxy_accepts_only_known_hosts_and_valid_keys() -> None:
    async with chat_server() as (server, address):

        async def status(key: str, **headers: str) -> int:
            given = {"Authorization": f"Bearer {key}", **headers}
            return (await asyncio.to_thread(ask, address, "GET", "/v1/models", **given))[0]

        with server.session(NOBODY) as key, server.session(NOBODY) as other:
            assert await status(key) == await status(other, Host="localhost") == 200
            assert await status(key, Host="evil.example") == 421
            assert await status(key, Origin="http://evil.example") == 403
            assert await status(key[:-1]) == await status(key + "x") == await status("") == 401
            assert key not in str(vars(server))
        assert await status(key) == await status(other) == 401


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"messages": [{"role": "user", "content": "x"}] * 200_000}).encode(),
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "f", "arguments": "[" * 50_000 + "]" * 50_000},
                            }
                        ],
                    },
                ]
            }
        ).encode(),
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1' + b"0" * 10_000 + b"}",
    ],
    ids=["many messages", "not closed", "nested", "nested arguments", "long number"],
)
async def test_the_proxy_refuses_malicious_bodies(body: bytes) -> None:
    async with chat_server() as (server, address):
        with server.session(NOBODY) as key:
            headers = {"Authorization": f"Bearer {key}"}
            path = "/v1/chat/completions"
            status, _ = await asyncio.to_thread(ask, address, "POST", path, body, **headers)
    assert status == 400
