"""Imperfect scripted demonstrations for the warm start of a tiny model, played in the real environment.

Some follow `model.warm_start.turns`, the others guess. Imitating both leaves the policy undecided, so
that reinforcement has something to learn.
"""

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Formatter

import numpy as np

from raylearner.actors.engines.engine import Engine
from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.actors.proxy.agent import Agent, start_agent
from raylearner.config.schema import (
    EnvironmentSection,
    RendererSection,
    RewardSection,
    TinyModel,
    WarmStart,
)
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.errors import ConfigError, EngineError
from raylearner.observability.spans import Tracer
from raylearner.rewards.scorer import Scorer
from raylearner.tiny.model import make_tiny_model
from raylearner.tiny.warm_start import warm_start
from raylearner.tokenization.renderer import Renderer
from raylearner.types import (
    Claim,
    Completion,
    CompletionStop,
    Prompt,
    Sampling,
    StopReason,
    Trajectory,
)
from raylearner.weights.update import WeightReceipt, WeightUpdate

MAX_CONCURRENT = 32
"""Maximum number of demonstrations played at the same time."""
LARGEST_NUMBER = 9999
"""Maximum of `{number}` in a guess."""


def prepare_tiny_model(
    model: TinyModel,
    renderer_section: RendererSection,
    environment: EnvironmentSection,
    prompts: Sequence[Prompt],
    folder: str,
    seed: int,
) -> Iterator[str]:
    """Make the model directory `folder`; yield the progress in words.

    Raises `ConfigError` for turns that name a column which the prompts do not have, and when a
    demonstration fails.
    """
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_tiny_model(model, partial, seed=seed)
    if model.warm_start is not None:
        yield "playing demonstrations"
        renderer = Renderer.from_pretrained(str(partial), renderer_section)
        played = asyncio.run(
            demonstrate(prompts, renderer, environment, model.warm_start, seed=seed)
        )
        yield from warm_start(partial, played, model.warm_start, seed=seed)
    partial.rename(folder)


async def demonstrate(
    prompts: Sequence[Prompt],
    renderer: Renderer,
    environment: EnvironmentSection,
    config: WarmStart,
    *,
    seed: int,
) -> list[Trajectory]:
    """Play the episodes; the loss mask is True on the demonstrator's tokens."""
    factory = EnvironmentFactory(environment, check_image=renderer.check_image)
    agent = await start_agent(environment)
    places = asyncio.Semaphore(MAX_CONCURRENT)

    async def perform(prompt: Prompt, turns: list[str]) -> list[Trajectory]:
        async with places:
            return await _play(prompt, turns, renderer, factory, agent)

    try:
        scripts = _scripts(prompts, config, random.Random(seed))
        played = await asyncio.gather(*(perform(prompt, turns) for prompt, turns in scripts))
        return [segment for segments in played for segment in segments]
    finally:
        if agent is not None:
            await agent.close()
        await factory.close()


def _scripts(
    prompts: Sequence[Prompt], config: WarmStart, rng: random.Random
) -> Iterator[tuple[Prompt, list[str]]]:
    for _ in range(min(config.num_demonstrations, config.num_steps * config.batch_size)):
        prompt = rng.choice(prompts)
        if rng.random() < config.right_fraction:
            yield prompt, [_fill_in(turn, prompt) for turn in config.turns]
        else:
            guess = {
                "number": str(rng.randint(1, LARGEST_NUMBER)),
                "other_answer": rng.choice(prompts).answer,
            }
            guess = {name: text for name, text in guess.items() if text is not None}
            yield prompt, [_fill_in(config.guess, prompt, **guess)]


def _fill_in(template: str, prompt: Prompt, **more: str) -> str:
    values: dict[str, object] = {
        **prompt.columns,
        "prompt": prompt.messages[-1].content,
        **more,
    }
    if prompt.answer is not None:
        values["answer"] = prompt.answer
    names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if missing := names - values.keys():
        raise ConfigError(
            f"model.warm_start: {template!r} names {', '.join(sorted(missing))}, but prompt "
            f"{prompt.prompt_id} has only {', '.join(sorted(values))}; write {{{{ and }}}} for braces"
        )
    return template.format_map(values)


async def _play(
    prompt: Prompt,
    turns: list[str],
    renderer: Renderer,
    factory: EnvironmentFactory,
    agent: Agent | None,
) -> list[Trajectory]:
    kit = EpisodeKit(
        engine=_Demonstrator(turns, renderer),
        renderer=renderer,
        scorer=Scorer(RewardSection(functions=())),
        make_environment=factory.make,
        tracer=Tracer(track="demonstrator", is_enabled=False),
        agent=agent,
    )
    claim = Claim(group_id=0, sample_index=0, attempt=0, prompt=prompt, policy_version=0, seed=0)
    played = await play_episode(
        kit, claim, Sampling(max_tokens=renderer.config.max_response_tokens)
    )
    if played[0].stop_reason is StopReason.ERROR:
        raise ConfigError(
            f"model.warm_start: the demonstration of prompt {prompt.prompt_id} failed: "
            f"{played[0].error}"
        )
    return played


class _Demonstrator(Engine):
    """An engine that plays the scripted turns of one episode in order."""

    def __init__(self, turns: list[str], renderer: Renderer) -> None:
        self._turns = iter(turns)
        self._renderer = renderer

    @property
    def policy_version(self) -> int:
        return 0

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, images: Sequence[bytes] = ()
    ) -> Completion:
        turn = next(self._turns, None)
        if turn is None:
            raise EngineError("the episode continues after the last of model.warm_start.turns")
        written = np.asarray(self._renderer.encode(turn), np.int32)
        return Completion(
            token_ids=written,
            logprobs=np.zeros(len(written), np.float32),
            policy_versions=np.zeros(len(written), np.int32),
            stop_reason=CompletionStop.STOP_STRING,
        )

    async def receive(self, update: WeightUpdate) -> WeightReceipt:
        raise EngineError("a demonstrator does not receive weights")

    async def sleep(self) -> None: ...

    async def abort(self) -> None: ...

    async def died(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("a demonstrator does not die")

    async def close(self) -> None: ...
