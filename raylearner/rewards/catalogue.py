"""Reward functions by the `kind` that the YAML uses."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from raylearner.config import rewards as sections
from raylearner.rewards import formats, matches, retrieval
from raylearner.rewards.checked import CheckedReward
from raylearner.rewards.functions import EpisodeView, Reward, RewardLog
from raylearner.rewards.judge import JudgeReward, PairwiseReward
from raylearner.rewards.user import UserReward

Conversation = tuple[dict[str, str], ...]
ModelCall = Callable[[Conversation], Awaitable[float]]
"""A reward model, wherever it runs: messages with `role` and `content` to a number."""


MATCHES = {
    "exact_answer": matches.exact_answer,
    "exact_match": matches.exact_match,
    "f1": matches.f1,
}


class PlainReward:
    """A quick function of one episode, called where it stands."""

    def __init__(self, function: Callable[[EpisodeView], float | None]) -> None:
        self._function = function

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        return [self._function(episode) for episode in episodes]

    async def close(self) -> None:
        return None


class ModelReward:
    """Prompt and completion as messages to a reward model."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        return [await self._call(conversation(episode)) for episode in episodes]

    async def close(self) -> None:
        return None


def make_reward(
    name: str,
    section: sections.RewardFunction,
    models: Mapping[str, ModelCall],
    *,
    timeout_s: float | None = None,
) -> Reward:
    """`models` are the reward models by function name; `timeout_s` limits calls of users' functions.

    Raises `ConfigError` for a user's function that cannot be taken.
    """
    match section:
        case sections.AnswerMatch():
            return PlainReward(partial(MATCHES[section.kind], tag=section.answer_tag))
        case sections.CheckedAnswer():
            return CheckedReward(section)
        case sections.AnswerFormat():
            return PlainReward(partial(formats.answer_format, section=section))
        case sections.ToolUseShaping():
            return PlainReward(partial(formats.tool_use, section=section))
        case sections.RetrievalHit():
            return PlainReward(partial(retrieval.retrieval_hit, section=section))
        case sections.ResponseLength():
            return PlainReward(partial(formats.response_length, section=section))
        case sections.RewardModel():
            return ModelReward(models.get(name) or _no_model(name))
        case sections.Judge():
            return JudgeReward(section)
        case sections.PairwiseJudge():
            return PairwiseReward(section)
        case sections.UserFunction():
            return UserReward(section, name=name, timeout_s=timeout_s)


def conversation(episode: EpisodeView) -> Conversation:
    """The prompt's messages, then what the policy and its tools said in turn."""
    messages = [{"role": m.role, "content": m.content} for m in episode.prompt.messages]
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn.said})
        if turn.reply:
            messages.append({"role": "tool", "content": turn.reply})
    return tuple(messages)


def _no_model(name: str) -> ModelCall:
    async def call(_: Conversation) -> float:
        raise RuntimeError(f"no actor holds the reward model {name!r}")

    return call
