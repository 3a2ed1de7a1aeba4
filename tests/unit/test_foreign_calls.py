"""Calls in the forms of other families are invalid actions; data, code and prose stay answers."""

import json
import logging
import time
from dataclasses import replace

import pytest
from episodes import make_group, make_trajectory, make_turn

from raylearner.config.schema import OpenAiProxy, ToolUse
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.environments.dialect import Answer, Invalid, JsonDialect, TagDialect, ToolCall
from raylearner.observability.action_watch import ActionWatch
from raylearner.types import Message, Prompt, TrajectoryGroup, Turn

JSON = JsonDialect(["weather"])
TAGS = TagDialect({"w": "weather"})
ARGUMENTS = '{"town": "Ayr"}'
OBJECT = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'

CALLS = {
    "bare": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "bare list": f"[{OBJECT}]",
    "nested": f'{{"type": "function", "function": {OBJECT}}}',
    "after prose": f"I look it up.\n{OBJECT}",
    "two lines": f"{OBJECT}\n{OBJECT}",
    "fenced": f"```json\n{OBJECT}\n```",
    "single quotes": "{'name': 'weather', 'arguments': {'town': 'Ayr',}}",
    "not closed": f'{{"name": "weather", "parameters": {ARGUMENTS}',
    "mistral": f"[TOOL_CALLS] [{OBJECT}]",
    "mistral names": f"[TOOL_CALLS]weather{ARGUMENTS}",
    "name before json": f"weather{ARGUMENTS}",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "nemotron": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "kimi": f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}",
    "deepseek": "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>weather\n"
    f"```json\n{ARGUMENTS}\n```<\uff5ctool\u2581call\u2581end\uff5c>",
    "qwen3 coder": "<tool_call>\n<function=weather>\n<parameter=town>\nAyr\n</parameter>\n</function>\n"
    "</tool_call>",
    "function tag": f"<function=weather>{ARGUMENTS}</function>",
    "invoke": '<invoke name="weather">\n<parameter name="town">Ayr</parameter>\n</invoke>',
    "glm": "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Ayr</arg_value>\n</tool_call>",
    "pythonic": '[weather(town="Ayr"), weather(town="Oban")]',
    "one call": 'weather(town="Ayr")',
    "llama": '<|python_tag|>weather.call(town="Ayr")',
    "gemma": '```tool_code\nweather(town="Ayr")\n```',
    "gemma prints": '```tool_code\nprint(weather(town="Ayr"))\n```',
    "bold": '**weather(town="Ayr")**',
    "code span": f"`{OBJECT}`",
    "fenced behind prose": f"I look it up:\n```json\n{OBJECT}\n```",
    "at the end of a line": f"I look it up: {OBJECT}",
    "command r": f'I will look.[\n  {{"tool_name": "weather", "parameters": {ARGUMENTS}}}\n]',
    "deepseek without its tokens": f"function weather\n```json\n{ARGUMENTS}\n```",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    + ARGUMENTS,
    "harmony without its tokens": f"commentary to=functions.weather json{ARGUMENTS}",
    "react": f"Action: weather\nAction Input: {ARGUMENTS}",
    "tag of the name": "<weather>Ayr</weather>",
    "tag and more": "<weather>Ayr</weather> or rather <weather>Oban",
    "one name unknown": f'[{OBJECT}, {{"name": "wind", "arguments": {{}}}}]',
}
ANSWERS = [
    "It has 12 degrees.",
    '{"name": "Paris", "arguments": 3}',
    '{"name": "weather", "value": 12}',
    '{"weather": "sunny", "town": "Ayr"}',
    '["weather", "wind"]',
    "[1, 2, 3]",
    f"Example:\n{OBJECT}\nis what you send to it.",
    f"The service takes {OBJECT} as input.",
    f"Send this:\n```json\n{OBJECT}\n```\nand read what comes.",
    'Use it so:\n```python\nprint(weather(town="Ayr"))\n```',
    '{"name": "weather", "parameters": {"type": "object", "properties": {"town": {}}}}',
    "The call was `[weather(town='Ayr')]`.",
    "weather(town)",
    '{"name": "weather", "parameters": "wind and sun"}',
    'It says: {"name": "weather", "input": "none"}',
    'Use it so:\n```python\nprint(weather(town="Ayr"))\n```\n',
    f"Its form is `{OBJECT}`.",
    'weather(town="Ayr") gave 12 degrees.',
    "def f():\n    return weather(town='Ayr')",
    "weather: 12 degrees",
]


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS)
def test_a_call_in_another_form_is_invalid_and_never_an_answer(text: str) -> None:
    for dialect in (JSON, TAGS, JsonDialect(["weather"], answer_tag="answer")):
        (action,) = dialect.parse(text)
        assert isinstance(action, Invalid)
        assert action.foreign_form
    (action,) = TAGS.parse(f"{text}\n<answer>12</answer>")
    assert isinstance(action, Answer if text.startswith("weather") else Invalid | Answer)


