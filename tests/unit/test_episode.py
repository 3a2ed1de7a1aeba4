"""Episodes: turns, budgets, end tokens, and failures that are data."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylearner.actors.engines.scripted import ScriptedEngine
from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.config import schema
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.environments.protocol import Environment
from raylearner.environments.single_turn import SingleTurnEnvironment
from raylearner.observability.spans import Tracer
from raylearner.rewards.scorer import Scorer
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Claim, Message, Prompt, Sampling, StopReason, Trajectory

PROMPT = Prompt(prompt_id="p", messages=(Message(role="user", content="12+34="),), answer="46")
CLAIM = Claim(group_id=1, sample_index=0, attempt=0, prompt=PROMPT, policy_version=2, seed=0)


class _Says:
    """Says one text a turn; `EngineError`-free stand-in defined here so that tests read alone."""

    def __init__(self, renderer: Renderer, texts: Sequence[str], hangs_at: int | None) -> None:
        self._turns = [renderer.encode(text, keeps_special=True) for text in texts]
        self._hangs_at = hangs_at
        self._num_calls = 0

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        turn = self._num_calls
        self._num_calls += 1
        if turn == self._hangs_at:
            await asyncio.sleep(3600)
        sampled = self._turns[turn][: sampling.max_tokens]
        return sampled, [-0.5] * len(sampled)


def make_kit(
    folder: Path,
    texts: Sequence[str],
    *,
    environment: Environment | None = None,
    hangs_at: int | None = None,
    tool_use: dict[str, Any] | None = None,
    **renderer_settings: object,
) -> EpisodeKit:
    section = schema.RendererSection.model_validate(renderer_settings)
    renderer = Renderer.from_pretrained(str(folder), section)
    config = schema.ScriptedEngine(
        kind="scripted",
        script="raylearner.actors.engines.scripted:RandomTokens",
        arguments={"vocab_size": 10},
    )
    engine = ScriptedEngine(config, end_token_ids=renderer.end_token_ids)
    engine._script = _Says(renderer, texts, hangs_at)
    kind = schema.ToolUse.model_validate({"kind": "tool_use", **(tool_use or {})})
    return EpisodeKit(
        engine=engine,
        renderer=renderer,
        scorer=Scorer(schema.RewardSection()),
        make_environment=lambda: environment or EnvironmentFactory(kind).make(),
        tracer=Tracer("test"),
    )


def checked(trajectory: Trajectory) -> Trajectory:
    assert trajectory.validation_error() is None
    return trajectory


async def test_a_tool_call_and_an_answer_make_two_turns_and_a_reward(
    tokenizer_folder: Path,
) -> None:
    kit = make_kit(tokenizer_folder, ["<calc>12+34</calc>", "<answer>46</answer>"])
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.ANSWER)
    assert [t.text for t in trajectory.turns] == ["<calc>12+34</calc>", "<answer>46</answer>"]
    assert trajectory.turns[0].reply == "<result>46</result>"
    assert trajectory.turns[0].tool == "calculator"
    sampled = kit.renderer.decode_all(trajectory.token_ids[trajectory.loss_mask].tolist())
    assert sampled == "<calc>12+34</calc><answer>46</answer>"
    assert np.array_equal(trajectory.loss_mask, trajectory.train_mask)


async def test_tokens_after_the_first_end_token_are_dropped(tokenizer_folder: Path) -> None:
    kit = make_kit(tokenizer_folder, ["hm<|im_end|>more", "<answer>46</answer>"])
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    first = trajectory.turns[0]
    written = kit.renderer.decode_all(trajectory.token_ids[first.start : first.end].tolist())
    assert written == "hm<|im_end|>"
    assert first.is_valid is False


async def test_the_pad_token_ends_a_turn_as_well(tokenizer_folder: Path) -> None:
    kit = make_kit(tokenizer_folder, ["hm<|endoftext|>x", "<answer>46</answer>"])
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    assert trajectory.turns[0].end - trajectory.turns[0].start == 3


async def test_the_response_budget_ends_the_episode_as_truncated(tokenizer_folder: Path) -> None:
    kit = make_kit(tokenizer_folder, ["x" * 50], max_response_tokens=20)
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.num_sampled_tokens == 20
    assert trajectory.reward == 0.0


async def test_an_observation_that_does_not_fit_ends_the_episode(tokenizer_folder: Path) -> None:
    kit = make_kit(tokenizer_folder, ["<calc>12+34</calc>"], max_response_tokens=24)
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.turns[0].reply == ""
    assert trajectory.token_ids[-1] == kit.renderer.encode("</calc>")[0]


async def test_the_penalty_of_invalid_actions_leaves_the_reward(tokenizer_folder: Path) -> None:
    kit = make_kit(
        tokenizer_folder,
        ["hm", "<answer>46</answer>"],
        tool_use={"invalid_action_penalty": 0.25},
    )
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    assert trajectory.reward == 0.75
    assert trajectory.rewards == {"exact_answer": 1.0, "invalid_action_penalty": -0.25}


async def test_a_closed_engine_is_a_failed_trajectory_with_its_cause(
    tokenizer_folder: Path,
) -> None:
    kit = make_kit(tokenizer_folder, ["x"])
    await kit.engine.close()
    trajectory = checked(await play_episode(kit, CLAIM, Sampling()))
    assert trajectory.stop_reason is StopReason.ERROR
    assert trajectory.error == "engine: the scripted engine is closed"
    assert (trajectory.reward, trajectory.num_trained_tokens) == (None, 0)


async def test_a_prompt_that_is_too_long_is_a_failed_trajectory(tokenizer_folder: Path) -> None:
    kit = make_kit(tokenizer_folder, ["x"], max_prompt_tokens=5)
    trajectory = checked(await play_episode(kit, CLAIM, Sampling()))
    assert trajectory.error is not None
    assert trajectory.error.startswith("render: prompt has")
    assert trajectory.min_policy_version == CLAIM.policy_version


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

    kit = make_kit(tokenizer_folder, ["x"], environment=Breaks())
    trajectory = checked(await play_episode(kit, CLAIM, Sampling()))
    assert trajectory.stop_reason is StopReason.ERROR
    assert trajectory.error is not None
    assert trajectory.error.startswith("environment: ")


@pytest.mark.timeout(20)
async def test_an_aborted_generation_ends_the_episode_as_aborted(tokenizer_folder: Path) -> None:
    kit = make_kit(tokenizer_folder, ["<calc>1+1</calc>", "never"], hangs_at=1)
    episode = asyncio.ensure_future(play_episode(kit, CLAIM, Sampling(max_tokens=64)))
    await asyncio.sleep(0.1)
    await kit.engine.abort()
    trajectory = checked(await episode)
    assert trajectory.stop_reason is StopReason.ABORTED
    assert trajectory.num_trained_tokens == 0


async def test_a_turn_cut_in_its_tag_costs_nothing_and_is_told_of_its_length(
    tokenizer_folder: Path,
) -> None:
    kit = make_kit(
        tokenizer_folder,
        ["<calc>12+3", "<answer>46</answer>"],
        tool_use={"invalid_action_penalty": 0.25},
    )
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=5)))
    first = trajectory.turns[0]
    assert (first.end - first.start, first.is_valid, first.is_cut) == (5, True, True)
    assert "token limit" in first.reply
    assert trajectory.reward == 1.0
    assert trajectory.metrics["valid_actions"] == 1


async def test_an_answer_that_ends_with_the_last_token_is_an_answer(
    tokenizer_folder: Path,
) -> None:
    answer = "<answer>46</answer>"
    renderer = make_kit(tokenizer_folder, []).renderer
    size = len(renderer.encode(answer))
    kit = make_kit(tokenizer_folder, [answer], max_response_tokens=size)
    trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=size)))
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.ANSWER)


async def test_what_reset_returns_passes_the_check_of_rows(tokenizer_folder: Path) -> None:
    class Resets(SingleTurnEnvironment):
        def __init__(self, *messages: Any) -> None:
            self.messages = messages

        async def reset(self, prompt: Prompt) -> Any:
            return self.messages

    said = Message(role="assistant", content="The sum is ")
    for messages, is_fine in (
        ([*PROMPT.messages, said], False),
        ([], False),
        ([{"role": "user", "contents": "1+1="}], False),
        ([{"role": "user", "content": "1+1="}], True),
    ):
        kit = make_kit(tokenizer_folder, ["46<|im_end|>"], environment=Resets(*messages))
        trajectory = checked(await play_episode(kit, CLAIM, Sampling(max_tokens=64)))
        is_error = trajectory.stop_reason is StopReason.ERROR
        assert is_error is not is_fine
        assert (trajectory.error or "").startswith("environment:") is is_error
    kit = make_kit(tokenizer_folder, ["46<|im_end|>"], environment=Resets(*PROMPT.messages, said))
    claim = replace(CLAIM, prompt=replace(PROMPT, prefill=True))
    trajectory = checked(await play_episode(kit, claim, Sampling(max_tokens=64)))
    assert trajectory.prompt_text.endswith("<|im_start|>assistant\nThe sum is ")
