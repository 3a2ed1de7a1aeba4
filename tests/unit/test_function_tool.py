"""A user's function becomes a tool: schema, validated arguments, failures."""

import asyncio
import pickle
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from kits import PROMPT as SUM
from kits import Says, make_kit, make_renderer
from pydantic import Field, TypeAdapter
from replays import claim, make_buffer

from raylearner.actors.episode import play_episode
from raylearner.codec import EpisodeBatch
from raylearner.config.environment import EnvironmentSection, FunctionTool
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.environments.protocol import Outcome, Reply
from raylearner.errors import ConfigError, ToolError, TooManyFailures
from raylearner.tools.function import Function
from raylearner.tools.tool import Observation
from raylearner.types import Message, Prompt, Sampling, StopReason

PROMPT = Prompt(prompt_id="p-1", messages=(), doc_id="doc-1")


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


async def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tells the weather.

    A second paragraph.
    """
    await asyncio.sleep(0)
    return {"city": city, "unit": unit, "temperature": 21}


def multiply(a: int, b: int) -> int:
    return a * b


def shout(text: str) -> str:
    return text.upper()


def first(items: list[int]) -> int:
    return items[0]


def scoped(question: str, prompt: Prompt, *, key: str) -> str:
    return f"{question} {prompt.doc_id} {key}"


def limited(number: Annotated[int, Field(ge=0, le=9, description="One digit.")]) -> int:
    return number


def breaks(text: str) -> str:
    raise KeyError(text)


def exits(text: str) -> str:
    raise TimeoutError(text)


def sleeps(text: str) -> str:
    time.sleep(0.5)
    return text


def pictures() -> Observation:
    return Observation(text="see", images=(b"x",), ids=("1",))


def nothing() -> None:
    return None


def many(*values: int) -> int:
    return sum(values)


def strange(value: asyncio.Event) -> str:
    return str(value)


@pytest.fixture(autouse=True)
def module() -> Iterator[None]:
    """This file's functions under a name that can be imported."""
    made = types.ModuleType("tools_of_a_user")
    for name, value in globals().items():
        if callable(value):
            setattr(made, name, value)
    sys.modules["tools_of_a_user"] = made
    yield
    del sys.modules["tools_of_a_user"]


def make(name: str, **settings: Any) -> Function:
    section = {"kind": "function", "function": f"tools_of_a_user:{name}", **settings}
    return Function(FunctionTool.model_validate(section))


def test_signature_and_docstring_become_the_schema() -> None:
    assert make("weather").schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.\n\nA second paragraph.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                },
                "required": ["city"],
            },
        },
    }
    digit = make("limited").schema["function"]["parameters"]["properties"]["number"]
    assert digit == {"type": "integer", "minimum": 0, "maximum": 9, "description": "One digit."}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("add", {"a": "2"}, "3"),
        ("add", '{"a": 2, "b": 40}', "42"),
        ("weather", {"city": "Oslo"}, '{"city": "Oslo", "unit": "C", "temperature": 21}'),
        ("shout", "a {b}", "A {B}"),
        ("shout", '"quoted"', '"QUOTED"'),
        ("first", "[7, 8]", "7"),
        ("nothing", "", ""),
        ("nothing", {}, ""),
    ],
)
async def test_calls_of_both_dialects(name: str, arguments: Any, text: str) -> None:
    observation = await make(name).call(arguments, prompt=PROMPT)
    assert (observation.text, observation.is_error) == (text, False)


async def test_the_prompt_and_configured_arguments_are_not_the_policys() -> None:
    tool = make("scoped", arguments={"key": "k"})
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["question"]
    assert (await tool.call("q", prompt=PROMPT)).text == "q doc-1 k"
    refused = await tool.call({"question": "q", "key": "mine"}, prompt=PROMPT)
    assert refused.is_error