def test_the_form_of_each_dialect_is_foreign_to_the_other() -> None:
    (action,) = TAGS.parse(f"<tool_call>{OBJECT}</tool_call>")
    assert isinstance(action, Invalid)
    assert "<w>...</w>" in action.reason
    assert JSON.parse(f"<tool_call>{OBJECT}</tool_call>") == [ToolCall("weather", {"town": "Ayr"})]
    assert TAGS.parse("<w>Ayr</w>") == [ToolCall("weather", "Ayr")]


@pytest.mark.parametrize("text", ANSWERS)
def test_what_only_looks_like_a_call_is_an_answer(text: str) -> None:
    assert JSON.parse(text) == [Answer(text.strip())]
    assert TAGS.parse(f"<answer>{text}</answer>") == [Answer(text.strip())]


def test_a_turn_of_marks_alone_is_read_in_time() -> None:
    """Reading it took 27 s when every line was tried to the end of the text."""
    begun = time.monotonic()
    assert JSON.parse("```\n" * 20_000 + "weather") == [Answer("```\n" * 20_000 + "weather")]
    assert time.monotonic() - begun < 5.0


def test_an_answer_that_quotes_a_call_between_its_tags_is_an_answer() -> None:
    for dialect in (TAGS, JsonDialect(["weather"], answer_tag="answer")):
        assert dialect.parse(f"so <answer>\n{OBJECT}\n</answer>") == [Answer(OBJECT)]


async def test_the_turn_is_corrected_with_the_expected_form_and_counted() -> None:
    config = ToolUse.model_validate(
        {"kind": "tool_use", "dialect": {"kind": "json"}, "invalid_action_penalty": 0.5}
    )
    environment = EnvironmentFactory(config).make()
    await environment.reset(Prompt(prompt_id="p", messages=()))
    text = json.dumps({"name": "calculator", "parameters": {"expression": "1+1"}})
    reply = await environment.step(Message(role="assistant", content=text))
    assert (reply.is_done, reply.is_valid, reply.tool) == (False, False, None)
    assert reply.foreign_form == "JSON"
    assert JsonDialect.form in reply.messages[0].content
    assert environment.outcome().penalty == 0.5
    assert environment.outcome().metrics["tool_calls"] == 0


def warnings(caplog: pytest.LogCaptureFixture, watch: ActionWatch, *steps: list[Turn]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for turns in steps:
            group: TrajectoryGroup = make_group(make_trajectory(turns=tuple(turns)))
            watch.look([group])
    return [record.getMessage() for record in caplog.records]


def test_the_log_names_another_form_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ActionWatch(OpenAiProxy(kind="openai_proxy", program="a:b"), max_steps=9)
    foreign = replace(make_turn(CALLS["pythonic"], is_valid=False), foreign_form="Python")
    (line,) = warnings(caplog, watch, [foreign, make_turn("x")], [foreign])
    assert "1 of 2 turns" in line
    assert "Python" in line
    assert "<tool_call>" in line


def test_the_log_names_a_policy_that_calls_nothing_once(caplog: pytest.LogCaptureFixture) -> None:
    tools = ToolUse(kind="tool_use")
    silent, calling = [make_turn("x")], [make_turn("x", tool="calculator")]
    (line,) = warnings(caplog, ActionWatch(tools, max_steps=9), *[silent] * 5)
    assert "<calc>" in line
    assert warnings(caplog, ActionWatch(tools, max_steps=9), silent, calling, silent) == []
    assert len(warnings(caplog, ActionWatch(tools, max_steps=1), silent)) == 1


def test_a_correction_names_the_form_of_calls_and_of_answers() -> None:
    (action,) = JsonDialect(["weather"], answer_tag="answer").parse("so I wonder")
    assert isinstance(action, Invalid)
    assert JsonDialect.form in action.reason
    assert "<answer>" in action.reason
