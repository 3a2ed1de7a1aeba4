"""Commands for Ray jobs: `submit`, `sweep` and `scale`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from raylearner.cli.arguments import (
    Arguments,
    HandedOn,
    OldRestartOption,
    RestartOption,
    ResumeOption,
    Retries,
    load_config,
    require_resume,
)
from raylearner.cli.exits import exit_codes
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError
from raylearner.observability import logs


def submit(
    arguments: Arguments = None,
    resume: ResumeOption = None,
    restart_if_no_checkpoint: RestartOption = False,
    _: OldRestartOption = False,
    sweep_file: Annotated[
        str | None,
        typer.Option(
            "--sweep", metavar="FILE", help="Run the sweep in this file.", show_default=False
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of the Ray dashboard, such as http://HOST:8265. Default: RAY_API_SERVER_ADDRESS or"
            " RAY_ADDRESS.",
            show_default=False,
        ),
    ] = None,
    retries: Retries = 0,
    pip: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requirements file that the cluster installs for the job.",
            show_default=False,
        ),
    ] = None,
    variables: HandedOn = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print the log of the job until it ends.")
    ] = False,
) -> None:
    """Start a run or a sweep as a Ray job.

    Its working directory is a copy of the current one.
    """
    with exit_codes():
        if sweep_file is not None and (arguments or resume is not None or retries):
            raise ConfigError(
                f"--sweep {sweep_file}: cannot be combined with --resume, --retries, other files or "
                "overrides; write those into `base` and `overrides` of the sweep file; a sweep retries"
                " failed trials itself"
            )
        require_resume(restart_if_no_checkpoint, resume)
        from raylearner.jobs import submission
        from raylearner.jobs.sweep import plan

        request = submission.Request(
            arguments=tuple(arguments or ()),
            resume=resume,
            restart_if_no_checkpoint=restart_if_no_checkpoint,
            sweep_file=sweep_file,
            retries=retries,
            variables=tuple(variables or ()),
        )

        def load_runs() -> Sequence[RunConfig]:
            if sweep_file is not None:
                return [trial.config for trial in plan.read(sweep_file).trials]
            config = load_config(arguments or [], resume)
            if resume is not None and not restart_if_no_checkpoint:
                from raylearner.run import checkpointing

                checkpointing.require_checkpoint(resume)
            return [config]

        submission.submit(
            request, load_runs, address=address, dependencies=pip, should_follow=follow
        )


def sweep(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Sweep file; configs/sweeps/ has examples.", hidden=True
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command of every trial and start nothing.")
    ] = False,
    should_report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Print the results so far in Markdown, and write them, CSV files and plots into the folder"
            " of the sweep. Starts nothing.",
        ),
    ] = False,
    variables: HandedOn = None,
) -> None:
    """Run every trial of a sweep as a Ray job.

    The same command resumes an interrupted sweep.
    """
    with exit_codes():
        logs.set_up()
        from raylearner.jobs.sweep import plan

        if Path(file).is_dir() and not should_report:
            raise ConfigError(
                f"{file}: is a folder; --report prints the results in it, and the sweep file runs its trials"
            )
        if dry_run and should_report:
            raise ConfigError("--dry-run and --report: choose one")
        if should_report:
            from raylearner.jobs.sweep import report

            folder = report.find(file)
            typer.echo(report.write(folder))
            typer.echo(f"written to {folder}: results.md, *.csv and plots/", err=True)
            return
        if dry_run:
            for command in plan.commands(plan.read(file)).values():
                typer.echo(command)
            return
        from raylearner.jobs.sweep import runner

        runner.run(file, variables=variables or ())


def scale(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run directory, or the name of a run in runs/.", hidden=True
        ),
    ],
    number: Annotated[
        str,
        typer.Argument(
            metavar="actors=N", help="Number of rollout actors, such as actors=4.", hidden=True
        ),
    ],
) -> None:
    """Change the number of rollout actors of a running job."""
    with exit_codes():
        from raylearner.run import scaling

        typer.echo(scaling.request(run, number))
