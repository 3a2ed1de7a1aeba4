"""The command line: `train` runs a configuration, `eval` plays its held-out prompts, `check` validates
it and prints what follows, `submit` makes a Ray job of it, `sweep` runs many, `view` shows a run's
trajectories, `doctor` looks at the machine.

Exit codes: 0 done, 1 the run failed, 2 the user's input is at fault, 130 interrupted, 143 stopped on
request after a checkpoint. This module loads in well under a second: torch, Ray and vLLM are imported
by `training`, once needed.
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
from raylearner.config.checks import notes
from raylearner.config.loader import load
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError, RaylearnerError, RunStopped, causes, summary
from raylearner.observability import logs, run_directory
from raylearner.observability.run_directory import OR_START_OVER
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
        help="YAML files, merged left to right, then overrides such as run.num_steps=20.",
        show_default=False,
    ),
]

OrStartOver = Annotated[
    bool,
    typer.Option(
        OR_START_OVER,
        help="With --resume: without a whole checkpoint there, keep the directory as RUN_DIR.1 and start over.",
    ),
]

HandedOn = Annotated[
    list[str] | None,
    typer.Option(
        job_variables.OPTION,
        metavar="NAME",
        help="Hand this variable of the environment on to the job; repeat it for more.",
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
            help="Go on from the last whole checkpoint of this run directory, with its own config.yaml.",
            show_default=False,
        ),
    ] = None,
    or_start_over: OrStartOver = False,
) -> None:
    """Run a configuration to its end."""
    with _exit_codes():
        logs.set_up()
        _refuse_alone(or_start_over, resume)
        resume = run_directory.durable(resume) if resume is not None else None
        config = _with_run_dir(_load(arguments or [], resume, environment=os.environ), resume)
        from raylearner.run import training

        training.run(config, resume=resume, or_start_over=or_start_over)


@app.command(name="eval")
def evaluate(arguments: Arguments = None) -> None:
    """Play the held-out prompts of a configuration and train nothing.

    checkpoint=RUN_DIR/checkpoints/step_NNNNNN evaluates that; without it the model of the
    configuration is.
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
            help="Also play one episode of the first row through environment, tools and rewards, with a"
            " policy that calls each tool once and gives the row's answer.",
        ),
    ] = False,
) -> None:
    """Validate a configuration, print the numbers that follow from it, start nothing."""
    with _exit_codes():
        config = _load(arguments or [], None, environment=os.environ)
        typer.echo(report.report(config))
        for note in notes(config):
            typer.echo(f"note: {note}")
        from raylearner.run import prompt_checks

        prompt_checks.check(config, report=lambda note: typer.echo(f"note: {note}"))
        if should_play:
            from raylearner.run import check_command

            check_command.play_first_row(config, report=typer.echo)


@app.command()
def submit(
    arguments: Arguments = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="Go on with this run.", show_default=False),
    ] = None,
    or_start_over: OrStartOver = False,
    sweep_file: Annotated[
        str | None,
        typer.Option("--sweep", metavar="FILE", help="Run this sweep.", show_default=False),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Dashboard, http://HOST:8265; else that of RAY_API_SERVER_ADDRESS or RAY_ADDRESS.",
            show_default=False,
        ),
    ] = None,
    pip: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Requirements that the cluster installs for the job, where its image lacks them.",
            show_default=False,
        ),
    ] = None,
    variables: HandedOn = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show its log until it ends.")] = False,
) -> None:
    """Start a run or a sweep as a Ray job, with this directory as its working directory."""
    with _exit_codes():
        if sweep_file is not None and (arguments or resume is not None):
            raise ConfigError(
                f"--sweep {sweep_file}: the file says all of a sweep; leave out --resume, other files"
                " and overrides, or write them into its `base` and `overrides`"
            )
        _refuse_alone(or_start_over, resume)
        from raylearner.jobs import submission
        from raylearner.jobs.sweep import plan

        request = submission.Request(
            arguments=tuple(arguments or ()),
            resume=resume,
            or_start_over=or_start_over,
            sweep_file=sweep_file,
            variables=tuple(variables or ()),
        )

        def load_runs() -> Sequence[RunConfig]:
            if sweep_file is not None:
                return [trial.config for trial in plan.read(sweep_file).trials]
            config = _load(arguments or [], resume)
            if resume is not None and not or_start_over:
                from raylearner.run import checkpointing

                checkpointing.require_checkpoint(resume)
            return [config]

        submission.submit(
            request, load_runs, address=address, dependencies=pip, should_follow=follow
        )


