"""Arguments and options that several commands share, and the configuration that they select."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from raylearner import job_variables
from raylearner.cli.completion import complete_argument
from raylearner.config.loader import load
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError
from raylearner.observability import run_directory
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.run.machine import stop_time_s

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [OVERLAY..] [KEY=VALUE..]",
        help="Configuration files in YAML, merged from left to right, and overrides such as run.num_steps=20.",
        show_default=False,
        hidden=True,  # explained in the text of each command
        autocompletion=complete_argument,
    ),
]

ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN_DIR",
        help="Resume from the last complete checkpoint of this run directory, with its config.yaml.",
        show_default=False,
    ),
]

RestartOption = Annotated[
    bool,
    typer.Option(
        RESTART_OPTION,
        help="With --resume: if RUN_DIR has no complete checkpoint, move it to RUN_DIR.1 and start the run again.",
    ),
]


def _refuse_old_option(is_given: bool) -> None:
    if is_given:
        raise typer.BadParameter(f"--or-start-over was renamed to {RESTART_OPTION}")


OldRestartOption = Annotated[
    bool, typer.Option("--or-start-over", hidden=True, callback=_refuse_old_option)
]

Retries = Annotated[
    int,
    typer.Option(
        "--retries",
        metavar="N",
        min=0,
        help="Resume a run that fails or is killed, at most N times within an hour.",
    ),
]

HandedOn = Annotated[
    list[str] | None,
    typer.Option(
        job_variables.OPTION,
        metavar="NAME",
        help="Pass this environment variable on to the job. Can be given several times.",
        show_default=False,
    ),
]


def load_config(
    arguments: Sequence[str],
    resume: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
) -> RunConfig:
    """Load files and overrides; `environment` is the run's environment, if it is known."""
    overrides = [a for a in arguments if "=" in a and not os.path.exists(a)]
    files = [a for a in arguments if a not in overrides]
    if resume is not None:
        saved = resume / "config.yaml"
        if not saved.is_file():
            raise ConfigError(f"--resume {resume}: not a run directory: config.yaml is missing")
        files = [str(saved), *files]
    config = load(files, overrides, environment=environment)
    stop_time_s(config.run, environment or {})
    return config


def require_resume(restart_if_no_checkpoint: bool, resume: Path | None) -> None:
    """Refuse the option for resumed runs with a new run. Raises `ConfigError`."""
    if restart_if_no_checkpoint and resume is None:
        raise ConfigError(f"{RESTART_OPTION} needs --resume RUN_DIR")


def with_run_dir(config: RunConfig, resume: Path | None) -> RunConfig:
    """Return the configuration with its run directory, which exists only with `--resume`."""
    if resume is not None:
        folder = resume
    else:
        folder = run_directory.resolve(run_directory.name_new(config.run))
        run_directory.check_new(folder)
        run_directory.check_writable(folder)
    run = config.run.model_copy(update={"dir": str(folder)})
    return config.model_copy(update={"run": run})
