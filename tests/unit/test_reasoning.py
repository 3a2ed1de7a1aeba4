"""Thoughts are neither parsed nor scored nor stopped in, whoever opens them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import make_turn
from kits import make_kit, make_renderer, play_one
from openai import AsyncOpenAI

from raylearner.actors.episode import EpisodeKit
from raylearner.actors.proxy.agent import Agent
from raylearner.actors.proxy.chat_server import ChatServer
from raylearner.actors.proxy.program import Task
from raylearner.config import schema
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer
from raylearner.tokenization.reasoning import Reasoning
from raylearner.tokenization.renderer import Renderer
from raylearner.types import CompletionStop, Message, Sampling, StopReason, Trajectory

THINK = Reasoning((("<think>", "</think>"), ("[THINK]", "[/THINK]")))
OPENS = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
CLOSES = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
ALWAYS = OPENS.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
SPECIAL_TAGS = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n[THINK]{% endif")
CONTENT_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass
class _Writes:
    """Writes one text a turn as an engine does: up to a stop string, and on from there when asked."""

    renderer: Renderer
    texts: list[str]
    num_written: int = 0
    num_calls: int = 0

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        self.num_calls += 1
        rest = self.texts[0][self.num_written :]
        ends = [rest.find(stop) + len(stop) for stop in sampling.stop if stop in rest]
        piece = rest[: min(ends, default=len(rest))]
        ids = self.renderer.encode(piece, keeps_special=True)[: sampling.max_tokens]
        self.num_written += len(piece)
        if self.num_written == len(self.texts[0]):
            self.texts, self.num_written = self.texts[1:], 0
        return ids, [-0.01 * (self.num_calls + i) for i in range(len(ids))]


@dataclass
class _Stage:
    script: _Writes
    kit: EpisodeKit

    async def play(self, *, max_tokens: int = 300) -> Trajectory:
        return await play_one(self.kit, max_tokens=max_tokens, seed=3)


def make_stage(
    folder: Path,
    texts: Sequence[str],
    *,
    template: str = OPENS,
    environment: dict[str, Any] | None = None,
    rewards: list[dict[str, Any]] | None = None,
    special: Sequence[str] = (),
    **settings: object,
) -> _Stage:
    make_tokenizer(1024, special=special, chat_template=template).save_pretrained(folder)
    limits = {"max_prompt_tokens": 200, "max_response_tokens": 800, **settings}
    renderer = make_renderer(folder, **limits)
    script = _Writes(renderer, list(texts))
    config = schema.ToolUse.model_validate({"kind": "tool_use", **(environment or {})})
    factory = EnvironmentFactory(config, reasoning_tags=renderer.config.reasoning_tags)
    functions = schema.RewardSection.model_validate({"functions": rewards} if rewards else {})
    kit = make_kit(renderer, script, make_environment=factory.make, rewards=functions)
    return _Stage(script, kit)


@pytest.mark.parametrize(
    ("text", "opening", "said", "unclosed"),
    [
        ("a b", "", "a b", ""),
        ("x</think>a", "<think>", "a", ""),
        ("x", "<think>", "", "<think>"),
        ("<think>x</think>a<think>y</think>b", "", "ab", ""),
        ("a <think>x", "", "a ", "<think>"),
        ("[THINK]x</think>y[/THINK]a", "", "a", ""),
        ("x</think>a [THINK]y", "<think>", "a ", "[THINK]"),
        ("the tag `<think>` opens", "", "the tag `<think>` opens", ""),
        ("stray</think>a", "", "stray</think>a", ""),
    ],
)
def test_thoughts_are_found_from_their_opening_on(
    text: str, opening: str, said: str, unclosed: str
) -> None:
    thoughts = THINK.thoughts(text, opening=opening)
    turn = make_turn(text, thoughts=thoughts.spans)
    assert (turn.content, thoughts.unclosed) == (said, unclosed)


@pytest.mark.parametrize(
    ("template", "special", "opening"),
    [
        (OPENS, (), "<think>"),
        (ALWAYS, (), "<think>"),
        (CLOSES, (), ""),
        (CHAT_TEMPLATE, (), ""),
        (SPECIAL_TAGS, ("[THINK]", "[/THINK]"), "[THINK]"),
        (CONTENT_ONLY + "{# <think> #}", (), ""),
    ],
    ids=["opens", "always", "closes", "plain", "special", "content only"],
)
def test_only_the_header_opens_a_thought(
    tmp_path: Path, template: str, special: Sequence[str], opening: str
) -> None:
    renderer = make_stage(tmp_path, [], template=template, special=special).kit.renderer
    for content in ("12+34=", "<think>", "say </think>", "how does <think>\n"):
        message = Message(role="user", content=content)
        assert renderer.opening([message]) == opening
        reply = renderer.render_reply([message], last_token_id=None)
        assert renderer.turns.opening_behind(reply) == opening


@pytest.mark.parametrize("is_opened_by_header", [True, False])
async def test_tags_inside_a_thought_neither_stop_nor_run_nor_score(
    tmp_path: Path, is_opened_by_header: bool
) -> None:
    thought = "or <calc>9*9</calc>? <answer>81</answer>? no</think>"
    opening = "" if is_opened_by_header else "<think>"
    texts = [f"{opening}{thought}<calc>12+34</calc>", f"{opening}{thought}<answer>46</answer>"]
    stage = make_stage(
        tmp_path,
        texts,
        template=OPENS if is_opened_by_header else CHAT_TEMPLATE + "{# <think> #}",
        rewards=[
            {"kind": "exact_answer"},
            {"kind": "answer_format", "reasoning_tag": "think", "weight": 0.5},
        ],
    )
    trajectory = await stage.play()
    assert [turn.text for turn in trajectory.turns] == texts
    assert [turn.content for turn in trajectory.turns] == [
        "<calc>12+34</calc>",
        "<answer>46</answer>",
    ]
    assert [turn.tool for turn in trajectory.turns] == ["calculator", None]
    assert trajectory.turns[0].reply == "<result>46</result>"
    assert trajectory.rewards == {"exact_answer": 1.0, "answer_format": 1.0}
    # Pieces are joined as they were sampled: each call's log-probabilities begin anew.
    assert stage.script.num_calls == 6
    first = trajectory.turns[0]
    sampled = trajectory.behavior_logprobs[first.start : first.end]
    lengths = [len("or <calc>9*9</calc>"), len("? <answer>81</answer>")]
    encode = stage.kit.renderer.encode
    pieces = [opening + "or <calc>9*9</calc>", "? <answer>81</answer>"]
    lengths = [len(encode(piece)) for piece in pieces]
    expected = [-0.01 * (call + i) for call, n in enumerate(lengths, start=1) for i in range(n)]
    assert np.allclose(sampled[: sum(lengths)], expected)
    assert trajectory.token_ids[first.start : first.end].tolist() == encode(texts[0])


async def test_a_thought_takes_from_the_one_budget_of_its_turn(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, ["a<calc>1</calc>" * 40], environment={"max_turns": 1})
    trajectory = await stage.play(max_tokens=30)
    assert trajectory.turns[0].end - trajectory.turns[0].start == 30
    assert trajectory.turns[0].stop_reason is CompletionStop.LENGTH
    assert trajectory.turns[0].is_valid
    assert trajectory.turns[0].is_cut


@pytest.mark.parametrize("dialect", ["tags", "json"])
async def test_a_thought_without_an_end_is_no_answer_and_runs_nothing(
    tmp_path: Path, dialect: str
) -> None:
    call = {"name": "calculator", "arguments": {"expression": "1+1"}}
    text = f"so <answer>46</answer><tool_call>{json.dumps(call)}</tool_call><|im_end|>"
    stage = make_stage(
        tmp_path,
        [text] * 2,
        environment={"max_turns": 1, "dialect": {"kind": dialect, "answer_tag": "answer"}},
        max_observation_tokens=200,
    )
    trajectory = await stage.play()
    assert trajectory.reward == 0.0
    assert trajectory.metrics["tool_calls"] == 0
    assert trajectory.stop_reason is StopReason.MAX_TURNS


async def test_null_takes_reasoning_for_text(tmp_path: Path) -> None:
    text = "or <calc>9*9</calc>? no</think>"
    stage = make_stage(tmp_path, [text, "<answer>46</answer>"], reasoning_tags=None)
    trajectory = await stage.play()
    assert trajectory.turns[0].text == "or <calc>9*9</calc>"
    assert trajectory.turns[0].reply == "<result>81</result>"


async def test_tags_of_the_user_are_looked_for_in_any_template(tmp_path: Path) -> None:
    tags = [["<plan>", "</plan>"]]
    text = "<plan><calc>9*9</calc></plan><answer>46</answer>"
    stage = make_stage(tmp_path, [text], template=CHAT_TEMPLATE, reasoning_tags=tags)
    trajectory = await stage.play()
    assert (trajectory.reward, trajectory.turns[0].text) == (1.0, text)


async def test_tags_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    special = ("[THINK]", "[/THINK]")
    text = "<answer>9</answer>[/THINK]<answer>46</answer>"
    stage = make_stage(tmp_path, [text], template=SPECIAL_TAGS, special=special)
    trajectory = await stage.play()
    assert (trajectory.reward, trajectory.turns[0].content) == (1.0, "<answer>46</answer>")


async def test_a_thought_continues_after_an_inline_reply(tmp_path: Path) -> None:
    texts = ["hm<|im_end|>", "<answer>1</answer></think><answer>46</answer>"]
    stage = make_stage(tmp_path, texts, observation_role="inline")
    trajectory = await stage.play()
    assert [turn.opening for turn in trajectory.turns] == ["<think>", "<think>"]
    assert trajectory.reward == 1.0


async def test_a_program_gets_thoughts_apart(tmp_path: Path) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
    stage = make_stage(tmp_path, [f"maybe {call % 1} STOP</think>{call % 2}", "so</think>46 STOP"])
    seen: list[Any] = []

    class Program:
        async def run(self, task: Task) -> str | None:
            async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
                messages: Any = list(task.messages)
                for _ in range(2):
                    reply = await client.chat.completions.create(
                        model="m", messages=messages, tools=tools, stop=["STOP"]
                    )
                    message = reply.choices[0].message
                    seen.append(message)
                    messages += [message.model_dump(exclude_none=True)]
                    messages += [
                        {"role": "tool", "tool_call_id": call.id, "content": "46"}
                        for call in message.tool_calls or ()
                    ]
                return seen[-1].content

    agent = Agent(server=ChatServer.start(), program=Program(), timeout_s=20.0, max_calls=4)
    stage.kit = replace(stage.kit, agent=agent)
    try:
        trajectory = await stage.play()
    finally:
        await agent.close()
    assert not trajectory.error, trajectory.error
    first, second = seen
    assert [json.loads(c.function.arguments) for c in first.tool_calls] == [{"a": 2}]
    assert first.reasoning_content == f"maybe {call % 1} STOP"
    assert (second.content.strip(), second.reasoning_content) == ("46", "so")
    assert trajectory.reward == 1.0
    assert [turn.opening for turn in trajectory.turns] == ["<think>", "<think>"]
