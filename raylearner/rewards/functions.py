"""The interface of reward functions, and the answer of an episode."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raylearner.text import finite_or_nan, pairs
from raylearner.types import Prompt, StopReason, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """An episode as rewards receive it: the prompt's row and all text of the policy and its tools."""

    prompt: Prompt
    turns: tuple[Turn, ...]
    response: str
    """All text after the prompt, observations included."""
    completion_ids: tuple[int, ...]
    """Sampled tokens, in order."""
    stop_reason: StopReason
    policy_version: int
    """The newest version that sampled one of its tokens."""
    step: int | None = None
    """Learner steps committed when the episode was claimed; None in evaluations."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Counts of the environment, such as `failed_tool_calls`."""
    shown: tuple[str, ...] = ()
    """Ids of the pages that tools showed, in order."""
    answer: str | None = None
    """The answer that an agent program returned; None where the last turn is the answer."""

    @property
    def completion(self) -> str:
        """The policy's text, turns joined, without its thoughts; `turns` hold both."""
        return "".join(turn.content for turn in self.turns)

    @property
    def new_messages(self) -> list[dict[str, str]]:
        """The messages of the policy and its tools in turn, without thoughts."""
        messages: list[dict[str, str]] = []
        for turn in self.turns:
            messages.append({"role": "assistant", "content": turn.content})
            if turn.reply:
                messages.append({"role": "tool", "content": turn.reply})
        return messages

    @property
    def prompt_text(self) -> str:
        """The contents of the prompt's messages without the system's."""
        messages = self.prompt.messages
        return "\n\n".join(m.content for m in messages if m.role != "system")


def view_of(
    prompt: Prompt, segments: Sequence[Trajectory], reward_names: Collection[str]
) -> EpisodeView:
    """Make the view of one episode from its segments in order.

    It holds only fields that trajectories store, so functions of one episode, of a group and after a
    resume receive the same. Numbers logged by `reward_names` are left out.
    """
    last = segments[-1]
    turns = (turn for segment in segments for turn in segment.turns)
    return EpisodeView(
        prompt=prompt,
        turns=tuple(sorted(turns, key=lambda turn: turn.number)),
        response="\n\n".join(segment.response_text for segment in segments),
        completion_ids=tuple(
            token for s in segments for token in s.token_ids[s.loss_mask].tolist()
        ),
        stop_reason=last.stop_reason,
        policy_version=max(segment.max_policy_version for segment in segments),
        step=last.claim_step,
        metrics={
            name: value
            for name, value in last.metrics.items()
            if "/" not in name or name.partition("/")[0] not in reward_names
        },
        shown=last.shown,
        answer=last.given_answer,
    )


class RewardLog:
    """Collects one function's log about the `size` episodes that it is called with."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self.columns: list[dict[str, Any]] = [{} for _ in range(size)]
        self.metrics: dict[str, float] = {}

    def extra(self, column: str, values: Sequence[object]) -> None:
        """Log one value per episode under `column`; values other than text, numbers and truth
        values are shown as text. Raises `ValueError` unless there are as many values as
        episodes."""
        if isinstance(values, str) or len(values) != self._size:
            raise ValueError(
                f"log_extra({column!r}, ...) takes a list of {self._size}, one for each completion"
            )
        for row, value in zip(self.columns, values, strict=True):
            row[column] = _plain(value)

    def metric(self, name: str, value: float) -> None:
        """Log a number, reported as its mean over the step under `<function>/<name>`. Numbers that
        are not finite become NaN, which is counted and left out of the mean."""
        self.metrics[f"{self._name}/{name}"] = finite_or_nan(value)


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | int | float):
        return value
    item = getattr(value, "item", None)  # a scalar of numpy or torch
    if callable(item) and getattr(value, "shape", None) == ():
        return _plain(item())
    return str(value)


class Reward(Protocol):
    """One function of the configuration, ready to be called.

    An exception fails the episodes that it was called with.
    """

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        """Return a finite number per episode, or None where the reward does not apply."""
        ...

    async def close(self) -> None: ...


def given_answer(text: str, tag: str | None = "answer") -> str:
    """Return the content of the last answer tag, or the whole text without one."""
    found = [] if tag is None else list(pairs(text, f"<{tag}>", f"</{tag}>"))
    return (text[slice(*found[-1])] if found else text).strip()


def last_answer(episode: EpisodeView, tag: str | None) -> str:
    """Return the program's answer, or that of the last turn without its thoughts; empty without turns."""
    if episode.answer is not None:
        return given_answer(episode.answer, tag)
    return given_answer(episode.turns[-1].content, tag) if episode.turns else ""
