"""Reward functions by `kind`, and checks of the rows that they need."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from raylearner.config import rewards as sections
from raylearner.config.rewards import RewardSection
from raylearner.errors import ConfigError
from raylearner.rewards import built_in
from raylearner.rewards.checked import CheckedReward
from raylearner.rewards.functions import EpisodeView, Reward, RewardLog
from raylearner.rewards.judge import JudgeReward, PairwiseReward
from raylearner.rewards.user import UserReward, check_columns
from raylearner.types import Prompt

Conversation = tuple[dict[str, str], ...]
ModelCall = Callable[[Conversation], Awaitable[float]]
"""A reward model, wherever it runs: messages with `role` and `content` to a number."""


MATCHES = {
    "exact_answer": built_in.exact_answer,
    "exact_match": built_in.exact_match,
    "f1": built_in.f1,
}


class PlainReward:
    """A quick function of one episode, called directly."""

    def __init__(self, function: Callable[[EpisodeView], float | None]) -> None:
        self._function = function

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        return [self._function(episode) for episode in episodes]

    async def close(self) -> None:
        return None


class ModelReward:
    """Sends prompt and completion as messages to a reward model."""

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
    """Make one reward; `models` are the reward models by function name.

    `timeout_s` limits calls of users' functions. Raises `ConfigError` for one that cannot be used.
    """
    match section:
        case sections.AnswerMatch():
            return PlainReward(partial(MATCHES[section.kind], tag=section.answer_tag))
        case sections.CheckedAnswer():
            return CheckedReward(section)
        case sections.AnswerFormat():
            return PlainReward(partial(built_in.answer_format, section=section))
        case sections.ToolUseShaping():
            return PlainReward(partial(built_in.tool_use, section=section))
        case sections.RetrievalHit():
            return PlainReward(partial(built_in.retrieval_hit, section=section))
        case sections.ResponseLength():
            return PlainReward(partial(built_in.response_length, section=section))
        case sections.RewardModel():
            return ModelReward(models.get(name) or _no_model(name))
        case sections.Judge():
            return JudgeReward(section)
        case sections.PairwiseJudge():
            return PairwiseReward(section)
        case sections.UserFunction():
            return UserReward(section, name=name, timeout_s=timeout_s)


def conversation(episode: EpisodeView) -> Conversation:
    """Return the prompt's messages, then those of the policy and its tools in turn."""
    messages = [{"role": m.role, "content": m.content} for m in episode.prompt.messages]
    return (*messages, *episode.new_messages)


def _no_model(name: str) -> ModelCall:
    async def call(_: Conversation) -> float:
        raise RuntimeError(f"no actor has the reward model {name!r}")

    return call


logger = logging.getLogger(__name__)

MAX_NAMED_ROWS = 5
_NEED_ANSWERS = frozenset({"exact_answer", "exact_match", "f1", "math_verify"})


def check_rows(rewards: RewardSection, prompts: Sequence[Prompt]) -> None:
    """Warn of rows that no function can score; raises `ConfigError` where that is all of them.

    Raises it too for columns that functions would never receive, see `check_columns`.
    """
    check_columns(rewards, prompts)
    if not all(function.kind in _NEED_ANSWERS for function in rewards.functions):
        return
    without = [p for p in prompts if not any(answer.strip() for answer in p.answers)]
    if not without:
        return
    named = ", ".join(prompt.prompt_id for prompt in without[:MAX_NAMED_ROWS])
    more = ", ..." if len(without) > MAX_NAMED_ROWS else ""
    found = f"{len(without)} of {len(prompts)} rows have no accepted answer ({named}{more})"
    names = ", ".join(rewards.names)
    if len(without) == len(prompts):
        raise ConfigError(
            f"data: {found}, and every reward function ({names}) needs one; set answer_column to "
            "the column with the answers"
        )
    logger.warning("data: %s: no reward function (%s) applies, so they do not train", found, names)
