"""The calculator is exact, and hostile input costs nothing."""

import pytest

from raylearner.tools.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", "46"),
        ("99*99", "9801"),
        ("3-10", "-7"),
        ("(1+2)*3=", "9"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        ("-4*-5", "20"),
        ("7/7", "1"),
    ],
)
def test_calculate_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "9**9**9",
        "True+1",
        "[1]*10",
        "(" * 100 + "1" + ")" * 100 + "+",
        "1e999+1",
        "abs(3)",
        "'a'*3",
        "x",
        "1;2",
    ],
)
def test_what_is_not_arithmetic_is_an_error_observation(expression: str) -> None:
    assert calculate(expression).startswith("error: ")


def test_division_by_zero_empty_and_long_input_say_so() -> None:
    assert calculate("1/0") == "error: division by zero"
    assert calculate("  ") == "error: empty expression"
    assert "longer than 200" in calculate("1+" * 200 + "1")


def test_digits_stay_bounded() -> None:
    assert calculate("*".join(["9999999999"] * 5)).startswith("error: ")