@app.command()
def sweep(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A sweep, see configs/sweeps/.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every trial's command, start nothing.")
    ] = False,
    variables: HandedOn = None,
) -> None:
    """Run every trial of a sweep as a Ray job; the same command goes on with one that ended early."""
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
def view(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory.")],
    step: Annotated[int | None, typer.Option(help="Step; the last one if not given.")] = None,
    port: Annotated[int, typer.Option(help="Port on localhost.", min=1, max=65535)] = 8266,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page instead.", show_default=False),
    ] = None,
) -> None:
    """Show trajectories: turns, tokens by log-probability, mask and policy version."""
    with _exit_codes():
        from raylearner.observability import viewer

        if output is not None:
            viewer.write(run_dir, output, step=step)
            return
        said = f"http://127.0.0.1:{port} shows {run_dir}; Ctrl-C ends it"
        viewer.serve(run_dir, step=step, port=port, on_ready=lambda: typer.echo(said, err=True))


@app.command()
def doctor() -> None:
    """Look at this machine and its cluster, and say what to do about each problem."""
    with _exit_codes():
        from raylearner.jobs import doctor as examination

        num_problems = 0
        for finding in examination.findings():
            num_problems += finding.verdict == "problem"
            typer.echo(f"{finding.verdict:<8} {finding.subject}: {finding.text}")
            if finding.advice:
                typer.echo(f"{'':<8} -> {finding.advice}")
        if num_problems:
            _leave(f"{num_problems} problem{'s' * (num_problems != 1)}", FAILED)


def main() -> None:
    app()


def _load(
    arguments: Sequence[str],
    resume: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
) -> RunConfig:
    """Files and overrides; `environment` is that of the run, where it is known."""
    overrides = [a for a in arguments if "=" in a and not os.path.exists(a)]
    files = [a for a in arguments if a not in overrides]
    if resume is not None:
        saved = resume / "config.yaml"
        if not saved.is_file():
            raise ConfigError(f"--resume {resume}: not a run directory, it has no config.yaml")
        files = [str(saved), *files]
    config = load(files, overrides, environment=environment)
    stop_time_s(config.run, environment or {})
    return config


def _refuse_alone(or_start_over: bool, resume: Path | None) -> None:
    if or_start_over and resume is None:
        raise ConfigError(f"{OR_START_OVER} goes with --resume RUN_DIR; a new run starts anyway")


def _with_run_dir(config: RunConfig, resume: Path | None) -> RunConfig:
    """The run directory made explicit; one that exists is only for `--resume`."""
    if resume is not None:
        folder = resume
    else:
        folder = run_directory.durable(run_directory.named(config.run))
        run_directory.refuse_existing(folder)
        run_directory.refuse_unwritable(folder)
    run = config.run.model_copy(update={"dir": str(folder)})
    return config.model_copy(update={"run": run})


@contextmanager
def _exit_codes() -> Iterator[None]:
    """The one boundary of the command line: errors become a message and an exit code."""
    job_variables.take()
    network.keep_direct()
    try:
        yield
    except KeyboardInterrupt:
        _leave("interrupted", INTERRUPTED)
    except RunStopped as stop:
        _leave(str(stop), STOPPED)
    except typer.Exit:
        raise
    except Exception as error:
        found = list(causes(error))
        said = "\n".join(dict.fromkeys(map(summary, found)))
        if not all(isinstance(cause, RaylearnerError | OSError) for cause in found):
            traceback.print_exception(error)
            _leave(f"failed: {said}", FAILED)
        is_input = all(isinstance(cause, ConfigError) for cause in found)
        _leave(said if is_input else f"the run failed: {said}", BAD_INPUT if is_input else FAILED)


def _leave(message: str, code: int) -> NoReturn:
    typer.echo(visible(message), err=True)
    raise typer.Exit(code) from None
