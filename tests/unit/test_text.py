"""Text from outside: whatever a model, a service or users' code writes, an episode is kept and shown."""

import asyncio
import io
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kits import make_claim, make_kit, make_renderer
from pydantic import TypeAdapter
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raylearner.actors.engines.scripted import RandomTokens
from raylearner.actors.episode import play_episode
from raylearner.actors.proxy.chat import read_request
from raylearner.config.schema import CompletionsSection, FileData, ObservabilitySection
from raylearner.data.table import table_prompts
from raylearner.environments.dialect import JsonDialect, ToolCall
from raylearner.environments.protocol import Outcome, Reply
from raylearner.errors import ToolError
from raylearner.learner.batch.pack import pack
from raylearner.observability import completions, logs
from raylearner.observability.display import Display
from raylearner.observability.recorder import Recorder
from raylearner.observability.rollout_metrics import rollout_metrics
from raylearner.observability.sinks.tensorboard import TensorBoardFile
from raylearner.rewards.functions import RewardLog
from raylearner.text import as_metrics, encodable, encodable_json, encodable_values, visible
from raylearner.tokenization.template import template_message
from raylearner.tools.tool import Observation
from raylearner.types import (
    EpisodeScore,
    Message,
    Prompt,
    Sampling,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)

HALF = "half \ud83d here"
CLEANED = "half \ufffd here"
METRICS: dict[str, Any] = {
    "reward/mean": math.nan,
    "reward/max": math.inf,
    "area/with space & <b>": 1,
    "count": 9007199254740993,
    "list": [1, 2],
    "flag": True,
    "none": None,
    "huge": 10**400,
    "half \ud83d": 2.0,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HALF, CLEANED),
        ("\udc00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ufeffa\x00b \U0001f600 é", "\ufeffa\x00b \U0001f600 é"),
        ("end \ud83d", "end \ufffd"),
    ],
)
def test_halves_of_surrogate_pairs_are_replaced_and_nothing_else(text: str, expected: str) -> None:
    assert encodable(text) == expected
    assert encodable(expected) is expected


def test_values_are_cleaned_however_deep_and_kept_where_they_are_clean() -> None:
    dirty = {"a\ud83d": [HALF, (HALF, 1)], "b": {"c": None}}
    assert encodable_values(dirty) == {"a\ufffd": [CLEANED, (CLEANED, 1)], "b": {"c": None}}
    clean = {"a": ["x", ("y", 1)], "b": {"c": b"\xff"}}
    assert encodable_values(clean) is clean


@pytest.mark.parametrize("content", [b'["a \\ud83d b"]', b'["a \xed\xa0\xbd b"]'])
def test_replies_of_services_are_read_with_half_a_pair_in_them(content: bytes) -> None:
    reader = TypeAdapter(list[str])
    assert reader.validate_json(encodable_json(content)) == ["a \ufffd b"]
    assert reader.validate_json(encodable_json(b'["\\ud83d\\ude00"]')) == ["\U0001f600"]
    assert encodable_json(b"no JSON \\ud83d") == b"no JSON \\ud83d"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("nul \x00 bell \x07 line\u2028sep", r"nul \x00 bell \x07 line\u2028sep"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("over\rwritten \x9b31m", r"over\x0dwritten \x9b31m"),
        ("two\n\tlines é 👩\u200d🔬", "two\n\tlines é 👩\u200d🔬"),
        (HALF, r"half \ud83d here"),
    ],
)
def test_a_terminal_is_shown_control_characters_written_out(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_whatever_is_made_of_text_from_outside_can_be_encoded() -> None:
    message = Message(role="user", content=HALF)
    prompt = Prompt(
        prompt_id=HALF, messages=(message,), answer=HALF, columns={HALF: [{"deep": HALF}]}
    )
    score = EpisodeScore(columns={HALF: HALF}, metrics={HALF: 1.0})
    shown = Observation(text=HALF, ids=(HALF,))
    assert message.content == CLEANED
    assert (prompt.prompt_id, prompt.answer) == (CLEANED, CLEANED)
    assert prompt.columns == {CLEANED: [{"deep": CLEANED}]}
    assert (score.columns, score.metrics) == ({CLEANED: CLEANED}, {CLEANED: 1.0})
    assert (shown.text, shown.ids) == (CLEANED, (CLEANED,))


def test_half_a_pair_in_the_arguments_of_a_call_reaches_the_tool_encodable() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"q": "\\ud83d"}}</tool_call>'
    in_text = '<tool_call>{"name": "f", "arguments": "{\\"q\\": \\"\\\\ud83d\\"}"}</tool_call>'
    for written in (text, in_text):
        assert JsonDialect(("f",)).parse(written) == [ToolCall("f", {"q": "\ufffd"})]


def test_half_a_pair_in_a_call_of_a_program_reaches_the_template_encodable() -> None:
    called = {"name": "f\ud83d", "arguments": '{"q": "\\ud83d"}'}
    request = read_request(
        {
            "messages": [
                {"role": "user", "content": HALF},
                {"role": "assistant", "tool_calls": [{"id": "1", "function": called}]},
                {"role": "tool", "content": HALF, "tool_call_id": "1"},
            ]
        }
    )
    first, second, third = map(template_message, request.messages)
    assert (first["content"], third["content"]) == (CLEANED, CLEANED)
    (made,) = second["tool_calls"]
    assert made["function"] == {"name": "f\ufffd", "arguments": {"q": "\ufffd"}}


