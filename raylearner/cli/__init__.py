"""The command line: `init`, `convert`, `train`, `eval`, `check`, `submit`, `sweep`, `scale`, `view` and
`doctor`.

It loads in well under a second: torch, Ray and vLLM are imported where needed.
"""

import inspect
import os
import sys
from typing import Annotated

import typer

from raylearner import __version__
from raylearner.cli import examples, inspection, jobs, runs
from raylearner.cli.convert import convert
from raylearner.cli.init import init

COMMANDS = {
    "train": runs.train,
    "eval": runs.evaluate,
    "check": runs.check,
    "submit": jobs.submit,
    "sweep": jobs.sweep,
    "scale": jobs.scale,
    "view": inspection.view,
    "doctor": inspection.doctor,
    "init": init,
    "convert": convert,
}

app = typer.Typer(
    name="raylearner",
    help="Asynchronous reinforcement learning for LLM agents.",
    epilog="\b\nExamples:\n"
    "  raylearner check configs/quickstart.yaml\n"
    "  raylearner train configs/quickstart.yaml run.dir=runs/first\n"
    "  raylearner COMMAND --help   # options and examples of a command",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for _name, _command in COMMANDS.items():
    app.command(
        _name,
        help=examples.help_text(_name, inspect.cleandoc(_command.__doc__ or "")),
        epilog=examples.epilog(_name),
    )(_command)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"raylearner {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    if (
        "" not in sys.path and os.getcwd() not in sys.path
    ):  # as `python -m` does, for modules of users
        sys.path.insert(0, os.getcwd())
    app(prog_name="raylearner")
