"""Joining a cluster, as far as it goes without one."""

import socket

import pytest

from raylearner.config.schema import ClusterSection
from raylearner.errors import ConfigError
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
