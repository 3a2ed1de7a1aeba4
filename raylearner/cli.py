"""The command line: `train`, `eval`, `check`, `submit`, `sweep`, `scale`, `view` and `doctor`.

Exit codes: 0 success, 1 the run failed, 2 invalid input, 130 interrupted, or stopped on request before
the first checkpoint, 143 stopped on request with a checkpoint. This module loads in well under a second: torch, Ray and vLLM are imported where needed.
"""

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from raylearner import job_variables, network
from raylearner.config import report
from raylearner.config.checks import warnings
from raylearner.config.loader import load
from raylearner.config.schema import RunConfig
from raylearner.credentials import mask
from raylearner.errors import (
    ConfigError,
    RaylearnerError,
    RunStopped,
    StoppedEarly,
    causes,
    summary,
)
from raylearner.observability import logs, run_directory
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.run.machine import stop_time_s
from raylearner.text import visible

FAILED, BAD_INPUT, INTERRUPTED, STOPPED = 1, 2, 130, 143

CHECKPOINT = "checkpoint="

app = typer.Typer(
    name="raylearner",
    help="Asynchronous reinforcement learning for LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [OVERLAY..] [KEY=VALUE..]",
        help="Configuration files in YAML, merged from left to right, and overrides such as run.num_steps=20.",
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


@app.command()
def train(
    arguments: Arguments = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Resume from the last complete checkpoint of this run directory, with its config.yaml.",
            show_default=False,
        ),
    ] = None,
    restart_if_no_checkpoint: RestartOption = False,
    _: OldRestartOption = False,
    retries: Retries = 0,
) -> None:
    """Train a model as the configuration specifies."""
    with _exit_codes():
        logs.set_up()
        _require_resume(restart_if_no_checkpoint, resume)
        resume = run_directory.resolve(resume) if resume is not None else None
        config = _with_run_dir(_load(arguments or [], resume, environment=os.environ), resume)
        if retries:
            from raylearner.run.supervisor import Supervisor

            options = [RESTART_OPTION] * restart_if_no_checkpoint
            supervisor = Supervisor.of_run(config, [*options, *(arguments or [])], resume, retries)
            raise typer.Exit(supervisor.run())
        from raylearner.run import training

        training.run(config, resume=resume, restart_if_no_checkpoint=restart_if_no_checkpoint)


@app.command(name="eval")
def evaluate(arguments: Arguments = None) -> None:
    """Evaluate a model on the held-out prompts, without training.

    checkpoint=RUN_DIR/checkpoints/step_NNNNNN selects a checkpoint. By default the model in the
    configuration is evaluated.
    """
    with _exit_codes():
        logs.set_up()
        given = arguments or []
        places = [a.partition("=")[2] for a in given if a.startswith(CHECKPOINT)]
        if len(places) > 1:
            raise ConfigError(f"checkpoint: given {len(places)} times; evaluate one at a time")
        given = [a for a in given if not a.startswith(CHECKPOINT)]
        config = _load(given, None, environment=os.environ)
        name = f"{config.run.name}-eval"
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        from raylearner.run import evaluate_command

        evaluate_command.evaluate(
            _with_run_dir(config, None), checkpoint=Path(places[0]) if places else None
        )


@app.command()
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
    """Validate a configuration and print the resources and sizes that it implies. Starts nothing."""
    with _exit_codes():
        config = _load(arguments or [], None, environment=os.environ)
        typer.echo(report.report(config))
        for warning in warnings(config):
            typer.echo(f"warning: {warning}")
        from raylearner.run import prompt_checks

        prompt_checks.check(config, report=lambda warning: typer.echo(f"warning: {warning}"))
        if should_play:
            from raylearner.run import check_command

            check_command.play_first_row(config, report=typer.echo)


