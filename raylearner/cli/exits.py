"""Exit codes: 0 success, 1 the run failed, 2 invalid input, 130 interrupted, or stopped on request before
the first checkpoint, 143 stopped on request with a checkpoint.
"""

import os
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from raylearner import job_variables, network
from raylearner.credentials import mask
from raylearner.errors import (
    ConfigError,
    RaylearnerError,
    RunStopped,
    StoppedEarly,
    causes,
    summary,
)
from raylearner.text import visible

SUCCESS, FAILED, BAD_INPUT, INTERRUPTED, STOPPED = 0, 1, 2, 130, 143


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors into a message and an exit code, for all commands."""
    job_variables.take()
    network.keep_direct()
    try:
        yield
    except KeyboardInterrupt:
        leave("interrupted", INTERRUPTED)
    except RunStopped as stop:
        leave(str(stop), INTERRUPTED if isinstance(stop, StoppedEarly) else STOPPED)
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not _has_reader():
            raise typer.Exit(SUCCESS) from None  # as in `raylearner sweep FILE --report | head`
        errors = list(causes(error))
        message = "\n".join(dict.fromkeys(map(summary, errors)))
        if not all(isinstance(cause, RaylearnerError | OSError) for cause in errors):
            traceback.print_exception(error)
            leave(f"failed: {message}", FAILED)
        is_input = all(isinstance(cause, ConfigError) for cause in errors)
        leave(
            message if is_input else f"the run failed: {message}", BAD_INPUT if is_input else FAILED
        )


def _has_reader() -> bool:
    """Return whether somebody still reads standard output; if not, what is left of it is thrown away."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError):
        return True
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return False


def leave(message: str, code: int) -> NoReturn:
    """Exit with a message on standard error."""
    typer.echo(mask(visible(message)), err=True)
    raise typer.Exit(code) from None
