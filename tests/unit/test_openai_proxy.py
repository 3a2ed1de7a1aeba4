"""Agent programs against the proxy, over real HTTP with the real client: tokens, forks, failures."""

import asyncio
import json
import pickle
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openai
import psutil
import pytest
from kits import PROMPT, Says, make_claim, make_kit, make_renderer
from openai import AsyncOpenAI
from templates import FAMILIES, MOVES_TOOLS, NO_RESULTS, Family

from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.actors.proxy.agent import Agent
from raylearner.actors.proxy.chat_server import KEPT_HEADER, ChatServer
from raylearner.actors.proxy.program import (
    OUTPUT_BYTES,
    CommandProgram,
    FunctionProgram,
    Program,
    Task,
)
from raylearner.codec import EpisodeBatch
from raylearner.config import schema
from raylearner.errors import EngineDead
from raylearner.replay import snapshot
from raylearner.replay.snapshot import Snapshot
from raylearner.replay.validation import trajectory_error
from raylearner.rewards.functions import EpisodeView
from raylearner.rewards.scorer import GroupScorer, Scorer
from raylearner.types import Sampling, StopReason, Trajectory

Play = Callable[[AsyncOpenAI, Task], Awaitable[str | None]]


@dataclass
class _Function:
    """A program in this process: an async function of the client and the task."""

    play: Play

    async def run(self, task: Task) -> str | None:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            return await self.play(client, task)


@dataclass
class _Stage:
    kit: EpisodeKit
    script: Says
    server: ChatServer

    async def play_all(
        self,
        program: Program | Play,
        *,
        timeout_s: float = 20.0,
        max_calls: int = 8,
        rewards: schema.RewardSection | None = None,
    ) -> list[Trajectory]:
        agent = Agent(
            server=self.server,
            program=program if hasattr(program, "run") else _Function(program),
            timeout_s=timeout_s,
            max_calls=max_calls,
        )
        scorer = Scorer(rewards) if rewards else self.kit.scorer
        kit = replace(self.kit, agent=agent, scorer=scorer)
        segments = await play_episode(kit, make_claim(), Sampling(max_tokens=64))
        assert [trajectory_error(segment) for segment in segments] == [None] * len(segments)
        assert [segment.segment for segment in segments] == list(range(len(segments)))
        return segments

    async def play(self, program: Program | Play, **limits: Any) -> Trajectory:
        (segment,) = await self.play_all(program, **limits)
        return segment

    def sampled(self, segment: Trajectory) -> str:
        return self.kit.renderer.decode_all(segment.token_ids[segment.loss_mask].tolist())

    def text(self, segment: Trajectory) -> str:
        return self.kit.renderer.decode_all(segment.token_ids.tolist())


