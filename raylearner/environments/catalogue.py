"""Environments by the `kind` that the YAML uses."""

from raylearner.config.schema import SingleTurn, ToolUse
from raylearner.environments.protocol import Environment
from raylearner.environments.single_turn import SingleTurnEnvironment
from raylearner.environments.tool_use import ToolUseEnvironment
from raylearner.tools.catalogue import make_tools


def make_environment(config: SingleTurn | ToolUse) -> Environment:
    """A fresh environment for one episode."""
    match config:
        case SingleTurn():
            return SingleTurnEnvironment()
        case ToolUse():
            return ToolUseEnvironment(config, make_tools(config.tools))
