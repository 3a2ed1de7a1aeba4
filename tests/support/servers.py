"""HTTP services of tests, and tools that call them."""

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from raylearner.config.environment import ToolSection
from raylearner.tools.catalogue import make_tool
from raylearner.tools.tool import Tool
from raylearner.types import Prompt

PROMPT = Prompt(prompt_id="p", messages=())

Routes = Mapping[str, Callable[[Any], Any]]
"""By path: the JSON reply to a JSON body."""


def tool_of(kind: str, **settings: Any) -> Tool:
    section = {"kind": kind, **settings}
    return make_tool(TypeAdapter[ToolSection](ToolSection).validate_python(section))


@asynccontextmanager
async def answering(routes: Routes) -> AsyncIterator[tuple[str, list[Any]]]:
    """Yield the address of a service with these routes, and the bodies of its requests."""
    bodies: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response(routes[request.path](bodies[-1]))

    app = web.Application()
    for path in routes:
        app.router.add_post(path, handle)
    async with TestServer(app) as server:
        yield str(server.make_url("")), bodies


@asynccontextmanager
async def calling(
    kind: str, routes: Routes, **settings: Any
) -> AsyncIterator[tuple[Tool, list[Any]]]:
    """Yield a tool of a service with these routes, and the bodies of its requests."""
    async with answering(routes) as (url, bodies):
        tool = tool_of(kind, url=url, **settings)
        yield tool, bodies
        await tool.close()


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a thread; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=10)
