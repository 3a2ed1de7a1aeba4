"""Every file in configs/ loads: overlays over the quickstart, whole ones alone."""

from pathlib import Path

import pytest
import yaml

from raylearner.config.loader import load

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "sweeps").glob("*.yaml"))
FILES = sorted(set((ROOT / "configs").glob("**/*.yaml")) - set(SWEEPS))
REQUIRED = {"model", "data", "environment", "actors"}


def is_overlay(path: Path) -> bool:
    return not set(yaml.safe_load(path.read_text())) >= REQUIRED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    files = [str(path)]
    if is_overlay(path):
        files.insert(0, str(ROOT / "configs" / "quickstart.yaml"))
    load(files, [])


def test_there_are_configs() -> None:
    assert ROOT / "configs" / "quickstart.yaml" in FILES
