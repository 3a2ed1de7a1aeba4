"""Exact integer and decimal arithmetic on `+ - * / ( )`, safe on hostile input."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from raylearner.tools.tool import Arguments, Observation, Tool, function_schema, text_argument
from raylearner.types import Prompt

MAX_EXPRESSION_CHARACTERS = 200
MAX_DIGITS = 40

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
}


class Calculator(Tool):
    """Answers `84` to `<calc>12*(3+4)</calc>`, and `error: why` to text that is not an
    expression."""

    def __init__(self, *, name: str = "calculator", tag: str = "calc") -> None:
        super().__init__(name, tag)

    @property
    def schema(self) -> dict[str, Any]:
        return function_schema(
            self.name,
            "Computes an expression of numbers with + - * / and parentheses, exactly.",
            {"expression": {"type": "string", "description": "For instance 12*(3+4)."}},
        )

    async def _call(self, arguments: Arguments, prompt: Prompt) -> Observation:
        text = calculate(text_argument(arguments, "expression"))
        return Observation(text=text, is_error=text.startswith("error:"))


def calculate(expression: str) -> str:
    """Return the value of `expression` in plain digits, or `error: why`.

    Fractions that do not end are rounded to ten decimals. There is no power operator, so sizes stay
    bounded by the expression's length.
    """
    text = expression.strip().removesuffix("=").strip()
    if not text:
        return "error: empty expression"
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        return f"error: expression longer than {MAX_EXPRESSION_CHARACTERS} characters"
    try:
        tree = ast.parse(text, mode="eval")
        value = _evaluate(tree.body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return "error: not an arithmetic expression"
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10f}".rstrip("0").rstrip(".")


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("not a number")
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_evaluate(left), _evaluate(right)))
        case _:
            raise ValueError("not arithmetic")


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise OverflowError("too many digits")
    return value
