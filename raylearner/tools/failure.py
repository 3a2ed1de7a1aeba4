"""What becomes of a tool's failure: an observation or a failed trajectory, by configuration."""

import logging
from collections.abc import Awaitable
from typing import Literal

from raylearner.errors import ToolError
from raylearner.tools.http import ToolMetrics, timed
from raylearner.tools.protocol import BadArguments, Observation, refused

LOG_EVERY = 100

log = logging.getLogger(__name__)


class FailureRule:
    """Counts a tool's calls and turns its failures into what the section says.

    The policy is told that the tool failed and not how: addresses are no business of its own. The
    log has the whole story of the first failure and of every hundredth.
    """

    def __init__(
        self, name: str, on_failure: Literal["observation", "fail"], metrics: ToolMetrics
    ) -> None:
        self._name = name
        self._on_failure = on_failure
        self._metrics = metrics
        self._num_failures = 0

    async def apply(self, call: Awaitable[Observation]) -> Observation:
        try:
            return await timed(call, self._metrics)
        except BadArguments as error:
            return refused(error)
        except ToolError as error:
            if self._num_failures % LOG_EVERY == 0:
                log.warning(
                    "tool %s failed (%d times so far): %s",
                    self._name,
                    self._num_failures + 1,
                    error,
                )
            self._num_failures += 1
            if self._on_failure == "fail":
                raise
            return Observation(
                text=f"error: {self._name} failed, try again later", is_error=True, is_failure=True
            )
