"""The server behind `openai_proxy`: chat completions on localhost, each episode with a key of its own.

Consumes HTTP calls of agent programs; produces what the session of the key answers. A call waits for
its session, unblocked by the engine or by the end of the episode.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from raylearner import network, strict_json
from raylearner.actors.proxy import chat
from raylearner.actors.proxy.chat import ChatRefusal, ChatSession

HOST = "127.0.0.1"
BACKLOG = 4096
"""Connections that may wait to be accepted: a whole fleet of episodes comes at once."""
KEEP_ALIVE_S = 75
MAX_BODY_BYTES = 32 << 20
KEPT_HEADER = "x-raylearner-kept"
"""Says which sampling numbers of a request were not followed, and what stands instead."""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients ask again after errors unless told not to; an error here stays one."""


class ChatServer:
    """Owns the socket and the keys. `start`, then a `session` for each episode, then `close`."""

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._base_url = ""

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        return self._base_url

    async def start(self) -> None:
        """Binds an ephemeral port on localhost; calls are taken from here on, and by no proxy."""
        network.keep_direct(HOST)
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.bind((HOST, 0))
        bound.listen(BACKLOG)
        self._base_url = f"http://{HOST}:{bound.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="chat server")

    async def close(self) -> None:
        """Safe to call twice, and without `start`."""
        self._sessions.clear()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    @contextlib.contextmanager
    def session(self, session: ChatSession) -> Generator[str]:
        """The key under which `session` answers; worth nothing afterwards."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            self._sessions.pop(key, None)

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self._complete, methods=["POST"])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/{path:path}", self._unknown, methods=["GET", "POST"])
        return app

    async def _complete(self, request: Request) -> Response:
        async def is_wanted() -> bool:
            return not await request.is_disconnected()

        try:
            session = self._session_of(request)
            asked = chat.read_request(await _body(request))
            reply = await session.complete(asked, is_wanted=is_wanted)
        except ChatRefusal as refusal:
            return _refused(refusal)
        headers = {KEPT_HEADER: reply.kept} if reply.kept else {}
        if asked.is_streamed:
            lines = chat.events(reply, asked)
            return StreamingResponse(lines, media_type="text/event-stream", headers=headers)
        return JSONResponse(chat.whole(reply, asked), headers=headers)

    async def _models(self, request: Request) -> Response:
        try:
            self._session_of(request)
        except ChatRefusal as refusal:
            return _refused(refusal)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "raylearner"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _unknown(self, request: Request) -> Response:
        return _refused(
            ChatRefusal(
                404,
                f"{request.method} {request.url.path} is not served here; an agent program calls"
                " POST /v1/chat/completions",
                code="unknown_url",
            )
        )

    def _session_of(self, request: Request) -> ChatSession:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            raise ChatRefusal(
                401,
                "this key opens no running episode; use the api_key that the program was given",
                code="invalid_api_key",
            )
        return session


class _Server(uvicorn.Server):
    """Leaves the signals of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _body(request: Request) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ChatRefusal(
                413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large"
            )
    try:
        return strict_json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ChatRefusal(400, f"the body is no JSON: {error}", code="invalid_json") from error


def _refused(refusal: ChatRefusal) -> Response:
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=NO_RETRY)
