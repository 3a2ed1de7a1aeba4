"""Episodes without a model: scripts that say given texts, and the kit that plays them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raylearner.actors.engines.scripted import RandomTokens, Script, ScriptedEngine
from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.config.schema import RendererSection, RewardSection
from raylearner.environments.protocol import Environment
from raylearner.observability.spans import Tracer
from raylearner.replay.validation import trajectory_error
from raylearner.rewards.scorer import Scorer
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Claim, Message, Prompt, Sampling, Trajectory

PROMPT = Prompt(
    prompt_id="p",
    messages=(Message(role="user", content="12+34="),),
    answer="46",
    columns={"level": 3},
)


def make_claim(prompt: Prompt = PROMPT, **changes: Any) -> Claim:
    values = {"group_id": 1, "sample_index": 0, "attempt": 0, "policy_version": 2, "seed": 0}
    return Claim(prompt=prompt, **values | changes)


def make_renderer(folder: Path, **settings: object) -> Renderer:
    return Renderer.from_pretrained(str(folder), RendererSection.model_validate(settings))


@dataclass
class Says:
    """Says one text a turn, and records the prompts. Blocks in turn `hangs_at`."""

    renderer: Renderer
    texts: Sequence[str]
    hangs_at: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        turn = len(self.prompts)
        self.prompts.append(list(token_ids))
        self.has_begun.set()
        if turn == self.hangs_at:
            await asyncio.sleep(3600)
        sampled = self.renderer.encode(self.texts[turn], keeps_special=True)[: sampling.max_tokens]
        return sampled, [-0.5] * len(sampled)


def no_environment() -> Environment:
    raise AssertionError("programs play without environments")


def make_kit(
    renderer: Renderer,
    script: Script | None = None,
    *,
    make_environment: Callable[[], Environment] = no_environment,
    rewards: RewardSection | None = None,
    agent: Any = None,
) -> EpisodeKit:
    """A kit of the script, by default random tokens."""
    script = script or RandomTokens(vocab_size=60, max_tokens=4)
    return EpisodeKit(
        engine=ScriptedEngine(script, end_token_ids=renderer.end_token_ids),
        renderer=renderer,
        scorer=Scorer(rewards or RewardSection()),
        make_environment=make_environment,
        tracer=Tracer("test"),
        agent=agent,
    )


async def play_one(kit: EpisodeKit, claim: Claim | None = None, **sampling: Any) -> Trajectory:
    """The only segment of an episode; it must keep the contract of trajectories."""
    limits = {"max_tokens": 64} | sampling
    (segment,) = await play_episode(kit, claim or make_claim(), Sampling(**limits))
    assert trajectory_error(segment) is None
    return segment