@asynccontextmanager
async def stage(
    folder: Path, texts: Sequence[str], *, hangs_at: int | None = None, **settings: object
) -> AsyncIterator[_Stage]:
    limits = {"max_prompt_tokens": 128, "max_response_tokens": 192, **settings}
    renderer = make_renderer(folder, **limits)
    script = Says(renderer, texts, hangs_at)
    server = ChatServer.start()
    try:
        yield _Stage(make_kit(renderer, script), script, server)
    finally:
        await server.close()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(choice: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": choice.message.content}


async def ask(client: AsyncOpenAI, messages: list[Any], **arguments: Any) -> Any:
    reply = await client.chat.completions.create(model="m", messages=messages, **arguments)
    return reply.choices[0]


async def test_tokens_stay_as_sampled_turn_by_turn(tokenizer_folder: Path) -> None:
    """The reply is sent back without its end token and stripped, and still continues its tokens."""

    async def program(client: AsyncOpenAI, task: Task) -> str | None:
        messages: list[Any] = list(task.messages)
        for _ in range(2):
            choice = await ask(client, messages)
            messages += [{"role": "assistant", "content": choice.message.content.strip()}]
            messages += [user("go on")]
        choice = await ask(client, messages)
        assert choice.finish_reason == "stop"
        return choice.message.content

    texts = ["  one é <|im_end|>", "two<|im_end|>", "46<|im_end|>"]
    async with stage(tokenizer_folder, texts) as scene:
        segment = await scene.play(program)
        assert [
            scene.kit.renderer.decode_all(segment.token_ids[t.start : t.end].tolist())
            for t in segment.turns
        ] == texts
        assert scene.sampled(segment) == "".join(texts)
        assert [t.reply for t in segment.turns] == ["go on", "go on", ""]
        for turn, given in zip(segment.turns, scene.script.prompts, strict=True):
            assert segment.token_ids[: turn.start].tolist() == given
        assert scene.text(segment) == (
            "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n  one é <|im_end|>\n"
            "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
            "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n46<|im_end|>"
        )
        assert (segment.reward, segment.stop_reason) == (1.0, StopReason.ANSWER)
        assert np.array_equal(segment.loss_mask, segment.train_mask)


async def test_special_tokens_in_new_messages_are_text(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        first = await ask(client, task.messages)
        await ask(client, [*task.messages, said(first), user("<|im_end|>")])

    async with stage(tokenizer_folder, ["a", "b"]) as scene:
        segment = await scene.play(program)
        end = scene.kit.renderer.end_token_ids[0]
        # After the prompt, the first turn and the new message.
        assert (segment.token_ids == end).sum() == 3


async def test_a_rewritten_prefix_forks_a_segment(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> str | None:
        first = await ask(client, task.messages)
        await ask(client, [*task.messages, said(first), user("more")])
        summary = await ask(client, [user("summary: " + first.message.content)])
        return summary.message.content

    async with stage(tokenizer_folder, ["one", "two", "46"]) as scene:
        first, second = await scene.play_all(program)
        assert [scene.sampled(s) for s in (first, second)] == ["onetwo", "46"]
        assert scene.text(second) == (
            "<|im_start|>user\nsummary: one<|im_end|>\n<|im_start|>assistant\n46"
        )
        assert (first.reward, second.reward) == (1.0, 1.0)
        assert first.episode_key == second.episode_key
        assert first.metrics["segments"] == 2


async def test_going_on_from_an_earlier_reply_keeps_its_tokens_and_trains_them_once(
    tokenizer_folder: Path,
) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        first = await ask(client, task.messages)
        await asyncio.gather(
            ask(client, [*task.messages, said(first), user("left")]),
            ask(client, [*task.messages, said(first), user("right")]),
        )

    async with stage(tokenizer_folder, ["é one<|im_end|>", "two", "six"]) as scene:
        first, second = await scene.play_all(program)
        shared = first.turns[0].end
        assert first.token_ids[:shared].tolist() == second.token_ids[:shared].tolist()
        assert not second.loss_mask[:shared].any()
        assert sorted(map(scene.sampled, (first, second))) in (
            ["six", "é one<|im_end|>two"],
            ["two", "é one<|im_end|>six"],
        )


async def test_tool_calls_are_read_and_their_results_continue_the_tokens(
    tokenizer_folder: Path,
) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def program(client: AsyncOpenAI, task: Task) -> str | None:
        messages: list[Any] = list(task.messages)
        choice = await ask(client, messages, tools=tools)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "46"}]
        broken = await ask(client, messages, tools=tools)
        assert broken.finish_reason == "stop"
        assert broken.message.content == "<tool_call>{no}</tool_call>"
        messages += [broken.message, user("again")]
        return (await ask(client, messages, tools=tools)).message.content

    texts = [
        'hm<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "<tool_call>{no}</tool_call>",
        "46",
    ]
    async with stage(tokenizer_folder, texts) as scene:
        segment = await scene.play(program)
        assert scene.sampled(segment) == "".join(texts)
        assert [(t.tool, t.is_valid) for t in segment.turns] == [
            ("add", True),
            (None, False),
            (None, True),
        ]
        assert segment.metrics["tool_calls"] == 1
        assert segment.metrics["valid_actions"] == 2
        assert "<|im_start|>tool\n46<|im_end|>" in scene.text(segment)


async def test_a_stream_says_the_same(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> str | None:
        parts: list[str] = []
        usage, reasons = None, []
        stream: Any = await client.chat.completions.create(
            model="m",
            messages=task.messages,  # pyright: ignore[reportArgumentType]
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                reasons.append(choice.finish_reason)
        assert usage is not None
        assert usage.completion_tokens == 2
        assert reasons[-1] == "stop"
        return "".join(parts)

    async with stage(tokenizer_folder, ["46"]) as scene:
        segment = await scene.play(program)
        assert segment.reward == 1.0


async def test_stop_strings_are_kept_in_tokens_and_not_shown(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        first = await ask(client, task.messages, stop=["</calc>"])
        assert first.message.content == "<calc>1"
        await ask(client, [*task.messages, said(first), user("1")], max_tokens=2)

    async with stage(tokenizer_folder, ["<calc>1</calc>", "abcdef"]) as scene:
        segment = await scene.play(program)
        assert scene.sampled(segment) == "<calc>1</calc>ab"
        assert segment.stop_reason is StopReason.END  # the program's own limit cuts no episode


async def test_sampling_numbers_of_a_request_are_not_followed_and_told(
    tokenizer_folder: Path,
) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        raw = await client.chat.completions.with_raw_response.create(
            model="m",
            messages=task.messages,  # pyright: ignore[reportArgumentType]
            temperature=0.2,
            top_p=1.0,
        )
        assert raw.headers[KEPT_HEADER] == "temperature=1.0 (requested 0.2)"

    async with stage(tokenizer_folder, ["46"]) as scene:
        await scene.play(program)


@pytest.mark.parametrize(
    ("arguments", "param", "code"),
    [
        ({"n": 2}, "n", "unsupported_value"),
        ({"logprobs": True}, "logprobs", "unsupported_value"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "invalid_value",
        ),
        ({"messages": [user("x" * 200)]}, "messages", "context_length_exceeded"),
    ],
)
async def test_parameters_that_cannot_be_followed_are_a_400_with_their_name(
    tokenizer_folder: Path, arguments: dict[str, Any], param: str, code: str
) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        given = {"messages": task.messages, **arguments}
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, **given)
        assert (refused.value.param, refused.value.code) == (param, code)
        await ask(client, task.messages)

    async with stage(tokenizer_folder, ["46"]) as scene:
        segment = await scene.play(program)
        assert segment.stop_reason is StopReason.END


async def test_another_key_is_a_401_during_the_episode_and_its_own_after_it(
    tokenizer_folder: Path,
) -> None:
    keys: list[str] = []

    async def program(client: AsyncOpenAI, task: Task) -> None:
        keys.append(task.api_key)
        with pytest.raises(openai.AuthenticationError):
            await ask(client.with_options(api_key="sk-wrong"), task.messages)
        await ask(client, task.messages)

    async with stage(tokenizer_folder, ["46"]) as scene:
        await scene.play(program)
        client = AsyncOpenAI(base_url=scene.server.base_url, api_key=keys[0])
        with pytest.raises(openai.AuthenticationError):
            await ask(client, [user("x")])


async def test_a_used_up_response_budget_ends_cleanly(tokenizer_folder: Path) -> None:
    reasons: list[str] = []

    async def program(client: AsyncOpenAI, task: Task) -> None:
        messages: list[Any] = list(task.messages)
        while True:
            choice = await ask(client, messages)
            reasons.append(choice.finish_reason)
            messages += [choice.message, user("go on")]

    async with stage(tokenizer_folder, ["x" * 40] * 9, max_response_tokens=100) as scene:
        segment = await scene.play(program)
        assert segment.stop_reason is StopReason.MAX_TOKENS
        assert segment.num_tokens - segment.turns[0].start <= 100
        assert reasons[0] == "stop"
        assert set(reasons[2:]) == {"length"}
        assert segment.reward == 0.0


async def test_calls_beyond_the_limit_get_nothing(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        first = await ask(client, task.messages)
        assert (first.finish_reason, first.message.content) == ("stop", "one")
        second = await ask(client, task.messages)
        assert (second.finish_reason, second.message.content) == ("length", "")

    async with stage(tokenizer_folder, ["one"]) as scene:
        segment = await scene.play(program, max_calls=1)
        assert segment.stop_reason is StopReason.MAX_TURNS


async def test_a_program_that_never_calls_is_an_error(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> str:
        return "46"

    async with stage(tokenizer_folder, []) as scene:
        segment = await scene.play(program)
        assert (segment.error or "").startswith("environment: ")
        assert segment.num_trained_tokens == 0


async def test_an_engine_failure_is_the_cause_whatever_the_program_makes_of_it(
    tokenizer_folder: Path,
) -> None:
    """A lost request fails the episode; with a dead engine, there is none."""

    async def program(client: AsyncOpenAI, task: Task) -> str:
        with pytest.raises(openai.InternalServerError):
            await ask(client, task.messages)
        return "46"

    async with stage(tokenizer_folder, []) as scene:
        segment = await scene.play(program)  # the script has nothing to say
        assert (segment.error or "").startswith("engine: ")
        await scene.kit.engine.close()
        with pytest.raises(EngineDead):
            await scene.play(program)


async def test_an_aborted_generation_ends_the_program_unreported(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        await ask(client, task.messages)
        await asyncio.sleep(3600)

    async with stage(tokenizer_folder, ["x"], hangs_at=0) as scene:
        playing = asyncio.ensure_future(scene.play(program))
        await scene.script.has_begun.wait()
        await scene.kit.engine.abort()
        segment = await playing
        assert segment.stop_reason is StopReason.ABORTED
        assert segment.num_trained_tokens == 0


async def test_a_reply_that_nobody_waited_for_is_not_recorded(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        with pytest.raises(openai.APITimeoutError):
            await ask(client.with_options(timeout=0.2, max_retries=0), task.messages)
        await asyncio.sleep(0.1)
        await ask(client, task.messages)

    async with stage(tokenizer_folder, ["lost", "46"]) as scene:
        say = scene.script.complete

        async def slowly(token_ids: Sequence[int], sampling: Sampling) -> Any:
            if not scene.script.prompts:
                scene.script.prompts.append([])
                await asyncio.sleep(0.5)
                return scene.kit.renderer.encode("lost"), [-0.5] * 4
            return await say(token_ids, sampling)

        scene.script.complete = slowly  # pyright: ignore[reportAttributeAccessIssue]
        segment = await scene.play(program)
        assert scene.sampled(segment) == "46"


COMMAND = """
import json, sys
from openai import OpenAI
task = json.load(sys.stdin)
client = OpenAI()
reply = client.chat.completions.create(model="m", messages=task["messages"])
print(reply.choices[0].message.content, task["columns"]["level"])
"""


async def test_a_command_plays_and_answers_on_its_standard_output(tokenizer_folder: Path) -> None:
    async with stage(tokenizer_folder, ["46"]) as scene:
        command = CommandProgram([sys.executable, "-c", COMMAND], answers_on_stdout=True)
        segment = await scene.play(command)
        assert segment.stop_reason is StopReason.ANSWER
        assert segment.reward == 0.0  # "46 3" is what it printed
        assert scene.sampled(segment) == "46"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sh", "-c", "echo no such luck >&2; exit 3"], "3: no such luck"),
        (["/no/such"], "'/no/such'"),
    ],
)
async def test_a_command_that_fails_is_an_error_with_its_cause(
    tokenizer_folder: Path, command: list[str], words: str
) -> None:
    async with stage(tokenizer_folder, []) as scene:
        segment = await scene.play(CommandProgram(command, answers_on_stdout=False))
        assert (segment.error or "").startswith("environment: ")
        assert words in (segment.error or "")


async def test_a_command_out_of_time_dies_with_all_its_children(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(' '.join(str(c.pid) for c in children))\n"
        "time.sleep(600)\n"
    )
    async with stage(tokenizer_folder, []) as scene:
        command = CommandProgram([sys.executable, "-c", script], answers_on_stdout=False)
        started = time.monotonic()
        segment = await scene.play(command, timeout_s=2.0)
        assert "environment.timeout_s" in (segment.error or "")
        assert time.monotonic() - started < 8
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        killed = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, alive = await asyncio.to_thread(psutil.wait_procs, killed, timeout=5)
        assert alive == []


async def test_a_sync_function_plays_in_a_thread(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent_of_the_test.py").write_text(
        "from openai import OpenAI\n"
        "def play(*, base_url, api_key, messages, columns, suffix):\n"
        "    client = OpenAI(base_url=base_url, api_key=api_key)\n"
        "    reply = client.chat.completions.create(model='m', messages=messages)\n"
        "    return reply.choices[0].message.content + suffix\n"
        "def long(**given):\n"
        "    play(**given, suffix='')\n"
        "    return 'x' * 3_000_000\n"
        "def fails(*, base_url, api_key, messages, columns):\n"
        "    raise ValueError('mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    async with stage(tokenizer_folder, ["4", "4"]) as scene:
        segment = await scene.play(FunctionProgram("agent_of_the_test:play", {"suffix": "6"}))
        assert (segment.reward, segment.stop_reason) == (1.0, StopReason.ANSWER)
        segment = await scene.play(FunctionProgram("agent_of_the_test:long", {}))
        assert segment.given_answer == "x" * OUTPUT_BYTES
        segment = await scene.play(FunctionProgram("agent_of_the_test:fails", {}))
        head, *frames = (segment.error or "").splitlines()
        assert "agent_of_the_test:fails" in head
        assert head.endswith("ValueError: mine")
        assert "agent_of_the_test.py" in frames[0]
        assert "line 10" in frames[0]


async def test_many_episodes_share_the_server(tokenizer_folder: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> str | None:
        return (await ask(client, task.messages)).message.content

    async with stage(tokenizer_folder, ["46"] * 30) as scene:
        played = await asyncio.gather(*(scene.play(program) for _ in range(30)))
        assert [segment.reward for segment in played] == [1.0] * 30


async def test_functions_of_groups_see_what_functions_of_episodes_see_also_after_a_resume(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program whose third call goes on from its first, and that returns its answer."""
    seen: list[EpisodeView] = []

    def alone(episode: EpisodeView, *, log_metric: Any) -> float:
        seen.append(episode)
        log_metric("looked", 1.0)
        return float(episode.answer == "12")

    def together(episodes: list[EpisodeView]) -> list[float]:
        seen.extend(episodes)
        return [float(episode.answer == "12") for episode in episodes]

    module = ModuleType("views")
    module.__dict__.update(alone=alone, together=together)
    monkeypatch.setitem(sys.modules, "views", module)
    functions = [{"kind": "views:alone"}, {"kind": "views:together", "per": "group"}]
    rewards = schema.RewardSection.model_validate({"functions": functions})

    async def program(client: AsyncOpenAI, task: Task) -> str:
        first = await ask(client, task.messages)
        await ask(client, [user(f"Sum up: {first.message.content}")])
        await ask(client, [*task.messages, said(first), user("Sure?")])
        return "12"

    texts = ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    async with stage(tokenizer_folder, texts) as made:
        segments = await made.play_all(program, rewards=rewards)
    assert len(segments) == 2
    assert [turn.text for turn in seen[0].turns] == ["one", "two", "three"]
    (travelled,) = pickle.loads(pickle.dumps(EpisodeBatch([segments])))
    order = np.zeros(0, np.int64)
    Snapshot(metadata={}, prompt_order=order, trajectories=travelled).save(tmp_path)
    metadata, arrays, images = snapshot.read(tmp_path)
    restored = snapshot.trajectories(metadata["trajectories"], arrays, images)
    for stored in (segments, restored):
        (score,) = (await GroupScorer(rewards).score(PROMPT, stored)).values()
        assert score.rewards == {"alone": 1.0, "together": 1.0}
    assert seen[1:] == [seen[0], seen[0]]
    assert "alone/looked" in segments[0].metrics
    assert "alone/looked" not in seen[0].metrics


OFFERED = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLED = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


async def _weather(client: AsyncOpenAI, task: Task) -> str | None:
    messages: list[Any] = list(task.messages)
    choice = await ask(client, messages, tools=OFFERED)
    for call in choice.message.tool_calls or ():
        assert len(call.id) == 9
        assert call.id.isalnum()
    messages.append(choice.message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "12"}
        for call in choice.message.tool_calls or ()
    ]
    return (await ask(client, messages, tools=OFFERED)).message.content


@pytest.mark.parametrize("family", ["mistral", "calls first", "llama3", "deepseek", "gemma"])
async def test_agents_with_tools_play_to_the_answer_under_strict_templates(
    tmp_path: Path, family: str
) -> None:
    """Templates that want ids of nine letters, a call before its result, or arguments as text."""
    folder, end = FAMILIES[family].save(tmp_path), FAMILIES[family].end
    limits = {"max_prompt_tokens": 1024, "max_response_tokens": 1024}
    thought = "</think>" if family == "deepseek" else ""  # which its header opens
    async with stage(folder, [thought + CALLED + end, "Mild." + end], **limits) as scene:
        segment = await scene.play(_weather)
        assert segment.error is None
        assert scene.sampled(segment) == f"{thought}{CALLED}{end}Mild.{end}"
        assert segment.metrics["tool_calls"] == 1


async def test_a_template_that_rewrites_history_gives_every_call_a_segment(tmp_path: Path) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        first = await ask(client, task.messages, tools=OFFERED)
        await ask(client, [*task.messages, said(first), user("more")], tools=OFFERED)

    folder = Family(template=MOVES_TOOLS).save(tmp_path)
    limits = {"max_prompt_tokens": 1024, "max_response_tokens": 1024}
    async with stage(folder, ["one<|im_end|>", "two<|im_end|>"], **limits) as scene:
        first, second = await scene.play_all(program)
        assert [scene.sampled(s) for s in (first, second)] == ["one<|im_end|>", "two<|im_end|>"]
        assert scene.text(second).count("weather") == 1
        assert scene.text(second).index("one<|im_end|>") < scene.text(second).index("weather")


async def test_the_first_call_with_tools_is_refused_where_results_have_no_place(
    tmp_path: Path,
) -> None:
    async def program(client: AsyncOpenAI, task: Task) -> None:
        with pytest.raises(openai.BadRequestError):
            await ask(client, task.messages, tools=OFFERED)
        await ask(client, task.messages)

    folder = Family(template=NO_RESULTS).save(tmp_path)
    async with stage(folder, ["46<|im_end|>"]) as scene:
        await scene.play(program)
        assert len(scene.script.prompts) == 1
