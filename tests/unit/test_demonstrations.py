"""Demonstrations: the configured turns, played in the real environment and masked like sampled tokens."""

from dataclasses import replace

import pytest

from raylearner.config.schema import (
    CalculatorData,
    OpenAiProxy,
    RendererSection,
    TinyModel,
    ToolUse,
    WarmStart,
)
from raylearner.data import load_prompts
from raylearner.errors import ConfigError
from raylearner.tiny.demonstrations import demonstrate
from raylearner.tiny.model import make_tiny_model
from raylearner.tokenization.renderer import Renderer
from raylearner.types import StopReason

PROMPTS = load_prompts([CalculatorData(kind="calculator", num_prompts=20)])


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = make_tiny_model(TinyModel(kind="tiny"), tmp_path_factory.mktemp("tiny"), seed=0)
    return Renderer.from_pretrained(str(folder), RendererSection())


async def written(renderer: Renderer, **changes: object) -> list[tuple[str, str]]:
    """The whole text of each demonstration, and the demonstrator's part of it."""
    config = WarmStart.model_validate({"num_demonstrations": 30, **changes})
    played = await demonstrate(PROMPTS, renderer, ToolUse(kind="tool_use"), config, seed=0)
    return [
        (
            renderer.decode(trajectory.token_ids.tolist()),
            renderer.decode(trajectory.token_ids[trajectory.loss_mask].tolist()),
        )
        for trajectory in played
    ]


async def test_the_right_way_calls_the_tool_and_copies_its_result(renderer: Renderer) -> None:
    answers = {str(p.columns["expression"]): p.answer for p in PROMPTS}
    for whole, own in await written(renderer, right_fraction=1.0):
        expression = own.removeprefix("<calc>").partition("</calc>")[0]
        answer = answers[expression]
        assert own == f"<calc>{expression}</calc><answer>{answer}</answer>"
        assert f"<result>{answer}</result>" in whole


async def test_a_share_guesses(renderer: Renderer) -> None:
    found = await written(renderer, num_demonstrations=200, right_fraction=0.25)
    num_right = sum("<calc>" in own for _, own in found)
    assert 30 <= num_right <= 70
    again = await written(renderer, num_demonstrations=200, right_fraction=0.25)
    assert again == found


async def test_a_missing_column_is_named(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"nonsense.* answer, expression"):
        await written(renderer, right_fraction=1.0, turns=["<calc>{nonsense}</calc>"])


async def test_the_answer_of_a_row_without_one_is_never_written(renderer: Renderer) -> None:
    rows = [replace(prompt, answer=None) for prompt in PROMPTS]
    environment = ToolUse(kind="tool_use")
    for changes in (
        {"right_fraction": 1.0, "turns": ["<answer>{answer}</answer>"]},
        {"right_fraction": 0.0, "guess": "<answer>{other_answer}</answer>"},
    ):
        config = WarmStart.model_validate({"num_demonstrations": 3, **changes})
        with pytest.raises(ConfigError) as error:
            await demonstrate(rows, renderer, environment, config, seed=0)
        assert "answer" in str(error.value)


async def test_an_agent_program_plays_its_own_demonstrations(renderer: Renderer) -> None:
    environment = OpenAiProxy(
        kind="openai_proxy", program="raylearner.actors.proxy.example_program:play"
    )
    call = '{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}'
    config = WarmStart.model_validate(
        {
            "num_demonstrations": 3,
            "right_fraction": 1.0,
            "turns": [f"<tool_call>{call}</tool_call>", "{answer}"],
        }
    )
    own = renderer.with_prompt_limit(1024)
    own.config = own.config.model_copy(update={"max_response_tokens": 1024})
    for segment in await demonstrate(PROMPTS, own, environment, config, seed=0):
        assert [turn.tool for turn in segment.turns] == ["calculator", None]
        assert segment.stop_reason is StopReason.ANSWER


async def test_turns_that_do_not_end_the_episode_are_refused(renderer: Renderer) -> None:
    with pytest.raises(ConfigError, match=r"model\.warm_start\.turns"):
        await written(renderer, right_fraction=1.0, turns=["<calc>{expression}</calc>"])
