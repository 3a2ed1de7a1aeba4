"""Commands for one run on this machine or the cluster in RAY_ADDRESS: `train`, `eval` and `check`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from raylearner.cli.arguments import (
    Arguments,
    OldRestartOption,
    RestartOption,
    ResumeOption,
    Retries,
    load_config,
    require_resume,
    with_run_dir,
)
from raylearner.cli.exits import exit_codes
from raylearner.config import report
from raylearner.config.checks import warnings
from raylearner.errors import ConfigError
from raylearner.observability import logs, run_directory
from raylearner.observability.run_directory import RESTART_OPTION

CHECKPOINT = "checkpoint="


def train(
    arguments: Arguments = None,
    resume: ResumeOption = None,
    restart_if_no_checkpoint: RestartOption = False,
    _: OldRestartOption = False,
    retries: Retries = 0,
) -> None:
    """Train a model as the configuration specifies."""
    with exit_codes():
        logs.set_up()
        require_resume(restart_if_no_checkpoint, resume)
        resume = run_directory.resolve(resume) if resume is not None else None
        config = with_run_dir(load_config(arguments or [], resume, environment=os.environ), resume)
        if retries:
            from raylearner.run.supervisor import Supervisor

            options = [RESTART_OPTION] * restart_if_no_checkpoint
            supervisor = Supervisor.of_run(config, [*options, *(arguments or [])], resume, retries)
            raise typer.Exit(supervisor.run())
        from raylearner.run import training

        training.run(config, resume=resume, restart_if_no_checkpoint=restart_if_no_checkpoint)


def evaluate(arguments: Arguments = None) -> None:
    """Evaluate a model on the held-out prompts."""
    with exit_codes():
        logs.set_up()
        given = arguments or []
        places = [a.partition("=")[2] for a in given if a.startswith(CHECKPOINT)]
        if len(places) > 1:
            raise ConfigError(f"checkpoint: given {len(places)} times; evaluate one at a time")
        given = [a for a in given if not a.startswith(CHECKPOINT)]
        checkpoint = Path(places[0]) if places else None
        saved = checkpoint.absolute().parents[1] / "config.yaml" if checkpoint else None
        if saved is not None and all("=" in a for a in given):
            if not saved.is_file():
                raise ConfigError(
                    f"{CHECKPOINT}{places[0]}: no config.yaml of a run in {saved.parent}; name "
                    "RUN_DIR/checkpoints/step_NNNNNN, or add a configuration file"
                )
            given = [str(saved), *given]
        config = load_config(given, None, environment=os.environ)
        # A directory in a file is that of the training.
        folder = config.run.dir if any(a.startswith("run.dir=") for a in given) else None
        run = {"name": f"{config.run.name}-eval", "dir": folder}
        config = config.model_copy(update={"run": config.run.model_copy(update=run)})
        from raylearner.run import evaluate_command

        evaluate_command.evaluate(with_run_dir(config, None), checkpoint=checkpoint)


def check(
    arguments: Arguments = None,
    should_play: Annotated[
        bool,
        typer.Option(
            "--play",
            help="Also run one episode on the first row through the environment, tools and rewards, with a"
            " scripted policy that calls each tool once and then gives the row's answer.",
        ),
    ] = False,
) -> None:
    """Validate a configuration; start nothing.

    Also prints the resources and sizes that it implies.
    """
    with exit_codes():
        config = load_config(arguments or [], None, environment=os.environ)
        typer.echo(report.report(config))
        for warning in warnings(config):
            typer.echo(f"warning: {warning}")
        from raylearner.run import prompt_checks

        prompt_checks.check(config, report=lambda warning: typer.echo(f"warning: {warning}"))
        if should_play:
            from raylearner.run import check_command

            check_command.play_first_row(config, report=typer.echo)
