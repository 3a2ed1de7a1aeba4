"""Texts that a policy may write are read in time that grows with their length, not with its square."""

import time
from collections.abc import Callable

import pytest
from episodes import make_view

from raylearner.config.rewards import AnswerFormat
from raylearner.environments.dialect import JsonDialect, TagDialect
from raylearner.environments.foreign_calls import foreign_form
from raylearner.rewards import built_in
from raylearner.rewards.judge import VerdictForm
from raylearner.text import visible
from raylearner.tools.code_execution import _unfenced

LENGTH = 100_000
MOST_S = 3.0
"""Far beyond what a linear reader takes, far below what a quadratic one did."""


def _format(tag: str | None) -> Callable[[str], object]:
    section = AnswerFormat(kind="answer_format", reasoning_tag=tag)
    return lambda text: built_in.answer_format(make_view(text), section)


def _verdict(text: str) -> None:
    with pytest.raises(ValueError, match=r"score|reasoning"):
        VerdictForm("score", "number").parse(text)


READERS: dict[str, Callable[[str], object]] = {
    "tags": TagDialect({"calculator": "calculator"}).parse,
    "json": JsonDialect(("calculator",)).parse,
    "json with answers": JsonDialect(("calculator",), answer_tag="answer").parse,
    "foreign": lambda text: foreign_form(text, ["calculator"]),
    "format": _format("think"),
    "format without thoughts": _format(None),
    "exact": lambda text: built_in.exact_answer(make_view(text, answers=("4",))),
    "words": lambda text: built_in.f1(make_view(text, answers=("4",)), tag=None),
    "fence": _unfenced,
    "verdict": _verdict,
    "visible": visible,
}
PARTS = [
    "<answer>",
    "<answer>x</answer>",
    "<think>",
    "<tool_call>{",
    "```\n",
    "\n",
    "[{",
    "calculator(",
    "**x",
]


@pytest.mark.parametrize("reader", READERS)
def test_a_malicious_turn_is_parsed_quickly(reader: str) -> None:
    for part in PARTS:
        for head in ("", "```json\n"):
            text = head + part * (LENGTH // len(part)) + "x"
            started = time.perf_counter()
            READERS[reader](text)
            assert time.perf_counter() - started < MOST_S, (head, part)


@pytest.mark.parametrize(
    ("code", "bare"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\n  x\n\n``` ", "  x\n"),
        ("```\n```", ""),
        ("```python print(1)```", "```python print(1)```"),
        ("```\nx", "```\nx"),
        ("x\n```", "x\n```"),
        ("```", "```"),
    ],
)
def test_a_fence_around_code_is_removed(code: str, bare: str) -> None:
    assert _unfenced(code) == bare
