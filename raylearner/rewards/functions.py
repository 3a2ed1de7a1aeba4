"""Built-in reward functions: each takes what an episode became and returns a number or None."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from raylearner.types import Prompt, StopReason, Turn

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """What a reward may look at: the prompt's row and everything the policy wrote and saw."""

    prompt: Prompt
    turns: tuple[Turn, ...]
    response: str
    """All text after the prompt, observations included."""
    completion_ids: tuple[int, ...]
    """Sampled tokens, in order."""
    stop_reason: StopReason
    policy_version: int

    @property
    def completion(self) -> str:
        """What the policy wrote, turns joined."""
        return "".join(turn.text for turn in self.turns)


RewardFunctionCall = Callable[..., float | Awaitable[float | None] | None]


def exact_answer(episode: EpisodeView) -> float | None:
    """1 when the last turn's answer equals the prompt's, white space aside; 0 otherwise.

    None when the prompt has no answer. Without answer tags the whole last turn is the answer.
    """
    if episode.prompt.answer is None:
        return None
    if not episode.turns:
        return 0.0
    return float(given_answer(episode.turns[-1].text) == episode.prompt.answer.strip())


def given_answer(text: str) -> str:
    """The content of the last answer tag, or the whole text without one."""
    found = _ANSWER.findall(text)
    return str(found[-1] if found else text).strip()


def response_length(episode: EpisodeView, *, target_tokens: int) -> float:
    """1 at `target_tokens` sampled tokens, falling linearly to 0 at none or twice as many."""
    distance = abs(len(episode.completion_ids) - target_tokens) / target_tokens
    return max(0.0, 1.0 - distance)


REWARDS: dict[str, RewardFunctionCall] = {
    "exact_answer": exact_answer,
    "response_length": response_length,
}
