"""Fixtures of the loop tests: one cluster for all of them, as a user who keeps one running."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running
from loop import TINY, Launcher

from raylearner.config.schema import TinyModel
from raylearner.tiny.model import make_tiny_model

# Ray reads it once in a process, so that it must be there before the first test.
os.environ["RAY_AUTH_MODE"] = "token"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster"), num_cpus=8) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one, made once: each run would spend its first seconds on it."""
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(TinyModel.model_validate(TINY), folder, seed=3)


@pytest.fixture
def launcher(tmp_path: Path, cluster: Cluster, model: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path, address=cluster.address, model=model)
    yield launcher
    launcher.close()
