"""The command `convert`, from the configurations of other projects."""

from pathlib import Path
from typing import Annotated

import typer

from raylearner.cli.exits import exit_codes
from raylearner.credentials import mask
from raylearner.errors import ConfigError, naming
from raylearner.text import visible


def convert(
    source: Annotated[str, typer.Argument(metavar="FILE", hidden=True)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE..]", hidden=True, show_default=False),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PROJECT",
            help="verl, easyr1, trl or search-r1. Default: found by the keys.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write, which must not exist. Default: standard output.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Convert a configuration of verl, EasyR1, TRL or Search-R1."""
    with exit_codes():
        from raylearner.convert import conversion

        if output is not None and output.exists():
            raise ConfigError(f"--out {output}: exists; name another file, or remove it")
        found = conversion.convert(source, project=project, overrides=overrides or ())
        if output is None:
            typer.echo(found.yaml(), nl=False)
        else:
            with naming(output):
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(found.yaml(), encoding="utf-8")
        typer.echo(mask(visible(found.report())), err=True)
        if output is not None:
            typer.echo(f"written to {output}; next: raylearner check {output}", err=True)
