"""Lines of the console: what they say, and that a terminal of 80 columns shows them whole."""

import io
import itertools
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from raylearner.observability import logs
from raylearner.observability.lines import (
    LINE_WIDTH,
    amount,
    duration,
    evaluation_lines,
    figures,
    fixed,
    ready_line,
    step_line,
)
from raylearner.observability.logs import ConsoleHandler, fold

VALUES = (0.0, 0.5, -0.123456, 1e-7, 12.3456, 99.96, 1234.5, -98765.4, 3e9, math.nan, None)


def make_metrics(step: int, reward: Any, rate: Any, stale: Any, idle: Any) -> dict[str, Any]:
    return {
        "step": step,
        "rollout/reward/mean": reward,
        "rollout/tokens_per_s": None if rate is None else abs(rate),
        "buffer/staleness/mean": stale,
        "learner/idle_fraction": idle,
        "rollout/idle_fraction": idle,
        "learner/logprob_gap/mean": None if reward is None else abs(reward),
    }


def test_a_step_line_has_reward_throughput_staleness_idle_shares_and_the_remaining_time() -> None:
    metrics = make_metrics(3, 0.5, 1234.0, 1.5, 0.37) | {"rollout/idle_fraction": 0.052}
    line = step_line(metrics, num_steps=60, remaining_s=75.0)
    assert line == "step  3/60  reward 0.500  tok/s 1.2k  stale 1.5  idle 37/5%   ETA 75s"


@pytest.mark.parametrize("num_steps", [9, 60, 999, 5000, 99_999])
def test_lines_fit_and_align_whatever_the_values(num_steps: int) -> None:
    widths: set[int] = set()
    for value, rate, stale in itertools.product(VALUES, VALUES, (0.0, 1.234, 12.5, 345.6, None)):
        metrics = make_metrics(num_steps, value, rate, stale, 1.0)
        line = step_line(metrics, num_steps=num_steps, remaining_s=5e6 if value else None)
        assert len(line) <= LINE_WIDTH
        assert len(figures(metrics)) <= 80
        if value is not None and abs(value) < 1000 and stale != 345.6:
            widths.add(line.index("ETA"))
    assert len(widths) == 1


@pytest.mark.parametrize("remaining_s", [0.0, 59.6, 99.6, 3599.0, 35_999.0, 86_400.0, 8e6])
def test_the_remaining_time_has_at_most_three_characters(remaining_s: float) -> None:
    assert 2 <= len(duration(remaining_s)) <= 3


def test_numbers_keep_what_fits() -> None:
    assert [fixed(value, 5) for value in (0.1234, -0.1234, 12.346, 1.4e-7, math.nan)] == [
        *("0.123", "-0.12", "12.35", "1e-7", "-")
    ]
    assert [amount(value) for value in (0.0, 614.0, 999.6, 1234.0, 56_789.0, 2.5e6)] == [
        *("0", "614", "1.0k", "1.2k", "57k", "2.5M")
    ]


def test_a_group_that_starts_is_counted_by_phase_on_one_line() -> None:
    phases = ["capturing CUDA graphs", "loading weights", "capturing CUDA graphs"]
    line = ready_line("engines", phases, 12)
    assert line == "engines 9/12 ready: 2 capturing CUDA graphs, 1 loading weights"
    assert ready_line("learner ranks", ["compiling"] * 2, 2) == "learner ranks 0/2 ready: compiling"
    many = ready_line("engines", [f"phase number {i} of many" for i in range(9)], 9)
    assert len(many) <= LINE_WIDTH
    assert many.startswith("engines 0/9 ready: 1 phase")
    assert many.endswith("..")


def test_an_evaluation_has_a_line_for_each_of_several_sources() -> None:
    record = {"step": 4, "reward/mean": 0.5, "num_prompts": 3, "errors": 1, "unfinished": 0}
    sources = {"math/reward/mean": None, "math/num_prompts": 1, "qa/num_prompts": 2}
    assert evaluation_lines(record | {"qa/num_prompts": 3}) == [
        "evaluation at step 4: reward 0.500 on 3 prompts, 1 failed"
    ]
    lines = evaluation_lines(record | sources | {"qa/reward/mean": 0.25})
    assert lines[1:] == ["math: reward - on 1 prompt", "qa: reward 0.250 on 2 prompts"]


def test_long_lines_fold_between_words_and_commands_stay() -> None:
    text = f"12:34:56 {'word ' * 30}{'x' * 90}\n  a command {'y' * 90}\nshort"
    lines = fold(text, 80).split("\n")
    assert lines[-2:] == [f"  a command {'y' * 90}", "short"]
    assert [len(line) <= 80 for line in lines[:-2]] == [True] * (len(lines) - 3) + [False]
    assert all(line.startswith(" " * 9) for line in lines[1:-2])
    assert " ".join(" ".join(lines[:-2]).split()) == text.split("\n")[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def test_only_a_terminal_gets_folded_lines_and_none_gets_escapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = type("Size", (), {"columns": 80})
    monkeypatch.setattr(logs.os, "get_terminal_size", lambda _: size)
    for stream, num_lines in ((Terminal(), 2), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stderr", stream)
        shown = logging.LogRecord("x", logging.INFO, "", 0, "engines 1/2", None, None)
        shown.is_in_panel = True
        assert bool(ConsoleHandler().filter(shown)) == (num_lines == 1)
        record = logging.LogRecord("x", logging.INFO, "", 0, "\x1b[2J" + "word " * 20, None, None)
        ConsoleHandler().emit(record)
        text = stream.getvalue()
        assert len(text.rstrip("\n").split("\n")) == num_lines
        assert "\x1b" not in text
        assert "\\x1b[2J" in text


def test_the_console_marks_warnings_and_the_log_file_has_levels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    file = logs.add_file(tmp_path / "log.txt")
    for level in (logging.INFO, logging.WARNING):
        record = logging.LogRecord("x", level, "", 0, "%d groups", (3,), None)
        ConsoleHandler().emit(record)
        file.emit(record)
    logs.remove(file)
    plain, marked = stream.getvalue().splitlines()
    assert plain.endswith(" 3 groups")
    assert "warning" not in plain
    assert marked.endswith(" warning: 3 groups")
    assert "warning:" not in (tmp_path / "log.txt").read_text()
