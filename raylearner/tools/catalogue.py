"""Tools by `kind`."""

from raylearner.config.environment import (
    CalculatorTool,
    CodeExecutionTool,
    FunctionTool,
    PageFetchTool,
    PageSearchTool,
    SearchTool,
    ToolSection,
)
from raylearner.tools.calculator import Calculator
from raylearner.tools.code_execution import CodeExecution
from raylearner.tools.function import Function
from raylearner.tools.pages import ImageCheck, PageFetch, PageSearch
from raylearner.tools.search import Search
from raylearner.tools.tool import Tool


def make_tool(section: ToolSection, check_image: ImageCheck | None = None) -> Tool:
    """Make one tool for all episodes of an actor: it owns connections, batches and metrics.

    Raises `ConfigError` when its function cannot be imported or its sandbox cannot isolate.
    """
    match section:
        case CalculatorTool():
            return Calculator(name=section.function_name, tag=section.tag)
        case SearchTool():
            return Search(section)
        case PageSearchTool():
            return PageSearch(section, check_image)
        case PageFetchTool():
            return PageFetch(section, check_image)
        case CodeExecutionTool():
            return CodeExecution(section)
        case FunctionTool():
            return Function(section)
