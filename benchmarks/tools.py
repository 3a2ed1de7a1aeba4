# ruff: noqa: T201
"""Measure calls of a service through the search tool: 1,000 episodes at once, a service of 50 ms.

    python benchmarks/tools.py

Processes that share the machine: the service (it waits 50 ms and answers three passages), a plain
client outside our pool that measures what the service alone sustains (raw sockets, no HTTP library,
no JSON), and the episodes, each of which calls the search tool in a loop without a pause. The
service is a FastAPI application, as retrievers usually are; `--service bare` is one that costs next
to nothing, so that the ceiling of the client shows. Exit code 1 when the episodes sustain less than
90% of the service alone.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from raylearner.config.environment import SearchTool
from raylearner.config.section import HttpSection
from raylearner.tools.search import Search
from raylearner.types import Prompt

LATENCY_S = 0.05
WARM_UP_S = 1.0
PASSAGE = "title\n" + "some words of a passage " * 20
REPLIES = {
    b"/search": json.dumps([{"contents": PASSAGE}] * 3).encode(),
    b"/retrieve": b"",
}
PROMPT = Prompt(prompt_id="p", messages=())


def serve_fastapi(port_of: Connection) -> None:
    """The service that deployments have."""
    import socket

    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/search")
    async def search(body: dict[str, Any]) -> list[dict[str, str]]:
        await asyncio.sleep(LATENCY_S)
        return [{"contents": PASSAGE}] * body["top_n"]

    @app.post("/retrieve")
    async def retrieve(body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(LATENCY_S)
        row = [{"document": {"contents": PASSAGE}, "score": 1.0}] * body["topk"]
        return {"result": [row] * len(body["queries"])}

    _allow_many_files()
    bound = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port_of.send(bound.getsockname()[1])
    config = uvicorn.Config(app, log_level="warning", access_log=False, backlog=4096)
    uvicorn.Server(config).run(sockets=[bound])


def serve_bare(port_of: Connection) -> None:
    """The service: as little Python as an HTTP server can be, so that it is not what is measured."""

    class Protocol(asyncio.Protocol):
        def __init__(self) -> None:
            self.held = b""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.held += data
            head, found, rest = self.held.partition(b"\r\n\r\n")
            if not found:
                return
            place = head.lower().index(b"content-length:") + 15
            length = int(head[place : (head + b"\r").index(b"\r", place)])
            if len(rest) < length:
                return
            self.held = rest[length:]
            path = head.split(b" ", 2)[1]
            asyncio.get_running_loop().call_later(LATENCY_S, self.answer, path, rest[:length])

        def answer(self, path: bytes, body: bytes) -> None:
            reply = REPLIES[path]
            if path == b"/retrieve":
                row = [{"document": {"contents": PASSAGE}, "score": 1.0}] * 3
                reply = json.dumps({"result": [row] * len(json.loads(body)["queries"])}).encode()
            if not self.transport.is_closing():
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                self.transport.write(head % len(reply) + reply)  # type: ignore[attr-defined]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Protocol, "127.0.0.1", 0, backlog=4096)
        port_of.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    _allow_many_files()
    asyncio.run(main())


def measure_alone(
    port: int, num_episodes: int, seconds: float, think_s: float, out: Connection
) -> None:
    """The plain client: the same load, one raw connection for each episode."""
    body = json.dumps({"query": "what is it", "top_n": 3}).encode()
    request = (
        b"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body

    async def main() -> None:
        async def connect() -> Callable[[], Awaitable[None]]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            async def call() -> None:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                place = head.lower().index(b"content-length: ") + 16
                await reader.readexactly(int(head[place : head.index(b"\r", place)]))

            return call

        calls = await asyncio.gather(*(connect() for _ in range(num_episodes)))
        out.send(await rate(calls, seconds, think_s))

    _allow_many_files()
    asyncio.run(main())


def measure_tool(
    port: int, num_episodes: int, seconds: float, think_s: float, form: str, out: Connection
) -> None:
    """The episodes: one tool for all of them, as in a rollout actor."""

    async def main() -> None:
        section = {
            "kind": "search",
            "url": f"http://127.0.0.1:{port}",
            "form": form,
            "on_failure": "fail",
            "http": HttpSection(max_concurrent=num_episodes),
        }
        tool = Search(SearchTool.model_validate(section))

        async def call() -> None:
            observation = await tool.call("what is it", prompt=PROMPT)
            assert not observation.is_error, observation

        measured = await rate([call] * num_episodes, seconds, think_s)
        metrics = tool.drain_metrics()
        assert metrics["tools/search/errors"] == 0, metrics
        measured["p50_s"] = metrics["tools/search/latency_s/p50"]
        measured["p99_s"] = metrics["tools/search/latency_s/p99"]
        await tool.close()
        out.send(measured)

    _allow_many_files()
    asyncio.run(main())


async def rate(
    calls: list[Callable[[], Awaitable[None]]], seconds: float, think_s: float
) -> dict[str, float]:
    """Calls per second once warm, and CPU time per call of this process."""
    num_done = 0
    is_over = False

    async def episode(call: Callable[[], Awaitable[None]]) -> None:
        nonlocal num_done
        while not is_over:
            await call()
            num_done += 1
            if think_s:
                await asyncio.sleep(think_s)

    episodes = [asyncio.ensure_future(episode(call)) for call in calls]
    await asyncio.sleep(WARM_UP_S)
    first, cpu, started = num_done, time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    count, took_s = num_done - first, time.perf_counter() - started
    cpu_s = time.process_time() - cpu
    is_over = True
    await asyncio.gather(*episodes)
    return {"calls_per_s": count / took_s, "cpu_us": cpu_s / max(1, count) * 1e6}


def in_process(target: Callable[..., None], *arguments: Any) -> dict[str, float]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=target, args=(*arguments, sender))
    process.start()
    measured = receiver.recv()
    process.join()
    return measured


def _allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


SERVICES = {"fastapi": serve_fastapi, "bare": serve_bare}


def main() -> int:
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--episodes", type=int, default=1000)
    command.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    command.add_argument("--think-s", type=float, default=0.0, help="between an episode's calls")
    command.add_argument("--service", choices=sorted(SERVICES), default="fastapi")
    command.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    options = command.parse_args()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    service = multiprocessing.Process(target=SERVICES[options.service], args=(sender,), daemon=True)
    service.start()
    port = receiver.recv()
    load = (port, options.episodes, options.seconds, options.think_s)
    results: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for name, measured in (
            ("plain client", in_process(measure_alone, *load)),
            ("search tool", in_process(measure_tool, *load, "search")),
            ("search tool, batched", in_process(measure_tool, *load, "retrieve")),
        ):
            if measured["calls_per_s"] > results.get(name, {"calls_per_s": 0.0})["calls_per_s"]:
                results[name] = measured
    service.terminate()
    alone = results["plain client"]
    ceiling = options.episodes / (LATENCY_S + options.think_s)
    print(
        f"service {options.service}, {options.episodes} episodes, {options.think_s * 1e3:.0f} ms between calls; the service"
    )
    print(f"answers after {LATENCY_S * 1e3:.0f} ms: at most {ceiling:.0f} calls/s\n")
    print("| client | calls/s | of the plain client | CPU us per call | p50 ms | p99 ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, measured in results.items():
        share = measured["calls_per_s"] / alone["calls_per_s"]
        times = [f"{measured[k] * 1e3:.0f}" if k in measured else "" for k in ("p50_s", "p99_s")]
        print(
            f"| {name} | {measured['calls_per_s']:.0f} | {share:.0%} | {measured['cpu_us']:.0f} |"
            f" {times[0]} | {times[1]} |"
        )
    extra = results["search tool"]["cpu_us"] - alone["cpu_us"]
    print(f"\noverhead of the tool over raw sockets: {extra:.0f} us of CPU time per call")
    worst = min(m["calls_per_s"] / alone["calls_per_s"] for m in results.values())
    return int(worst < 0.9)


if __name__ == "__main__":
    sys.exit(main())