def test_rows_with_half_a_pair_are_read_and_those_nested_too_deeply_are_named(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": HALF, "answer": HALF, "note": {"x": HALF}}) + "\n")
    (prompt,) = table_prompts(FileData(kind="jsonl", path=str(file)))
    assert (prompt.messages[0].content, prompt.answer) == (CLEANED, CLEANED)
    assert prompt.columns == {"note": {"x": CLEANED}}


def test_metrics_that_are_not_finite_numbers_are_kept_as_nan_under_their_names() -> None:
    metrics = as_metrics(METRICS)
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    assert finite == {
        "area/with space & <b>": 1.0,
        "count": 9007199254740992.0,
        "flag": 1.0,
        "half \ufffd": 2.0,
    }
    assert set(metrics) - set(finite) == {"reward/mean", "reward/max", "list", "none", "huge"}
    log = RewardLog("f", 1)
    for name, value in METRICS.items():
        log.metric(name, value)
    assert sum(math.isfinite(value) for value in log.metrics.values()) == 4


def test_a_penalty_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="penalty"):
        Outcome(penalty=math.nan)


class _Hostile:
    """An environment whose texts, names and numbers are what no writer expects."""

    stop = ()
    tool_schemas = ()

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails
        self._num_turns = 0

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        return [Message(role="user", content=f"{HALF} \x1b[2J")]

    async def step(self, message: Message) -> Reply:
        self._num_turns += 1
        if self._num_turns > 1 and self._fails:
            raise ToolError(f"{HALF} \x1b[2J [/red]")
        return Reply(
            messages=(Message(role="tool", content=HALF),),
            is_done=self._num_turns > 1,
            tool=f"tool {HALF}",
        )

    def outcome(self) -> Outcome:
        return Outcome(metrics=METRICS, shown=(HALF,))

    async def close(self) -> None: ...


def played(folder: Path, *, fails: bool) -> Trajectory:
    kit = make_kit(
        make_renderer(folder),
        RandomTokens(vocab_size=200, max_tokens=5),
        make_environment=lambda: _Hostile(fails=fails),
    )
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="-"),), answer="1")
    (segment,) = asyncio.run(
        play_episode(kit, make_claim(prompt, sample_index=int(fails)), Sampling(max_tokens=64))
    )
    return segment


def test_a_hostile_episode_is_packed_recorded_and_logged(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, failed = (played(tokenizer_folder, fails=fails) for fails in (False, True))
    assert good.stop_reason is StopReason.END
    assert failed.error is not None
    assert failed.error.startswith("tool: ")
    group = TrajectoryGroup(
        group_id=1, prompt_id="p", policy_version=2, trajectories=(good, failed)
    )
    pack([group], policy_version=2, num_ranks=1, max_tokens_per_micro_batch=512)
    metrics = rollout_metrics([group], [])
    assert metrics["rollout/logged/area/with space & <b>/mean"] == 1.0
    assert "rollout/logged/reward/max/mean" not in metrics
    assert metrics["rollout/logged_non_finite"] == 5.0 * len([good, failed])
    config = ObservabilitySection(
        tensorboard=False, completions=CompletionsSection(every_steps=1, log=True)
    )
    handler = logs.ConsoleHandler()
    logging.getLogger("raylearner").addHandler(handler)
    logging.getLogger("raylearner").setLevel(logging.INFO)
    try:
        sink = TensorBoardFile(tmp_path / "tensorboard", hparams={"a\ud83d": HALF})
        with Recorder(tmp_path / "run", config, num_steps=1, sinks=[sink]) as recorder:
            recorder.step(1, {**metrics, "learner/large": 1e300})
            recorder.trajectories(1, [good, failed], policy_version=2)
    finally:
        logging.getLogger("raylearner").removeHandler(handler)
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    for shown in (log, capsys.readouterr().err):
        assert "\x1b" not in shown
        assert r"\x1b[2J" in shown
        assert "reward/max: a value logged at step 1" in shown
    (row,) = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert row["observability/non_finite"] == 0
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    assert "rollout/logged/area/with space & <b>/mean" in tags
    assert "learner/large" not in tags
    assert all(math.isfinite(accumulator.Scalars(tag)[0].value) for tag in tags)


def test_the_table_of_completions_takes_names_and_texts_for_what_they_are() -> None:
    row = {"[/b] x": "[bold red]not a style[/nope]", "[red]": "\ud83d latvec[0]"}
    assert "[/b] x" in completions.plain([row])
    assert "[bold red]not a style[/nope]" in completions.plain([row])


def test_a_live_display_prints_log_lines_with_markup_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = Display(num_steps=2, console=Console(file=terminal, force_terminal=True, width=200))
    handler = logs.ConsoleHandler()
    record = logging.LogRecord(
        "raylearner", logging.INFO, "", 0, "%s", ("[/b] [red]x[/nope] \x1b[2J",), None
    )
    with display.stage("[/b] stage"):
        handler.emit(record)
    display.close()
    assert r"[/b] [red]x[/nope] \x1b[2J" in terminal.getvalue()
