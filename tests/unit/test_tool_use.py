"""The tool-use environment: precedence, corrections, the last turn, counts."""

import pytest

from raylearner.config.schema import ToolUse
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.environments.tool_use import ToolUseEnvironment
from raylearner.errors import ConfigError
from raylearner.types import Message, Prompt, StopReason

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="12+34="),), answer="46")


async def make_environment(**settings: object) -> ToolUseEnvironment:
    config = ToolUse.model_validate({"kind": "tool_use", **settings})
    environment = EnvironmentFactory(config).make()
    assert isinstance(environment, ToolUseEnvironment)
    await environment.reset(PROMPT)
    return environment


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def cut(text: str) -> Message:
    return Message(role="assistant", content=text, is_cut=True)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


async def test_a_call_is_answered_in_the_observation_tag() -> None:
    environment = await make_environment()
    assert environment.stop == ("</calc>", "</answer>")
    reply = await environment.step(says("so <calc>12+34</calc>"))
    assert [m.content for m in reply.messages] == ["<result>46</result>"]
    assert (reply.is_done, reply.tool, reply.is_valid) == (False, "calculator", True)


async def test_an_answer_ends_the_episode() -> None:
    environment = await make_environment()
    reply = await environment.step(says("<answer>46</answer>"))
    assert (reply.is_done, reply.stop_reason, reply.messages) == (True, StopReason.ANSWER, ())
    assert environment.outcome().metrics == {
        "turns": 1.0,
        "valid_actions": 1.0,
        "tool_calls": 0.0,
        "failed_tool_calls": 0.0,
        "finished": 1.0,
    }


@pytest.mark.parametrize(("match", "result"), [("first", "2"), ("last", "4")])
async def test_the_dialect_decides_which_pair_counts(match: str, result: str) -> None:
    environment = await make_environment(dialect={"kind": "tags", "match": match})
    reply = await environment.step(says("<calc>1+1</calc><calc>2+2</calc>"))
    assert reply.messages[0].content == f"<result>{result}</result>"


async def test_an_invalid_action_is_corrected_counted_and_its_penalty_not_shown() -> None:
    environment = await make_environment(invalid_action_penalty=0.25)
    reply = await environment.step(says("hm"))
    assert reply.is_valid is False
    assert "<calc>...</calc>" in reply.messages[0].content
    assert "0.25" not in reply.messages[0].content
    await environment.step(says("<answer>46</answer>"))
    assert environment.outcome().penalty == 0.25


async def test_after_max_turns_one_last_turn_runs_no_tool() -> None:
    environment = await make_environment(max_turns=1)
    assert (await environment.step(says("<calc>1+1</calc>"))).is_done is False
    assert environment.is_last_turn
    last = await environment.step(says("<calc>2+2</calc>"))
    assert (last.is_done, last.stop_reason, last.messages) == (True, StopReason.MAX_TURNS, ())
    assert environment.outcome().metrics["tool_calls"] == 1.0


async def test_the_last_turn_may_answer() -> None:
    environment = await make_environment(max_turns=1)
    await environment.step(says("<calc>1+1</calc>"))
    assert (await environment.step(says("<answer>2</answer>"))).stop_reason is StopReason.ANSWER


async def test_json_calls_of_one_turn_are_answered_in_order() -> None:
    environment = await make_environment(dialect={"kind": "json"})
    reply = await environment.step(says(CALL % "1+1" + CALL % "2*3" + "<tool_call>{</tool_call>"))
    contents = [m.content for m in reply.messages]
    assert contents[:2] == ["<result>2</result>", "<result>6</result>"]
    assert "JSON" in contents[2]
    assert {m.role for m in reply.messages} == {"tool"}
    assert [m.name for m in reply.messages] == ["calculator", "calculator", None]
    ids = {m.call_id or "" for m in reply.messages}
    assert len(ids) == 3
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert reply.tool == "calculator,calculator"
    assert environment.tool_schemas[0]["function"]["name"] == "calculator"


def test_two_tools_of_one_tag_are_refused() -> None:
    tools = [{"kind": kind, "url": "http://127.0.0.1:9"} for kind in ("search", "page_search")]
    with pytest.raises(ConfigError, match="tag 'search'"):
        EnvironmentFactory(ToolUse.model_validate({"kind": "tool_use", "tools": tools}))


@pytest.mark.parametrize("dialect", ["tags", "json"])
@pytest.mark.parametrize("text", ["<calc>12+3", '<tool_call>{"name": "calcu', "so I", ""])
async def test_a_turn_that_its_length_cut_is_neither_valid_nor_invalid(
    text: str, dialect: str
) -> None:
    environment = await make_environment(
        dialect={"kind": dialect}, invalid_action_penalty=0.25, max_turns=1
    )
    reply = await environment.step(cut(text))
    assert (reply.is_done, reply.is_valid, reply.tool) == (False, True, None)
    assert "token limit" in reply.messages[0].content
    assert "closed" not in reply.messages[0].content
    last = await environment.step(cut(text))
    assert (last.is_done, last.stop_reason) == (True, StopReason.MAX_TOKENS)
    outcome = environment.outcome()
    assert outcome.penalty == 0
    assert (outcome.metrics["valid_actions"], outcome.metrics["turns"]) == (0, 2)


async def test_complete_parts_of_a_cut_turn_count() -> None:
    environment = await make_environment(dialect={"kind": "json"})
    reply = await environment.step(cut(CALL % "1+1" + "\n<tool_call>{"))
    assert [m.content for m in reply.messages] == ["<result>2</result>"]
    assert (reply.is_valid, reply.tool) == (True, "calculator")
    wrong = await environment.step(cut("<tool_call>{no}</tool_call> so"))
    assert wrong.is_valid is False
    assert (await environment.step(cut("<answer>2</answer>"))).stop_reason is StopReason.ANSWER


async def test_an_answer_without_a_tag_that_was_cut_is_not_whole() -> None:
    environment = await make_environment(dialect={"kind": "json", "answer_tag": None})
    reply = await environment.step(cut("The answer is 4"))
    assert (reply.is_done, reply.stop_reason) == (True, StopReason.MAX_TOKENS)
    assert environment.outcome().metrics["finished"] == 0


def json_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("tags", "<calc></calc>"),
        ("json", json_call("{}")),
        ("json", json_call('{"expression": {"$ne": 1}}')),
        ("json", json_call('{"expression": 3}')),
        ("json", json_call('{"expression": " "}')),
        ("json", json_call('{"x": "1"}')),
    ],
)
async def test_wrong_arguments_are_an_invalid_action_and_no_call(dialect: str, text: str) -> None:
    config = ToolUse.model_validate(
        {"kind": "tool_use", "dialect": {"kind": dialect}, "invalid_action_penalty": 0.5}
    )
    factory = EnvironmentFactory(config)
    environment = factory.make()
    await environment.reset(PROMPT)
    reply = await environment.step(says(text))
    assert (reply.is_valid, reply.tool) == (False, None)
    assert "expression" in reply.messages[0].content or "unknown" in reply.messages[0].content
    outcome = environment.outcome()
    assert outcome.penalty == 0.5
    assert (outcome.metrics["tool_calls"], outcome.metrics["failed_tool_calls"]) == (0, 0)
    assert factory.drain_metrics()["tools/calculator/errors"] == 0
