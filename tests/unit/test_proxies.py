"""Proxies of the environment: our own addresses are called directly, others as the variables say."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from raylearner import network
from raylearner.actors.proxy.chat_server import ChatServer
from raylearner.actors.proxy.program import CommandProgram, Task
from raylearner.config.rewards import Judge
from raylearner.config.section import HttpSection
from raylearner.errors import ConfigError
from raylearner.http_client import HttpClient, RequestFailed
from raylearner.rewards.endpoint import Endpoint
from raylearner.types import Prompt

DEAD = "http://127.0.0.1:9"
VARIABLES = [
    f"{kind}_{word}" for kind in ("http", "https", "all", "no") for word in ("proxy", "PROXY")
]
REPLY = b'{"choices":[{"message":{"content":"fine"}}]}'


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        for spelling in (name.lower(), name.upper()):
            monkeypatch.setenv(spelling, "")  # so that it is put back
            monkeypatch.delenv(spelling)


def use(monkeypatch: pytest.MonkeyPatch, proxy: str, **more: str) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name, value in more.items():
        monkeypatch.setenv(name, value)


@asynccontextmanager
async def serving(
    seen: list[str], *, tls: ssl.SSLContext | None = None, status: str = "200 OK"
) -> AsyncIterator[int]:
    """A server that answers every request alike; for CONNECT it becomes a tunnel to itself."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                lines = [
                    line for line in head.split("\r\n") if line.lower().startswith("proxy-auth")
                ]
                seen.append(" | ".join([head.split("\r\n")[0], *lines]))
                if head.startswith("CONNECT"):
                    writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
                    await writer.drain()
                    if status.startswith("200"):
                        await writer.start_tls(tls_inside)
                    continue
                length = next(
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                )
                await reader.readexactly(length)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(REPLY), REPLY)
                )
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass
        finally:
            writer.close()

    tls_inside = tls or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.8.9.1", "[::1]", "0.0.0.0", "a.localhost"],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_loopback_is_always_direct(monkeypatch: pytest.MonkeyPatch, host: str, scheme: str) -> None:
    use(monkeypatch, DEAD, all_proxy=DEAD)
    assert network.proxy_of(f"{scheme}://{host}:8000/v1") is None


def test_this_machine_is_direct_by_name_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, DEAD)
    assert network.proxy_of(f"http://{socket.gethostname()}:8000") is None
    for address in network.own_addresses():
        host = f"[{address}]" if ":" in address else address
        assert network.proxy_of(f"http://{host}:8000") is None


def test_others_follow_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:p%40ss@one.example:3128")
    monkeypatch.setenv("ALL_PROXY", "two.example:81")
    monkeypatch.setenv("no_proxy", "inside.example, 10.1.0.0/16 , .corp")
    one, two = network.proxy_of("http://judge.example"), network.proxy_of("https://judge.example")
    assert one is not None
    assert (one.host, one.port, one.authorization) == (
        "one.example",
        3128,
        "Basic dXNlcjpwQHNz",
    )
    assert "p%40ss" not in f"{one} {one!r}"
    assert str(two) == "http://two.example:81"
    for host in ("inside.example", "a.inside.example", "10.1.2.3", "x.corp"):
        assert network.proxy_of(f"http://{host}/v1") is None
    assert network.proxy_of("http://10.2.0.1/v1") is not None
    monkeypatch.setenv("no_proxy", "*")
    assert network.proxy_of("http://judge.example") is None


def test_what_is_kept_direct_is_added_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, DEAD, NO_PROXY="inside.example")
    network.keep_direct("node-7")
    entries = os.environ["no_proxy"].split(",")
    assert {"inside.example", "localhost", "127.0.0.1", "::1", "node-7"} <= set(entries)
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
    assert network.proxy_of("http://node-7:8000") is None
    network.keep_direct("node-7")
    assert os.environ["no_proxy"].split(",") == entries
    httpx.Client().close()  # reads every entry
    assert network.direct({"no_proxy": "*"})["no_proxy"] == "*"


async def test_a_judge_and_a_tool_service_outside_are_called_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    async with serving(seen) as port:
        use(monkeypatch, f"http://user:word@127.0.0.1:{port}")
        endpoint = judge("http://judge.example/v1")
        assert await endpoint.ask("x", str) == "fine"
        await endpoint.close()
        client = connect("http://tool.example:81/base")
        assert await client.post("/x", b"{}", bytes) == REPLY
        await client.close()
    key = "Proxy-Authorization: Basic dXNlcjp3b3Jk"
    assert seen == [
        f"POST http://judge.example/v1/chat/completions HTTP/1.1 | {key}",
        f"POST http://tool.example:81/base/x HTTP/1.1 | {key}",
    ]


async def test_own_services_are_called_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, DEAD)
    seen: list[str] = []
    async with serving(seen) as port:
        endpoint = judge(f"http://127.0.0.1:{port}/v1")
        assert await endpoint.ask("x", str) == "fine"
        await endpoint.close()
        client = connect(f"http://localhost:{port}")
        assert await client.post("/x", b"{}", bytes) == REPLY
        await client.close()
    assert seen == ["POST /v1/chat/completions HTTP/1.1", "POST /x HTTP/1.1"]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """Certificate and key of tool.example."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=tool.example"),
            *("-addext", "subjectAltName=DNS:tool.example"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_https_goes_through_a_tunnel(
    monkeypatch: pytest.MonkeyPatch, certificate: tuple[str, str]
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    seen: list[str] = []
    async with serving(seen, tls=tls) as port:
        use(monkeypatch, f"http://127.0.0.1:{port}")
        client = connect("https://tool.example")
        for _ in range(2):
            assert await client.post("/x", b"{}", bytes) == REPLY
        await client.close()
    assert seen == ["CONNECT tool.example:443 HTTP/1.1", *["POST /x HTTP/1.1"] * 2]


async def test_a_proxy_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving([], status="407 no") as port:
        use(monkeypatch, f"http://user:word@127.0.0.1:{port}")
        client = connect("https://tool.example")
        with pytest.raises(RequestFailed, match="407") as caught:
            await client.post("/x", b"", bytes)
        await client.close()
        assert f"http://127.0.0.1:{port}" in str(caught.value)
        assert "word" not in str(caught.value)


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(ValueError, match="socks5"):
        connect("http://tool.example")
    with pytest.raises(ConfigError, match="socks5"):
        judge("http://judge.example/v1")
    connect("http://127.0.0.1:1")


async def test_programs_reach_the_endpoint_of_their_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, DEAD, all_proxy=DEAD, no_proxy="other.example")
    code = (
        "import os, urllib.request as r;"
        "print(r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/models', headers={"
        "'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})).status)"
    )
    server = ChatServer.start()
    try:
        with server.session(object()) as key:  # pyright: ignore[reportArgumentType]
            task = Task(
                prompt=Prompt(prompt_id="p", messages=()), base_url=server.base_url, api_key=key
            )
            program = CommandProgram([sys.executable, "-c", code], answers_on_stdout=True)
            assert await program.run(task) == "200"
            async with httpx.AsyncClient() as client:  # as a function in this process
                reply = await client.get(
                    f"{server.base_url}/models", headers={"Authorization": f"Bearer {key}"}
                )
            assert reply.status_code == 200
    finally:
        await server.close()


def connect(url: str) -> HttpClient:
    return HttpClient(url, HttpSection(retries=0, timeout_s=5, max_reply_bytes=99))


def judge(url: str) -> Endpoint:
    return Endpoint(
        Judge(kind="judge", url=url, model="m", http=HttpSection(retries=0, timeout_s=5))
    )
