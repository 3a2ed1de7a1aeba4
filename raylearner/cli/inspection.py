"""Commands that look and change nothing: `view` and `doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from raylearner.cli.exits import FAILED, exit_codes, leave
from raylearner.errors import ConfigError


def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR",
            help="Run directories, or directories with runs and sweeps in them.",
            show_default=False,
            hidden=True,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Step of the run to open, or to write.", show_default=False),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", help="Local port of the page.", min=1, max=65535)
    ] = 8266,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page with one step of a run to this file, instead of serving all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show runs, trajectories and sweeps in a browser.

    Charts that follow a live run, runs side by side, and trajectories token by token.
    """
    with exit_codes():
        roots = paths or [Path("runs")]
        if output is not None:
            from raylearner.observability.viewer import snapshot

            if len(roots) > 1:
                raise ConfigError("--output: writes a step of one run; name its directory alone")
            snapshot.write(roots[0], output, step=step)
            return
        from raylearner.observability.viewer.server import serve

        def report(address: str) -> None:
            shown = ", ".join(map(str, roots))
            typer.echo(f"{address} shows {shown}; press Ctrl-C to stop", err=True)

        serve(roots, step=step, port=port, on_ready=report)


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
