"""Dialects find the pair that counts, and name the fault of a turn that they cannot read."""

import random

import pytest

from raylearner.environments.dialect import (
    Answer,
    Dialect,
    Invalid,
    JsonDialect,
    TagDialect,
    ToolCall,
)
from raylearner.errors import ConfigError

TAGS = {"search": "find", "code": "run"}
FIRST, LAST = TagDialect(TAGS), TagDialect(TAGS, match="last")
ANSWERS = TagDialect(TAGS, precedence="answer")
JSON = JsonDialect(["find", "run"], answer_tag="answer")
WHOLE = JsonDialect(["find"])


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("dialect", "text", "action"),
    [
        (FIRST, "so <search>a b</search>", ToolCall("find", "a b")),
        (FIRST, "<search>a</search><code>b</code>", ToolCall("find", "a")),
        (FIRST, "<code>b</code><search>a</search>", ToolCall("run", "b")),
        (LAST, "<search>a</search><code>b</code>", ToolCall("run", "b")),
        (LAST, "<search>a</search><search>b</search>", ToolCall("find", "b")),
        (LAST, "<search>a <search>b</search>", ToolCall("find", "b")),
        (FIRST, "<search>a <search>b</search>", ToolCall("find", "a <search>b")),
        (FIRST, "</search><search>a</search>", ToolCall("find", "a")),
        (FIRST, "<answer>1</answer><code>x</code>", ToolCall("run", "x")),
        (LAST, "<code>x</code><answer>1</answer>", ToolCall("run", "x")),
        (FIRST, "<answer> 42 </answer>", Answer("42")),
        (FIRST, "<search></search>", ToolCall("find", "")),
        (ANSWERS, "<code>x</code><answer>1</answer>", Answer("1")),
        (TagDialect({}, answer_tag="final"), "<final>x</final>", Answer("x")),
    ],
)
def test_the_pair_that_counts(dialect: Dialect, text: str, action: object) -> None:
    assert dialect.parse(text) == [action]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<search>a", "</search>"),
        ("a</code>", "<code> before"),
        ("hm", "<search>...</search> or <code>...</code>"),
        ("", "<answer>"),
    ],
)
def test_the_correction_of_a_turn_without_an_action_names_the_form(text: str, reason: str) -> None:
    (action,) = FIRST.parse(text)
    assert isinstance(action, Invalid)
    assert reason in action.reason


def test_stop_strings_are_the_closing_tags() -> None:
    assert FIRST.stop == ("</search>", "</code>", "</answer>")
    assert JSON.stop == ("</answer>",)
    assert WHOLE.stop == ()


@pytest.mark.parametrize("tools", [{"answer": "x"}, {"a b": "x"}, {"<x>": "x"}])
def test_bad_tags_are_refused(tools: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        TagDialect(tools)


def test_several_json_calls_come_in_order() -> None:
    text = "I look.\n" + call('{"name": "find", "arguments": {"query": "a"}}')
    text += call('{"name": "run", "arguments": {"code": "print(\\"</b>\\")"}}')
    assert JSON.parse(text) == [
        ToolCall("find", {"query": "a"}),
        ToolCall("run", {"code": 'print("</b>")'}),
    ]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "find"}', {}),
        ('{"name": "find", "arguments": "{\\"query\\": 1}"}', {"query": 1}),
        ('{"name": "find", "parameters": {"query": "a"}}', {"query": "a"}),
    ],
)
def test_usual_variants_of_json_calls_are_read(body: str, arguments: dict[str, object]) -> None:
    assert JSON.parse(call(body)) == [ToolCall("find", arguments)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "find", "arguments": {"query": "a" "b"}}', "Expecting ',' delimiter"),
        ("{'name': 'find'}", "character 1"),
        ("", "JSON"),
        ("[1]", 'list; expected {"name": .., "arguments": {..}}'),
        ("3", "a JSON number"),
        ('{"arguments": {}}', "has no name"),
        ('{"name": 3}', "has no name"),
        ('{"name": "fly"}', "'fly'; there is find, run"),
        ('{"name": "find", "arguments": [1]}', "find are a JSON list"),
        ('{"name": "find", "arguments": null}', "find are a JSON null"),
        ('{"name": "find", "arguments": "a"}', "find are text"),
        ("[" * 100_000, "JSON"),
        ('{"name": ' + "9" * 10_000 + "}", "JSON"),
    ],
)
def test_the_correction_of_malformed_json_names_the_fault(body: str, reason: str) -> None:
    (action,) = JSON.parse(call(body))
    assert isinstance(action, Invalid)
    assert reason in action.reason
    assert len(action.reason) < 300


def test_one_bad_call_among_good_ones_is_named_by_its_number() -> None:
    first, second = JSON.parse(call('{"name": "find"}') + call("{"))
    assert first == ToolCall("find", {})
    assert isinstance(second, Invalid)
    assert second.reason.startswith("tool call 2 ")


def test_a_call_that_the_stop_string_cut_is_read() -> None:
    assert JSON.parse('<tool_call>{"name": "find"}') == [ToolCall("find", {})]
    (action,) = JSON.parse('<tool_call>{"name": "fi')
    assert isinstance(action, Invalid)


def test_reasoning_is_not_parsed() -> None:
    text = "<think>maybe " + call('{"name": "run"}') + "</think>" + call('{"name": "find"}')
    assert JSON.parse(text) == [ToolCall("find", {})]
    assert WHOLE.parse("<think>a</think> b ") == [Answer("b")]
    assert isinstance(WHOLE.parse("<think>endless " + call('{"name": "find"}'))[0], Invalid)


def test_without_an_answer_tag_a_turn_without_calls_is_the_answer() -> None:
    assert WHOLE.parse(" 42 ") == [Answer("42")]
    assert isinstance(WHOLE.parse(" ")[0], Invalid)
    assert JSON.parse("so <answer>42</answer>") == [Answer("42")]
    assert isinstance(JSON.parse("42")[0], Invalid)


def test_calls_beyond_the_limit_are_not_run() -> None:
    actions = JsonDialect(["find"], max_calls=2).parse(call('{"name": "find"}') * 5)
    assert actions[:2] == [ToolCall("find", {})] * 2
    assert isinstance(actions[2], Invalid)
    assert len(actions) == 3


@pytest.mark.parametrize("dialect", [FIRST, LAST, JSON, WHOLE])
def test_any_text_of_a_policy_gives_an_action(dialect: Dialect) -> None:
    source = random.Random(0)
    pieces = ["<search>", "</search>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "{"]
    pieces += ['{"name": "find"', "}", "<think>", "</think>", "x", '"', "\\", "\n", "é", "\x00"]
    for _ in range(3000):
        text = "".join(source.choices(pieces, k=source.randrange(12)))
        assert dialect.parse(text)
