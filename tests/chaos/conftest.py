"""Fixtures of the tests with faults: one tiny model for all runs, which start a local Ray of their own."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the first run makes it."""
    return tmp_path_factory.mktemp("chaos") / "model"
