"""Whether somebody listens at an address, before Ray is asked, which would try for minutes."""

import socket

CONNECT_TIMEOUT_S = 10.0
"""Longest a cluster may take to answer at its port."""


def knock(address: str) -> None:
    """Raises `OSError` where nobody listens at `host:port`; other forms are Ray's to read."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal() and int(port) < 2**16:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