@app.command()
def submit(
    arguments: Arguments = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Resume this run.", show_default=False),
    ] = None,
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
    """Start a run or a sweep as a Ray job, with the current directory as its working directory."""
    with _exit_codes():
        if sweep_file is not None and (arguments or resume is not None or retries):
            raise ConfigError(
                f"--sweep {sweep_file}: cannot be combined with --resume, --retries, other files or "
                "overrides; write those into `base` and `overrides` of the sweep file; a sweep retries"
                " failed trials itself"
            )
        _require_resume(restart_if_no_checkpoint, resume)
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
            config = _load(arguments or [], resume)
            if resume is not None and not restart_if_no_checkpoint:
                from raylearner.run import checkpointing

                checkpointing.require_checkpoint(resume)
            return [config]

        submission.submit(
            request, load_runs, address=address, dependencies=pip, should_follow=follow
        )


@app.command()
def sweep(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Sweep file; configs/sweeps/ has examples.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command of every trial and start nothing.")
    ] = False,
    variables: HandedOn = None,
) -> None:
    """Run every trial of a sweep as a Ray job. The same command resumes an interrupted sweep."""
    with _exit_codes():
        logs.set_up()
        from raylearner.jobs.sweep import plan

        if dry_run:
            for command in plan.commands(plan.read(file)).values():
                typer.echo(command)
            return
        from raylearner.jobs.sweep import runner

        runner.run(file, variables=variables or ())


@app.command()
def scale(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run directory, or the name of a run in runs/."),
    ],
    number: Annotated[
        str, typer.Argument(metavar="actors=N", help="Number of rollout actors, such as actors=4.")
    ],
) -> None:
    """Change the number of rollout actors of a running job, and print the result."""
    with _exit_codes():
        from raylearner.run import scaling

        typer.echo(scaling.request(run, number))


@app.command()
def view(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="Step to show. Default: the last one.")] = None,
    port: Annotated[int, typer.Option(help="Local port of the page.", min=1, max=65535)] = 8266,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the page to this file instead of serving it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show trajectories of a run: turns, and tokens with log-probability, mask and policy version."""
    with _exit_codes():
        from raylearner.observability import viewer

        if output is not None:
            viewer.write(run_dir, output, step=step)
            return
        message = f"http://127.0.0.1:{port} shows {run_dir}; press Ctrl-C to stop"
        viewer.serve(run_dir, step=step, port=port, on_ready=lambda: typer.echo(message, err=True))


@app.command()
def doctor() -> None:
    """Check this machine and its cluster, and print how to fix each problem."""
    with _exit_codes():
        from raylearner.jobs import doctor as checks

        num_problems = 0
        for finding in checks.findings():
            num_problems += finding.verdict == "problem"
            typer.echo(f"{finding.verdict:<8} {finding.subject}: {finding.text}")
            if finding.advice:
                typer.echo(f"{'':<8} -> {finding.advice}")
        if num_problems:
            _exit(f"{num_problems} problem{'s' * (num_problems != 1)}", FAILED)


def main() -> None:
    app()


def _load(
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


def _require_resume(restart_if_no_checkpoint: bool, resume: Path | None) -> None:
    if restart_if_no_checkpoint and resume is None:
        raise ConfigError(f"{RESTART_OPTION} needs --resume RUN_DIR")


def _with_run_dir(config: RunConfig, resume: Path | None) -> RunConfig:
    """Return the configuration with its run directory, which exists only with `--resume`."""
    if resume is not None:
        folder = resume
    else:
        folder = run_directory.resolve(run_directory.name_new(config.run))
        run_directory.check_new(folder)
        run_directory.check_writable(folder)
    run = config.run.model_copy(update={"dir": str(folder)})
    return config.model_copy(update={"run": run})


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn errors into a message and an exit code, for all commands."""
    job_variables.take()
    network.keep_direct()
    try:
        yield
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)
    except RunStopped as stop:
        _exit(str(stop), INTERRUPTED if isinstance(stop, StoppedEarly) else STOPPED)
    except typer.Exit:
        raise
    except Exception as error:
        errors = list(causes(error))
        message = "\n".join(dict.fromkeys(map(summary, errors)))
        if not all(isinstance(cause, RaylearnerError | OSError) for cause in errors):
            traceback.print_exception(error)
            _exit(f"failed: {message}", FAILED)
        is_input = all(isinstance(cause, ConfigError) for cause in errors)
        _exit(
            message if is_input else f"the run failed: {message}", BAD_INPUT if is_input else FAILED
        )


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(mask(visible(message)), err=True)
    raise typer.Exit(code) from None
