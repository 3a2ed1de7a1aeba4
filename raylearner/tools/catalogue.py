"""Tools by the name that the YAML uses."""

from collections.abc import Callable, Sequence

from raylearner.tools.calculator import Calculator
from raylearner.tools.protocol import Tool

TOOLS: dict[str, Callable[[], Tool]] = {"calculator": Calculator}


def make_tools(names: Sequence[str]) -> list[Tool]:
    return [TOOLS[name]() for name in names]
