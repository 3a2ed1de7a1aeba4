"""Clean-up that takes every step and keeps the first error."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from raylearner.errors import summary

logger = logging.getLogger(__name__)


async def clean_up(cause: BaseException | None, *steps: Callable[[], Any]) -> None:
    """Take every step in order, coroutine functions included, even where others raise.

    `cause` is the error that ended the work already: failures of steps are then logged. Without
    one, the first failure is raised after the last step.
    """
    failure: Exception | None = None
    for step in steps:
        try:
            result = step()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            failure = _next(failure, error, cause)
    if failure is not None and cause is None:
        raise failure


def clean_up_now(cause: BaseException | None, *steps: Callable[[], object]) -> None:
    """Take every step as `clean_up` does, without coroutines."""
    failure: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            failure = _next(failure, error, cause)
    if failure is not None and cause is None:
        raise failure


def _next(failure: Exception | None, error: Exception, cause: BaseException | None) -> Exception:
    """Return the first failure; log later ones, and all of them if there is a `cause`."""
    if failure is None and cause is None:
        return error
    logger.warning("while ending the run: %s", summary(error))
    return failure or error