async def test_an_observation_is_passed_on() -> None:
    assert (await make("pictures").call({}, prompt=PROMPT)).images == (b"x",)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("add", {}, "error: a: Field required"),
        ("add", {"a": "x"}, "error: a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "error: c: Extra inputs are not permitted"),
        ("add", "x", "error: a: Input should be a valid integer"),
        ("multiply", "3", "error: expected a JSON object with a, b"),
        ("limited", {"number": 10}, "error: number: Input should be less than or equal to 9"),
        ("first", "x", "error: items: Input should be a valid list"),
        ("weather", {"city": "Oslo", "unit": "K"}, "error: unit: Input should be 'C' or 'F'"),
    ],
)
async def test_bad_arguments_are_observations(name: str, arguments: Any, said: str) -> None:
    observation = await make(name, on_failure="fail").call(arguments, prompt=PROMPT)
    assert observation.is_error
    assert observation.text.startswith(said)


@pytest.mark.parametrize(
    ("name", "said"), [("breaks", "raised KeyError: 'x'"), ("exits", "raised TimeoutError: x")]
)
async def test_an_exception_is_a_tool_error_or_an_observation(name: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        await make(name, on_failure="fail").call("x", prompt=PROMPT)
    observation = await make(name).call("x", prompt=PROMPT)
    assert observation.text == f"error: {name} failed, try again later"
    assert observation.is_failure
    assert said in observation.cause


class Reports:
    """An environment of users, with a tool of its own that fails."""

    stop = ()
    tool_schemas = ()

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        return prompt.messages

    async def step(self, message: Message) -> Reply:
        return Reply(is_done=True)

    def outcome(self) -> Outcome:
        metrics = {"calls/browse": 2.0, "failures/browse": 2.0}
        return Outcome(metrics=metrics, tool_errors={"browse": "KeyError: no such page"})

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("environment", "name", "error"),
    [
        (
            {
                "kind": "tool_use",
                "tools": [{"kind": "function", "function": "tools_of_a_user:breaks"}],
            },
            "breaks",
            "raised KeyError",
        ),
        ({"kind": "custom", "path": "tools_of_a_user:Reports"}, "browse", "no such page"),
    ],
)
async def test_a_tool_that_keeps_failing_ends_the_run_with_its_name_and_error(
    tokenizer_folder: Path, environment: dict[str, Any], name: str, error: str
) -> None:
    section = TypeAdapter[EnvironmentSection](EnvironmentSection).validate_python(environment)
    factory, renderer = EnvironmentFactory(section), make_renderer(tokenizer_folder)
    buffer = make_buffer(prompts=[SUM], error_window=4)
    for each in claim(buffer, 4):
        script = Says(renderer, [f"<{name}>x</{name}>", "<answer>46</answer>"])
        kit = make_kit(renderer, script, make_environment=factory.make)
        episode = await play_episode(kit, each, Sampling(max_tokens=64))
        assert episode[0].stop_reason is not StopReason.ERROR
        # As it arrives at the replay.
        [received] = pickle.loads(pickle.dumps(EpisodeBatch([episode])))
        assert buffer.put(received) == "accepted"
    with pytest.raises(TooManyFailures) as caught:
        buffer.take(1, 0)
    for part in (f"'{name}'", error, "replay.max_tool_failure_fraction"):
        assert part in str(caught.value)


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


async def test_a_value_that_is_not_json_is_a_tool_error() -> None:
    with pytest.raises(ToolError) as caught:
        await make("circular", on_failure="fail").call({}, prompt=PROMPT)
    assert "tools_of_a_user:circular" in str(caught.value)


async def test_a_call_past_its_time_is_a_tool_error() -> None:
    tool = make("sleeps", on_failure="fail", timeout_s=0.05)
    with pytest.raises(ToolError, match=r"0\.05 s"):
        await tool.call("x", prompt=PROMPT)
    await tool.close()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_colon", "no_colon"),
        ("no_such_module_x:f", "no_such_module_x"),
        ("tools_of_a_user:missing", "missing"),
        ("math:pi", "math:pi"),
        ("tools_of_a_user:many", "many"),
        ("tools_of_a_user:strange", "strange"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Function(FunctionTool(kind="function", function=path))


def test_an_argument_that_the_function_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="'c'"):
        make("add", arguments={"c": 1})
