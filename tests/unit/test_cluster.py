"""Joining a cluster, as far as it goes without one."""

import socket
import subprocess
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from raylearner.config.schema import ClusterSection
from raylearner.errors import ConfigError, StartError
from raylearner.run import cluster


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nobody listens."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_cluster_that_does_not_listen_is_refused_at_once(unused: str) -> None:
    with pytest.raises(
        ConfigError, match=f"cluster.address '{unused}' cannot be joined: .*refused"
    ):
        cluster.connect(ClusterSection(address=unused))


def test_an_address_from_the_environment_is_called_that(
    unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", unused)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS '{unused}' cannot be joined"):
        cluster.connect(ClusterSection())


def test_a_token_file_that_is_not_there_is_told_before_ray_aborts(
    unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH=/nowhere/token"):
        cluster.connect(ClusterSection(address=unused))


def _fail_starts(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> list[psutil.Process]:
    """Let the first starts of a local Ray fail after they started a process; return those processes."""
    started: list[psutil.Process] = []

    def init(**_: Any) -> SimpleNamespace:
        if len(started) == num_failures:
            return SimpleNamespace(dashboard_url="127.0.0.1:8265")
        process = subprocess.Popen(["sleep", "600"])
        started.append(psutil.Process(process.pid))
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "START_PAUSE_S", 0.1)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    return started


def test_a_local_start_that_fails_is_retried_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = _fail_starts(monkeypatch, cluster.NUM_STARTS - 1)
    assert cluster.connect(ClusterSection()) == "127.0.0.1:8265"
    assert len(caplog.records) == len(started) == cluster.NUM_STARTS - 1
    assert not any(process.is_running() for process in started)


def test_the_jobs_page_gets_the_metadata_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def init(**options: Any) -> SimpleNamespace:
        seen.append(options["job_config"])
        return SimpleNamespace(dashboard_url="")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "init", init)
    cluster.connect(ClusterSection(), metadata={"run": "first", "commit": "abc"})
    assert seen[0].metadata == {"run": "first", "commit": "abc"}


def test_the_last_failed_start_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    started = _fail_starts(monkeypatch, 100)
    with pytest.raises(StartError, match="timed out during startup") as caught:
        cluster.connect(ClusterSection())
    assert "\n" not in str(caught.value)
    assert len(started) == cluster.NUM_STARTS
    assert not any(process.is_running() for process in started)
