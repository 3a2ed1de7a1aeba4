"""Warnings, once each, about a policy whose tool calls have an unrecognized format or that never calls a
tool, neither of which raises an error."""

import logging
from collections.abc import Sequence

from raylearner.config.schema import EnvironmentSection, OpenAiProxy, ToolUse
from raylearner.environments.dialect import JSON_FORM
from raylearner.text import visible
from raylearner.types import TrajectoryGroup, Turn

NUM_STEPS = 3
"""Number of steps before the warning about a policy that never called a tool."""
SHOWN_CHARACTERS = 120

logger = logging.getLogger(__name__)


class ActionWatch:
    """Checks the turns of every step; silent if the environment offers no tools."""

    def __init__(self, environment: EnvironmentSection, *, max_steps: int) -> None:
        self._has_tools = isinstance(environment, ToolUse) and bool(environment.tools)
        self._expected = _expected(environment)
        self._num_steps_wanted = min(NUM_STEPS, max_steps)
        self._num_steps = self._num_turns = self._num_called = 0
        self._warned_of_form = self._warned_of_silence = False

    def look(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Logs at most one warning of each kind over the life of this object."""
        turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
        self._num_steps += 1
        self._num_turns += len(turns)
        self._num_called += sum(turn.tool is not None for turn in turns)
        foreign = [turn for turn in turns if turn.foreign_form is not None]
        if foreign and not self._warned_of_form:
            self._warned_of_form = True
            self._warn_of_form(foreign, len(turns))
        is_silent = self._has_tools and self._num_turns > 0 and not self._num_called
        if is_silent and self._num_steps >= self._num_steps_wanted and not self._warned_of_silence:
            self._warned_of_silence = True
            logger.warning(
                "no tool was called in the first %d turns of %d steps; calls are expected as %s; check that"
                " data.system_prompt or the chat template asks for them, and that environment.dialect is"
                " the model's",
                self._num_turns,
                self._num_steps,
                self._expected,
            )

    def _warn_of_form(self, foreign: Sequence[Turn], num_turns: int) -> None:
        logger.warning(
            "%d of %d turns of this step have a tool call in an unrecognized format: %s instead of %s;"
            " such turns are invalid actions, not answers (rollout/foreign_calls/mean); the first one: %s",
            len(foreign),
            num_turns,
            foreign[0].foreign_form,
            self._expected,
            visible(foreign[0].content.strip()[:SHOWN_CHARACTERS]),
        )


def _expected(environment: EnvironmentSection) -> str:
    match environment:
        case ToolUse(dialect=dialect):
            return dialect.describe_calls([tool.tag for tool in environment.tools])
        case OpenAiProxy():
            return JSON_FORM
        case _:
            return "the environment's format"
