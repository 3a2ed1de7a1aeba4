"""The command `check --play`: one episode without a cluster or an engine, which shows errors of the
environment, tools and rewards before a run.

A scripted policy calls each tool once, with arguments generated from the tool's schema, and then gives
the row's own answer.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raylearner.actors.engines.scripted import ScriptedEngine
from raylearner.actors.episode import EpisodeKit, play_episode
from raylearner.actors.proxy.agent import Agent, start_agent
from raylearner.cleanup import clean_up
from raylearner.config.environment import ToolUse
from raylearner.config.rewards import RewardModel, RewardSection
from raylearner.config.schema import RunConfig
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.errors import ConfigError
from raylearner.observability.spans import Tracer
from raylearner.rewards.scorer import GroupScorer, Scorer
from raylearner.run import prompt_checks
from raylearner.tokenization.renderer import Renderer
from raylearner.tools.tool import Tool
from raylearner.types import Claim, Prompt, Sampling, StopReason, Trajectory

SHOWN_CHARACTERS = 2000
"""Maximum length of a printed turn, reply or error."""


def play_first_row(config: RunConfig, *, report: Callable[[str], None]) -> None:
    """Play the first training row and report it turn by turn.

    Tools and judges call their services; reward models, which need a cluster, are left out. Raises
    `ConfigError` where the episode fails.
    """
    renderer = prompt_checks.make_renderer(config)
    if renderer is None:
        raise ConfigError("--play: the tokenizer of a tiny vision model is created by the run")
    prompt = prompt_checks.load_rows(config, config.data.train)[0]
    rewards = config.rewards
    functions = [f for f in rewards.functions if not isinstance(f, RewardModel)]
    if len(functions) < len(rewards.functions):
        report("play: reward models are left out, since they need a cluster")
        rewards = rewards.model_copy(update={"functions": functions})
    config = config.model_copy(update={"rewards": rewards})
    segments = asyncio.run(_play(config, prompt, renderer))
    report(f"play: prompt: {_shown(prompt.messages[-1].content)}")
    for line in _lines(segments, config.rewards):
        report(line)
    failed = next((t for t in segments if t.stop_reason is StopReason.ERROR), None)
    if failed is not None:
        raise ConfigError(f"--play: the episode of row {prompt.prompt_id!r} failed: {failed.error}")


async def _play(config: RunConfig, prompt: Prompt, renderer: Renderer) -> list[Trajectory]:
    environments = EnvironmentFactory(
        config.environment,
        check_image=renderer.check_image,
        reasoning_tags=config.renderer.reasoning_tags,
    )
    scorer, groups = Scorer(config.rewards), GroupScorer(config.rewards)
    engine = ScriptedEngine(
        FixedTurns(renderer, _turns(config, prompt, environments.tools)),
        end_token_ids=renderer.end_token_ids,
    )
    agent: Agent | None = None
    try:
        agent = await start_agent(config.environment)
        kit = EpisodeKit(
            engine=engine,
            renderer=renderer,
            scorer=scorer,
            make_environment=environments.make,
            tracer=Tracer("play", is_enabled=False),
            agent=agent,
        )
        claim = Claim(
            group_id=0, sample_index=0, attempt=0, prompt=prompt, policy_version=0, seed=0
        )
        sampling = Sampling(
            max_tokens=config.sampling.max_turn_tokens,
            stop_token_ids=renderer.end_token_ids,
            banned_token_ids=renderer.banned_token_ids,
        )
        segments = await play_episode(kit, claim, sampling)
        if any(function.sees_groups for function in config.rewards.functions):
            for index, score in (await groups.score(prompt, segments)).items():
                if score.error is not None:
                    segments = [t.failed(score.error) for t in segments if t.sample_index == index]
        return segments
    finally:
        await clean_up(
            sys.exception(),
            *([] if agent is None else [agent.close]),
            environments.close,
            scorer.close,
            groups.close,
            engine.close,
        )


class FixedTurns:
    """Replies with a fixed list of turns; the last one is repeated."""

    def __init__(self, renderer: Renderer, turns: Sequence[str]) -> None:
        self._renderer = renderer
        self._turns = list(turns)

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        text = self._turns.pop(0) if len(self._turns) > 1 else self._turns[0]
        written = [*self._renderer.encode(text), self._renderer.end_token_ids[0]]
        written = written[: sampling.max_tokens]
        return written, [-1.0] * len(written)


def _turns(config: RunConfig, prompt: Prompt, tools: Sequence[Tool]) -> list[str]:
    environment = config.environment
    answer = prompt.answer if prompt.answer is not None else "an answer"
    tag = next((t for f in config.rewards.functions if (t := getattr(f, "answer_tag", None))), None)
    calls: list[str] = []
    if isinstance(environment, ToolUse):
        dialect = environment.dialect
        tag = dialect.answer_tag
        for tool in tools:
            arguments = _arguments(tool.schema, prompt)
            calls.append(dialect.write_call(tool.name, tool.tag, arguments))
        calls = calls[: environment.max_turns]
    return [*calls, answer if tag is None else f"<{tag}>{answer}</{tag}>"]


def _arguments(schema: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    """Generate arguments of the types in the tool's schema."""
    parameters = schema["function"]["parameters"]
    properties: Mapping[str, Any] = parameters.get("properties", {})
    required: Sequence[str] = parameters.get("required", list(properties))
    question = prompt.messages[-1].content
    number = re.search(r"\d+", question)
    made: dict[str, Any] = {}
    for name in required:
        kind = properties.get(name, {})
        if "enum" in kind:
            made[name] = kind["enum"][0]
            continue
        values: dict[str, Any] = {
            "integer": int(number[0]) if number else 1,
            "number": float(number[0]) if number else 1.0,
            "boolean": True,
            "array": [],
            "object": {},
        }
        made[name] = values.get(str(kind.get("type")), _text(name, question))
    return made


def _text(name: str, question: str) -> str:
    """Return a valid argument of a bundled tool under this name, else the question."""
    return {"code": "print(1 + 1)", "expression": "1 + 1"}.get(name, question)


def _lines(segments: Sequence[Trajectory], rewards: RewardSection) -> list[str]:
    lines: list[str] = []
    for segment in segments:
        where = f"segment {segment.segment}, " if len(segments) > 1 else ""
        for turn in segment.turns:
            validity = "" if turn.is_valid else ", invalid"
            lines.append(f"play: {where}turn {turn.number + 1}{validity}: {_shown(turn.text)}")
            if turn.reply:
                source = f"tool {turn.tool}" if turn.tool else "environment"
                lines.append(f"play: {where}{source}: {_shown(turn.reply)}")
    last = segments[-1]
    lines.append(f"play: ended with {last.stop_reason}")
    logged = {**last.metrics, **last.columns}
    lines += [f"play: logged {name}: {_shown(str(value))}" for name, value in logged.items()]
    for name, value in last.rewards.items():
        weight = rewards.weights.get(name, 1.0)
        lines.append(f"play: reward {name}: {value}{f', weight {weight}' * (weight != 1.0)}")
    if last.stop_reason is not StopReason.ERROR:
        lines.append(f"play: reward: {last.reward}")
    return lines


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
