"""Commands that look and change nothing: `view` and `doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from raylearner.cli.exits import FAILED, exit_codes, leave


def view(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="A run directory.", hidden=True)
    ],
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
    """Show the trajectories of a run in a browser.

    Turns, and tokens with log-probability, mask and policy version.
    """
    with exit_codes():
        from raylearner.observability import viewer

        if output is not None:
            viewer.write(run_dir, output, step=step)
            return
        message = f"http://127.0.0.1:{port} shows {run_dir}; press Ctrl-C to stop"
        viewer.serve(run_dir, step=step, port=port, on_ready=lambda: typer.echo(message, err=True))


def doctor() -> None:
    """Find problems of this machine and its cluster.

    Prints how to fix each.
    """
    with exit_codes():
        from raylearner.jobs import doctor as checks

        num_problems = 0
        for finding in checks.findings():
            num_problems += finding.verdict == "problem"
            typer.echo(f"{finding.verdict:<8} {finding.subject}: {finding.text}")
            if finding.advice:
                typer.echo(f"{'':<8} -> {finding.advice}")
        if num_problems:
            leave(f"{num_problems} problem{'s' * (num_problems != 1)}", FAILED)
