"""The common part of services: a health route, a socket, uvicorn."""

import argparse
import logging
import socket
import sys
from collections.abc import Callable
from typing import Annotated

import uvicorn
from fastapi import FastAPI
from pydantic import Field

from raylearner.errors import ConfigError
from raylearner.listening import Guard, Hosts
from raylearner.network import LOOPBACK
from raylearner.observability import logs

logger = logging.getLogger(__name__)

BAD_INPUT = 2
BACKLOG = 4096
"""Maximum number of connections waiting to be accepted: all episodes may connect at once."""
KEEP_ALIVE_S = 75
MAX_QUERIES = 1024
Query = Annotated[str, Field(max_length=1_000_000)]
Queries = Annotated[list[Query], Field(max_length=MAX_QUERIES)]


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a command line with `--host`, `--port` and `--allowed-host`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    made.add_argument(
        "--port", type=int, default=0, help="port to bind; 0 picks a free one and prints it"
    )
    made.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        help="name by which requests may call the service, besides localhost, the bound address and"
        " this machine's own; repeatable",
    )
    return made


def make_app(name: str) -> FastAPI:
    """Make an application with `GET /health`; it is ready once it serves."""

    app = FastAPI(title=f"raylearner {name}", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:  # pyright: ignore[reportUnusedFunction]
        return {"status": "ok", "service": name}

    return app


def serve(make: Callable[[], FastAPI], options: argparse.Namespace) -> int:
    """Serve by the options of `make_parser` until interrupted, print the address once connections are accepted, and return the exit
    code."""
    logs.set_up()
    try:
        app = make()
        bound = _bind(options.host, options.port)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT
    address = bound.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    sys.stdout.write(f"http://{shown}:{address[1]}\n")
    sys.stdout.flush()
    if address[0] not in LOOPBACK:
        logger.warning(
            "the service listens on %s without authentication: anyone who can reach this address can use it",
            address[0],
        )
    config = uvicorn.Config(
        Guard(app=app, hosts=Hosts.of(options.host, options.allowed_host)),
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[bound])
    return 0


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(f"cannot bind {host}:{port}: {error}") from error
    return bound
