"""One door for dialogues: rows, examples, environments and programs pass the same check."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raylearner.actors.proxy.chat import ChatRefusal, read_request
from raylearner.config.data import ExampleMessage, FileData
from raylearner.data import load_prompts
from raylearner.data.dialogue import read_dialogue, read_tools, wire
from raylearner.errors import ConfigError, DialogueError
from raylearner.types import Message

USER = {"role": "user", "content": "How is the weather in Ayr?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "Ayr", "at": None}},
}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"sky":"rain"}'}
ASKED = [USER, CALLED, RESULT, {"role": "user", "content": "In one word?"}]
SAID = {"role": "assistant", "content": "Rain."}


def rows(tmp_path: Path, *prompts: object, **keys: Any) -> FileData:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return FileData(kind="jsonl", path=str(path), **keys)


@pytest.mark.parametrize("content", ["", None, "Let me look."])
def test_calls_stay_beside_any_content(tmp_path: Path, content: str | None) -> None:
    called = {**CALLED, "content": content}
    (prompt,) = load_prompts([rows(tmp_path, [USER, called, *ASKED[2:]])])
    (call,) = prompt.messages[1].calls
    assert (call.call_id, call.name) == ("c1", "weather")
    assert json.loads(call.arguments) == {"town": "Ayr", "at": None}
    assert prompt.messages[1].content == (content or "")
    assert prompt.messages[2] == Message(
        role="tool", content='{"sky":"rain"}', call_id="c1", name="weather"
    )


def test_nulls_that_columns_add_to_each_other_are_left_out(tmp_path: Path) -> None:
    other = json.loads(json.dumps(ASKED))
    other[1]["tool_calls"][0]["function"] = {"name": "order", "arguments": {"order": {"id": 17}}}
    table = pa.Table.from_pylist([{"prompt": ASKED}, {"prompt": other}])
    pq.write_table(table, tmp_path / "rows.parquet")
    source = FileData(kind="parquet", path=str(tmp_path / "rows.parquet"))
    prompts = load_prompts([source])
    arguments = [json.loads(p.messages[1].calls[0].arguments) for p in prompts]
    assert arguments == [{"town": "Ayr"}, {"order": {"id": 17}}]
    assert [m.calls for m in prompts[0].messages[2:]] == [(), ()]
    assert prompts[0].messages[0].name is None


def test_json_text_is_read_at_every_level(tmp_path: Path) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": '{"town": "Ayr", "at": null}'}}
    texts = [
        json.dumps(ASKED),
        [USER, {**CALLED, "tool_calls": json.dumps([CALL])}, *ASKED[2:]],
        [USER, {**CALLED, "tool_calls": [call]}, *ASKED[2:]],
    ]
    plain, *others = load_prompts([rows(tmp_path, ASKED, *texts)])
    for other in others:
        assert [wire(m) for m in other.messages] == [wire(m) for m in plain.messages]
        assert other.is_conversational
    for plain_text in ("[1, 2]", "[x for x in y]", '{"sky": "grey"}', '[{"role": "cook"}]'):
        (text,) = load_prompts([rows(tmp_path, plain_text)])
        assert text.messages == (Message(role="user", content=plain_text),)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ASKED)[:-1],
        json.dumps([USER, {"rol": "assistant", "content": "x"}, USER]),
        json.dumps(USER),
        json.dumps([{"content": "x", "role": "usr"}]),
        str([USER]),
        json.dumps([{"from": "human", "value": "x"}]),
    ],
)
def test_a_text_that_is_nearly_the_json_of_messages_is_not_asked_as_it_is(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_prompts([rows(tmp_path, "fine", text)])
    assert "rows.jsonl:2" in str(raised.value)


BAD: list[tuple[list[Any], str]] = [
    ([USER, SAID], "messages[1]"),
    ([{**USER, "role": "usr"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content[0]"),
    ([{**USER, "contents": "x"}], "messages[0].contents"),
    ([{**USER, "weight": 1.0}], "messages[0].weight"),
    ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
    ([{**USER, "tool_call_id": "c1"}], "messages[0].tool_call_id"),
    (["hello"], "messages[0]"),
    ([RESULT, USER], "messages[0]"),
    ([USER, RESULT], "messages[1]"),
    ([USER, CALLED, {**RESULT, "tool_call_id": "c2"}], "messages[2].tool_call_id"),
    ([USER, {**CALLED, "tool_calls": "call"}, RESULT], "messages[1].tool_calls"),
    (
        [USER, {**CALLED, "tool_calls": [{"id": "c1"}]}, RESULT],
        "messages[1].tool_calls[0].function",
    ),
    (
        [USER, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, USER],
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        [USER, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, USER],
        "messages[1].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("messages", "where"), BAD)
def test_every_door_refuses_the_same_and_names_the_place(
    tmp_path: Path, messages: list[Any], where: str
) -> None:
    with pytest.raises(DialogueError) as read:
        read_dialogue(messages)
    assert read.value.where == where
    with pytest.raises(ConfigError) as row:
        load_prompts([rows(tmp_path, "fine", messages)])
    assert "rows.jsonl:2" in str(row.value)
    assert where in str(row.value)
    with pytest.raises(ChatRefusal) as call:
        read_request({"messages": messages})
    assert (call.value.status, call.value.param) == (400, where)


def test_a_last_turn_of_the_assistant_is_continued_by_key_alone(tmp_path: Path) -> None:
    (prompt,) = load_prompts([rows(tmp_path, [USER, SAID], prefill=True)])
    assert prompt.prefill
    assert prompt.messages[-1].content == "Rain."
    for last in (CALLED, {**SAID, "content": ""}):
        with pytest.raises(ConfigError):
            load_prompts([rows(tmp_path, [USER, last], prefill=True)])


def test_examples_pass_the_same_door(tmp_path: Path) -> None:
    source = rows(tmp_path, "fine")
    with pytest.raises(ConfigError) as error:
        load_prompts([source], examples=[ExampleMessage(role="assistant", content="")])
    assert "data.examples" in str(error.value)


def test_schemas_of_tools_are_read_from_json_text_or_refused() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    assert read_tools(json.dumps([tool])) == read_tools([json.dumps(tool)]) == (tool,)
    for bad in ("[", [{"function": {}}], [{"type": "function", "function": {"name": 1}}], {}):
        with pytest.raises(DialogueError):
            read_tools(bad)
