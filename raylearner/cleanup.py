"""Endings that are whole: every step of a clean-up is made, and the first cause stands."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from raylearner.errors import summary

logger = logging.getLogger(__name__)


async def clean_up(cause: BaseException | None, *steps: Callable[[], Any]) -> None:
    """Make every step in order, coroutine functions included, whatever others raise.

    `cause` is what ended the work already: it stands, and failures of steps are logged. Without one,
    the first failure is raised after the last step.
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
    """As `clean_up`, without coroutines."""
    failure: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            failure = _next(failure, error, cause)
    if failure is not None and cause is None:
        raise failure


def _next(failure: Exception | None, error: Exception, cause: BaseException | None) -> Exception:
    """The failure that stands: the first; later ones, and all behind a cause, are logged."""
    if failure is None and cause is None:
        return error
    logger.warning("while ending the run: %s", summary(error))
    return failure or error
