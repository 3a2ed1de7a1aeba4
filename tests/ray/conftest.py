"""Fixtures of the loop tests: one cluster for all of them, as a user who keeps one running."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop import ENVIRONMENT, Launcher, wait_for

# Ray reads it once in a process, so that it must be there before the first test.
os.environ["RAY_AUTH_MODE"] = "token"


@pytest.fixture(scope="session")
def ports() -> tuple[int, int, int]:
    """Free ones for the cluster's head, its dashboard and its metrics."""
    with socket.socket() as head, socket.socket() as dashboard, socket.socket() as metrics:
        for free in (head, dashboard, metrics):
            free.bind(("127.0.0.1", 0))
        return head.getsockname()[1], dashboard.getsockname()[1], metrics.getsockname()[1]


@pytest.fixture(scope="session")
def cluster(ports: tuple[int, int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a small local cluster, ended with everything it started."""
    port, dashboard_port, metrics_port = ports
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=8"),
        *("--object-store-memory=150000000", f"--metrics-export-port={metrics_port}"),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
    ]
    log = tmp_path_factory.mktemp("cluster") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_for(lambda: "Ray runtime started" in log.read_text(), what="the cluster")
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def launcher(tmp_path: Path, cluster: str) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, address=cluster)
    yield launcher
    launcher.close()
