"""The command `init`, for installations without the repository."""

import shlex
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from raylearner.cli.exits import exit_codes
from raylearner.errors import ConfigError

CORPORA = "raylearner/services/corpora"
"""Folder of the example data, as the configurations name it."""
DATA = "configs/data"


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", hidden=True, show_default=False)
    ] = Path(),
) -> None:
    """Write the example configurations to FOLDER/configs."""
    with exit_codes():
        target = folder / "configs"
        if target.exists():
            raise ConfigError(f"{target}: already exists; choose another FOLDER")
        package = resources.files("raylearner")
        files = list(_yaml_files(package / "configs"))
        for name, source in files:
            text = source.read_text(encoding="utf-8").replace(CORPORA, DATA)
            _write(target / name, text)
        for source in (package / "services" / "corpora").iterdir():
            if source.name.endswith(".jsonl"):
                _write(folder / DATA / source.name, source.read_text(encoding="utf-8"))
        typer.echo(f"{len(files)} configurations are in {target}, their data in {target / 'data'}")
        there = "" if target == Path("configs") else f"cd {shlex.quote(str(folder))} && "
        typer.echo(f"next: {there}raylearner train configs/quickstart.yaml")


def _yaml_files(folder: Traversable, prefix: str = "") -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _yaml_files(entry, f"{name}/")
        elif name.endswith(".yaml"):
            found.append((name, entry))
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
