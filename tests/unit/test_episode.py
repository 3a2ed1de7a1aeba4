"""Episodes: turns, budgets, end tokens, and failures that are data."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kits import PROMPT, Says, make_claim, make_kit, make_renderer, play_one

from benchmarks.faults.scripts import Fails
from raylearner.actors import episode
from raylearner.actors.engines.scripted import ScriptedEngine
from raylearner.actors.episode import EpisodeKit
from raylearner.config import schema
from raylearner.environments.catalogue import EnvironmentFactory, SingleTurnEnvironment
from raylearner.environments.protocol import Environment
from raylearner.errors import EngineDead
from raylearner.types import Message, Prompt, StopReason


def make_stage(
    folder: Path,
    texts: Sequence[str],
    *,
    environment: Environment | None = None,
    hangs_at: int | None = None,
    penalty: float = 0.0,
    **settings: object,
) -> EpisodeKit:
    renderer = make_renderer(folder, **settings)
    tools = schema.ToolUse(kind="tool_use", invalid_action_penalty=penalty)
    factory = EnvironmentFactory(tools)
    return make_kit(
        renderer,
        Says(renderer, texts, hangs_at),
        make_environment=lambda: environment or factory.make(),
    )


async def test_a_tool_call_and_an_answer_make_two_turns_and_a_reward(
    tokenizer_folder: Path,
) -> None:
    texts = ["<calc>12+34</calc>", "<answer>46</answer>"]
    kit = make_stage(tokenizer_folder, texts)
    trajectory = await play_one(kit)
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.ANSWER)
    assert [t.text for t in trajectory.turns] == texts
    assert trajectory.turns[0].reply == "<result>46</result>"
    assert trajectory.turns[0].tool == "calculator"
    sampled = kit.renderer.decode_all(trajectory.token_ids[trajectory.loss_mask].tolist())
    assert sampled == "".join(texts)
    assert np.array_equal(trajectory.loss_mask, trajectory.train_mask)


@pytest.mark.parametrize(
    ("text", "kept"),
    [("hm<|im_end|>more", "hm<|im_end|>"), ("hm<|endoftext|>x", "hm<|endoftext|>")],
)
async def test_tokens_after_the_first_end_token_are_dropped(
    tokenizer_folder: Path, text: str, kept: str
) -> None:
    kit = make_stage(tokenizer_folder, [text, "<answer>46</answer>"])
    trajectory = await play_one(kit)
    first = trajectory.turns[0]
    assert kit.renderer.decode_all(trajectory.token_ids[first.start : first.end].tolist()) == kept
    assert first.is_valid is False


async def test_the_response_budget_ends_the_episode_as_truncated(tokenizer_folder: Path) -> None:
    trajectory = await play_one(make_stage(tokenizer_folder, ["x" * 50], max_response_tokens=20))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.num_sampled_tokens == 20
    assert trajectory.reward == 0.0


async def test_an_observation_that_does_not_fit_ends_the_episode(tokenizer_folder: Path) -> None:
    kit = make_stage(tokenizer_folder, ["<calc>12+34</calc>"], max_response_tokens=24)
    trajectory = await play_one(kit)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.turns[0].reply == ""
    assert trajectory.token_ids[-1] == kit.renderer.encode("</calc>")[0]


async def test_the_penalty_of_invalid_actions_leaves_the_reward(tokenizer_folder: Path) -> None:
    kit = make_stage(tokenizer_folder, ["hm", "<answer>46</answer>"], penalty=0.25)
    trajectory = await play_one(kit)
    assert trajectory.reward == 0.75
    assert trajectory.rewards == {"exact_answer": 1.0, "invalid_action_penalty": -0.25}


async def test_a_failed_request_fails_the_episode_but_a_dead_engine_does_not(
    tokenizer_folder: Path,
) -> None:
    kit = make_stage(tokenizer_folder, [])
    kit = replace(kit, engine=ScriptedEngine(Fails(share=1.0, vocab_size=9), end_token_ids=()))
    trajectory = await play_one(kit)
    assert trajectory.stop_reason is StopReason.ERROR
    assert (trajectory.error or "").startswith("engine: ")
    assert (trajectory.reward, trajectory.num_trained_tokens) == (None, 0)
    await kit.engine.close()
    with pytest.raises(EngineDead):
        await play_one(kit)


async def test_a_hanging_close_delays_a_cancelled_episode_only_briefly(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverCloses(SingleTurnEnvironment):
        async def close(self) -> None:
            await asyncio.sleep(3600)

    monkeypatch.setattr(episode, "CLOSE_LIMIT_S", 0.05)
    kit = make_stage(tokenizer_folder, ["x"], environment=NeverCloses(), hangs_at=0)
    playing = asyncio.create_task(play_one(kit))
    await asyncio.sleep(0.05)
    playing.cancel()
    done, _ = await asyncio.wait([playing], timeout=5)
    assert done
    assert playing.cancelled()


async def test_a_prompt_that_is_too_long_is_a_failed_trajectory(tokenizer_folder: Path) -> None:
    trajectory = await play_one(make_stage(tokenizer_folder, ["x"], max_prompt_tokens=5))
    assert (trajectory.error or "").startswith("render: ")
    assert trajectory.min_policy_version == trajectory.claim_policy_version == 2


async def test_an_environment_that_raises_is_a_failed_trajectory(tokenizer_folder: Path) -> None:
    class Breaks:
        stop = ()
        tool_schemas = ()

        async def reset(self, prompt: Prompt) -> Sequence[Message]:
            return prompt.messages

        async def step(self, message: Message) -> Any:
            raise ZeroDivisionError("mine")

        def outcome(self) -> Any:
            raise ValueError("worse")

        async def close(self) -> None: ...

    trajectory = await play_one(make_stage(tokenizer_folder, ["x"], environment=Breaks()))
    assert trajectory.stop_reason is StopReason.ERROR
    error = trajectory.error or ""
    assert error.startswith("environment: ")
    assert "ZeroDivisionError" in error


@pytest.mark.timeout(20)
async def test_an_aborted_generation_ends_the_episode_as_aborted(tokenizer_folder: Path) -> None:
    kit = make_stage(tokenizer_folder, ["<calc>1+1</calc>", "never"], hangs_at=1)
    episode = asyncio.ensure_future(play_one(kit))
    await asyncio.sleep(0.1)
    await kit.engine.abort()
    trajectory = await episode
    assert trajectory.stop_reason is StopReason.ABORTED
    assert trajectory.num_trained_tokens == 0


async def test_a_turn_cut_in_its_tag_costs_nothing_and_the_policy_reads_why(
    tokenizer_folder: Path,
) -> None:
    kit = make_stage(tokenizer_folder, ["<calc>12+3", "<answer>46</answer>"], penalty=0.25)
    trajectory = await play_one(kit, max_tokens=5)
    first = trajectory.turns[0]
    assert (first.end - first.start, first.is_valid, first.is_cut) == (5, True, True)
    assert first.reply
    assert trajectory.reward == 1.0
    assert trajectory.metrics["valid_actions"] == 1


async def test_an_answer_that_ends_with_the_last_token_is_an_answer(
    tokenizer_folder: Path,
) -> None:
    answer = "<answer>46</answer>"
    size = len(make_renderer(tokenizer_folder).encode(answer))
    kit = make_stage(tokenizer_folder, [answer], max_response_tokens=size)
    trajectory = await play_one(kit, max_tokens=size)
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.ANSWER)


class _Resets(SingleTurnEnvironment):
    def __init__(self, *messages: Any) -> None:
        self.messages = messages

    async def reset(self, prompt: Prompt) -> Any:
        return self.messages


PREFILL = Message(role="assistant", content="The sum is ")


@pytest.mark.parametrize(
    ("messages", "is_accepted"),
    [
        ([*PROMPT.messages, PREFILL], False),
        ([], False),
        ([{"role": "user", "contents": "1+1="}], False),
        ([{"role": "user", "content": "1+1="}], True),
    ],
)
async def test_messages_returned_by_reset_pass_the_check_of_rows(
    tokenizer_folder: Path, messages: list[Any], is_accepted: bool
) -> None:
    kit = make_stage(tokenizer_folder, ["46<|im_end|>"], environment=_Resets(*messages))
    trajectory = await play_one(kit)
    assert (trajectory.stop_reason is StopReason.ERROR) is not is_accepted
    assert (trajectory.error or "").startswith("environment:") is not is_accepted


async def test_a_prefill_returned_by_reset_starts_the_turn(tokenizer_folder: Path) -> None:
    environment = _Resets(*PROMPT.messages, PREFILL)
    kit = make_stage(tokenizer_folder, ["46<|im_end|>"], environment=environment)
    prompt = Prompt(prompt_id="p", messages=PROMPT.messages, answer="46", prefill=True)
    trajectory = await play_one(kit, make_claim(prompt))
    assert trajectory.prompt_text.endswith("<|im_start|>assistant\nThe sum is ")
