"""The server behind `openai_proxy`: chat completions on localhost, one key per episode.

Consumes HTTP calls of agent programs; produces the answers of the session that their key belongs to.
A call waits for its session, unblocked by the engine or by the end of the episode.
"""

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import Generator
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from raylearner import network
from raylearner.actors.proxy import chat
from raylearner.actors.proxy.chat import ChatRefusal, ChatSession
from raylearner.listening import Guard, Hosts
from raylearner.text import load_json

HOST = "127.0.0.1"
BACKLOG = 4096
"""Maximum number of connections waiting to be accepted: all episodes may connect at once."""
KEEP_ALIVE_S = 75
KEPT_HEADER = "x-raylearner-kept"
"""Header that lists sampling parameters that were not applied, and the values used instead.
"""
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients retry after errors without this header; an error here is final."""


class ChatServer:
    """Owns the socket and the keys; serves from `start` to `close`, with a `session` per episode."""

    def __init__(self, bound: socket.socket) -> None:
        self.base_url = f"http://{HOST}:{bound.getsockname()[1]}/v1"
        """The `base_url` for OpenAI clients."""
        self._sessions: dict[bytes, ChatSession] = {}
        """By the digest of their key: the time of a look-up reveals nothing about the keys."""
        config = uvicorn.Config(
            Guard(app=self._app(), hosts=Hosts.of(HOST)),
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="chat server")

    @classmethod
    def start(cls) -> Self:
        """Serve on an ephemeral port of localhost, which no proxy is used for."""
        network.keep_direct(HOST)
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.bind((HOST, 0))
        bound.listen(BACKLOG)
        return cls(bound)

    async def close(self) -> None:
        """Safe to call twice."""
        self._sessions.clear()
        self._server.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def session(self, session: ChatSession) -> Generator[str]:
        """Yield the key for `session`, which is valid within the context only."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[_digest(key)] = session
        try:
            yield key
        finally:
            self._sessions.pop(_digest(key), None)

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
            session = self._find_session(request)
            chat_request = chat.read_request(await _read_body(request))
            reply = await session.complete(chat_request, is_wanted=is_wanted)
        except ChatRefusal as refusal:
            return _answer_refusal(refusal)
        headers = {KEPT_HEADER: reply.kept} if reply.kept else {}
        if chat_request.is_streamed:
            lines = chat.write_events(reply, chat_request)
            return StreamingResponse(lines, media_type="text/event-stream", headers=headers)
        return JSONResponse(chat.write_reply(reply, chat_request), headers=headers)

    async def _models(self, request: Request) -> Response:
        try:
            self._find_session(request)
        except ChatRefusal as refusal:
            return _answer_refusal(refusal)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "raylearner"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _unknown(self, request: Request) -> Response:
        return _answer_refusal(
            ChatRefusal(
                404,
                f"{request.method} {request.url.path} is not served here; agent programs call "
                "POST /v1/chat/completions",
                code="unknown_url",
            )
        )

    def _find_session(self, request: Request) -> ChatSession:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if session is None:
            raise ChatRefusal(
                401,
                "this key does not belong to a running episode; use the api_key given to the program",
                code="invalid_api_key",
            )
        return session


class _Server(uvicorn.Server):
    """Does not handle the signals of the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def _read_body(request: Request) -> Any:
    try:
        return load_json(await request.body())
    except (ValueError, RecursionError) as error:
        raise ChatRefusal(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _answer_refusal(refusal: ChatRefusal) -> Response:
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=NO_RETRY)
