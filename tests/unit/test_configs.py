"""Every file in configs/ loads: overlays over the quickstart, whole ones alone."""

from pathlib import Path

import pytest
import yaml

from raylearner.config.loader import load

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("**/*.yaml"))
REQUIRED = {"model", "data", "environment", "actors"}


def is_overlay(path: Path) -> bool:
    return not set(yaml.safe_load(path.read_text())) >= REQUIRED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    files = [str(path)]
    if is_overlay(path):
        files.insert(0, str(CONFIGS / "quickstart.yaml"))
    load(files, [])


def test_there_are_configs() -> None:
    assert CONFIGS / "quickstart.yaml" in FILES
