"""Serving the page on this machine."""

import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import uvicorn

from raylearner.errors import ConfigError
from raylearner.observability.viewer.app import HOST, make_app
from raylearner.observability.viewer.runs import Library

MAX_PORT = 65535
KEEP_ALIVE_S = 30


def serve(
    roots: Sequence[Path], *, step: int | None, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve the page until interrupted; `on_ready` receives the address to open.

    With one run it opens that run, at `step` if given. Raises `ConfigError` if there is nothing to
    show, the run does not have the step, or the port is not available.
    """
    library = Library(roots)
    address = f"http://{HOST}:{port}/{_place(library, step)}"
    app = make_app(library, HOST)
    with _bind(port) as bound:
        on_ready(address)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[bound])


def _place(library: Library, step: int | None) -> str:
    """Return the part of the address that opens the only run, or nothing."""
    runs = list(library.runs().values())
    if len(runs) != 1 or library.sweeps():
        if step is not None:
            raise ConfigError("--step: needs the directory of one run")
        return ""
    place = f"#/run/{quote(runs[0].id, safe='')}"
    if step is None:
        return place
    steps = runs[0].index.steps("training")
    if step not in steps:
        last = f"the last one is {steps[-1]}" if steps else "it has no trajectories"
        raise ConfigError(f"--step {step}: {runs[0].path} has no such step; {last}")
    return f"{place}/trajectories?step={step}"


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
        bound.listen()
    except OSError as error:
        bound.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else error.strerror
        other = port + 1 if port < MAX_PORT else port - 1
        raise ConfigError(
            f"--port {port}: {reason}; stop the program that uses it, or choose another port, such as"
            f" --port {other}"
        ) from error
    return bound
