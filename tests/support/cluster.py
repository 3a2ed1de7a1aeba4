"""A small local cluster that tests share, as a user keeps one running."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loop import ENVIRONMENT, wait_for

OBJECT_STORE_BYTES = 150_000_000


@dataclass(frozen=True, kw_only=True)
class Cluster:
    address: str
    dashboard_port: int
    metrics_port: int


@contextmanager
def running(folder: Path, *, num_cpus: int) -> Iterator[Cluster]:
    """With a log in `folder`; ended with everything it started."""
    port, dashboard_port, metrics_port, agent_port = free_ports(4)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", f"--num-cpus={num_cpus}"),
        *(f"--object-store-memory={OBJECT_STORE_BYTES}", f"--metrics-export-port={metrics_port}"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
        f"--dashboard-agent-listen-port={agent_port}",
    ]
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(lambda: "Ray runtime started" in log.read_text(), what="the cluster")
        yield Cluster(
            address=f"127.0.0.1:{port}", dashboard_port=dashboard_port, metrics_port=metrics_port
        )
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    return ports
