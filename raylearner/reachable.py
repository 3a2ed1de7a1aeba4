"""Whether a cluster can be asked at all, found before Ray is: it would try for minutes, or abort."""

import os
import socket

from raylearner.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0
"""Longest a cluster may take to answer at its port."""
AUTH_MODES = ("token", "disabled")


def knock(address: str) -> None:
    """Raises `OSError` where nobody listens at `host:port`; other forms are Ray's to read."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal() and int(port) < 2**16:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def refuse_bad_authentication() -> None:
    """Raises `ConfigError` for variables at which Ray would abort the process, or do as if not set."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path and not os.environ.get("RAY_AUTH_TOKEN") and not _is_readable(path):
        raise ConfigError(
            f"RAY_AUTH_TOKEN_PATH={path}: no such file, or not to be read; unset it, or name the file"
            " that holds the cluster's token"
        )
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode and mode.lower() not in AUTH_MODES:
        raise ConfigError(f"RAY_AUTH_MODE={mode}: Ray knows {' and '.join(AUTH_MODES)} only")


def _is_readable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK)
