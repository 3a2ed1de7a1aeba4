"""The data types are the architecture: what travels between prompts, actors, replay and learner.

Shapes: `T` tokens of one trajectory, prompt included. A trajectory is flat arrays without padding.
Only the standard library, numpy, `errors` and `text` are imported here, so that every package can
import this module. Records that hold external text make it encodable when they are created.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raylearner.errors import TrajectoryError
from raylearner.text import make_encodable, outside

PolicyVersion: TypeAlias = int
"""0 is the initial policy; each committed learner step makes the next.

The learner owns the version. `LearnerGroup.policy_version` is that of its last commit; the publisher
announces it in each `WeightUpdate`, an engine holds that of its last update and stamps every sampled
token with it, and the replay receives it as an argument of `take` and `commit`.
"""

TrajectoryKey: TypeAlias = tuple[int, int, int, int]
"""Group, sample index, attempt and segment."""

BAN_BIAS = -100.0
"""Added to the logits of banned tokens, by engines and learner alike; the minimum of vLLM."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

CALLS, FAILURES = "calls/", "failures/"
"""Prefixes of a tool's name among an episode's metrics: its calls, and the failed ones."""

IMAGE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Marks the place of an image in a message's content."""


class StopReason(StrEnum):
    """Reason for the end of an episode."""

    ANSWER = "answer"
    END = "end"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    ERROR = "error"
    ABORTED = "aborted"


class CompletionStop(StrEnum):
    """Reason for the end of sampling."""

    END = "end"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORTED = "aborted"


CALL_ID_LENGTH = 9
"""Length of a tool call's id, the only one that the templates of all models accept."""


def new_call_id() -> str:
    """Return the id of one tool call."""
    return uuid.uuid4().hex[:CALL_ID_LENGTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One call of a tool; `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str

    __post_init__ = make_encodable

    def wire(self) -> dict[str, Any]:
        """Return the call in the format of OpenAI's API."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; images are encoded bytes (PNG, JPEG, WebP), one for each `IMAGE_MARK` of the
    content, in order. Without images the mark is text like any other."""

    role: Role
    content: str
    images: tuple[bytes, ...] = ()
    calls: tuple[FunctionCall, ...] = ()
    """Tool calls of an assistant message."""
    call_id: str | None = None
    """Id of the call that a tool message answers."""
    name: str | None = None
    """Name of the author; for a tool message, the tool."""
    reasoning: str = ""
    """Reasoning of the assistant's turn, which is not part of the content."""
    is_cut: bool = False
    """Whether the assistant's turn was cut at its token limit."""

    __post_init__ = make_encodable


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data source: the start of an episode, and the inputs of its rewards."""

    prompt_id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    other_answers: tuple[str, ...] = ()
    """Answers accepted besides `answer`."""
    doc_id: str | None = None
    source: str = "default"
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_conversational: bool = False
    """Whether the row holds messages and not plain text."""
    prefill: bool = False
    """Whether a last message of the assistant starts the policy's first turn."""
    place: str = ""
    """File and row."""

    __post_init__ = make_encodable

    @property
    def answers(self) -> tuple[str, ...]:
        """All accepted answers; empty where the row has none."""
        return () if self.answer is None else (self.answer, *self.other_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of the engine; log-probabilities are those of the resulting distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    regex: str | None = None
    extra_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of the engine, by its own names."""
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens of one generate call. The three arrays have equal length `[n]`."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    policy_versions: NDArray[np.int32]
    stop_reason: CompletionStop


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to play one sample of a group, once. A retry carries a higher `attempt`."""

    group_id: int
    sample_index: int
    attempt: int
    prompt: Prompt
    policy_version: PolicyVersion
    seed: int
    step: int | None = None
    """Number of learner steps committed at the claim; None outside of training."""
    is_greedy: bool = False
    """Sampled greedily: its reward is the group's baseline, and it never trains."""

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.group_id, self.sample_index, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReply:
    """Claims to play and claims to stop; both empty after a timeout."""

    claims: list[Claim]
    cancelled: list[tuple[int, int, int]]
    """Keys of this actor's running claims that their groups no longer need; each is sent once."""
    policy_version: PolicyVersion
    """The learner's version at its last take or commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion `token_ids[start:end]` plus the environment's reply up to `reply_end`."""

    start: int
    end: int
    reply_end: int
    text: str
    reply: str
    stop_reason: CompletionStop
    min_policy_version: PolicyVersion
    max_policy_version: PolicyVersion
    tool: str | None = None
    """Names of the called tools, joined by commas."""
    is_valid: bool = True
    """False for an invalid action of the policy. A turn that was cut before its action is not judged."""
    foreign_form: str | None = None
    """Format of a tool call in the turn that is not the configured one."""
    opening: str = ""
    """Opening tag of the reasoning in which the turn begins, where the prompt opened it."""
    thoughts: tuple[tuple[int, int], ...] = ()
    """Spans of characters of `text` that are reasoning, tags included."""

    @property
    def is_cut(self) -> bool:
        """Whether its token limit ended it before a complete action."""
        is_long = self.stop_reason is CompletionStop.LENGTH
        return is_long and self.is_valid and self.tool is None

    @property
    def content(self) -> str:
        """The text without its reasoning, which is parsed and scored."""
        return outside(self.text, self.thoughts)

    number: int = 0
    """Its number among all turns of the episode in time, from 0, across segments."""

    __post_init__ = make_encodable


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One segment of one episode, prompt and observations included. Checked at `put`, see `replay/validation.py`."""

    group_id: int
    sample_index: int
    attempt: int
    segment: int = 0
    prompt_id: str
    source: str = "default"
    doc_id: str | None = None
    prompt_text: str = ""
    answer: str | None = None
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] True exactly on sampled tokens
    train_mask: NDArray[np.bool_]  # [T] the subset that trains
    behavior_logprobs: NDArray[np.float32]  # [T] finite exactly on the loss mask, NaN elsewhere
    policy_versions: NDArray[np.int32]  # [T] -1 off the loss mask
    claim_policy_version: PolicyVersion
    turns: tuple[Turn, ...] = ()
    images: tuple[bytes, ...] = ()
    """Encoded as PNG in the model's size, in the order of their placeholders."""
    image_token_id: int | None = None
    """The placeholder: each run of it is one image. None for text-only models."""
    image_unit: int | None = None
    """Side in pixels of the square that becomes one placeholder. None without this relation."""
    shown: tuple[str, ...] = ()
    """Ids of the passages and pages that tools returned, in order."""
    response_text: str = ""
    """All text after the prompt, observations included."""
    given_answer: str | None = None
    """The answer that an agent program returned; None where the last turn is the answer."""
    claim_step: int | None = None
    """Number of learner steps committed at the claim; None outside of training."""
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that reward functions logged: text, numbers, booleans or None."""
    stop_reason: StopReason = StopReason.END
    error: str | None = None
    error_kind: str = "other"
    """`TrajectoryError.kind` of the failure, which counts it."""
    tool_errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """The last error of each tool whose failure was shown to the policy, without the error."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    started_at_s: float = 0.0
    finished_at_s: float = 0.0

    __post_init__ = make_encodable

    @property
    def episode_key(self) -> tuple[int, int, int]:
        return (self.group_id, self.sample_index, self.attempt)

    @property
    def key(self) -> TrajectoryKey:
        """Key of this segment."""
        return (*self.episode_key, self.segment)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_trained_tokens(self) -> int:
        return int(self.train_mask.sum())

    @property
    def is_truncated(self) -> bool:
        """Whether the episode ended at its token limit."""
        return self.stop_reason is StopReason.MAX_TOKENS

    @property
    def min_policy_version(self) -> PolicyVersion:
        """The oldest version that sampled a token; the claim's for an episode without sampled tokens."""
        if not self.loss_mask.any():
            return self.claim_policy_version
        return int(self.policy_versions[self.loss_mask].min())

    @property
    def max_policy_version(self) -> PolicyVersion:
        if not self.loss_mask.any():
            return self.claim_policy_version
        return int(self.policy_versions[self.loss_mask].max())

    @property
    def is_placeholder(self) -> NDArray[np.bool_]:  # [T]
        if self.image_token_id is None:
            return np.zeros(len(self.token_ids), np.bool_)
        return self.token_ids == self.image_token_id

    @property
    def placeholder_runs(self) -> list[int]:
        """Lengths of the runs of placeholders, one for each image."""
        if self.image_token_id is None:
            return []
        edges = np.flatnonzero(np.diff(self.is_placeholder, prepend=False, append=False))
        return (edges[1::2] - edges[::2]).tolist()

    def with_train_mask(self, train_mask: NDArray[np.bool_]) -> "Trajectory":
        return replace(self, train_mask=train_mask)

    def failed(self, cause: TrajectoryError) -> "Trajectory":
        """Return it as a failed episode, without a reward or a trained token."""
        return replace(
            self,
            reward=None,
            stop_reason=StopReason.ERROR,
            error=cause.text,
            error_kind=cause.kind,
            train_mask=np.zeros_like(self.train_mask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScore:
    """The final rewards of an episode; with `error`, they could not be computed."""

    reward: float | None = None
    """Weighted, clipped sum of the rewards that apply; None when none does."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Unweighted rewards by function."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    error: TrajectoryError | None = None

    __post_init__ = make_encodable


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The finished episodes of one prompt, ordered by sample index and segment."""

    group_id: int
    prompt_id: str
    policy_version: PolicyVersion
    trajectories: tuple[Trajectory, ...]
    is_partial: bool = False
    greedy_reward: float | None = None
    """Reward of the prompt's greedy episode, if one was played; it is not among the trajectories."""

    @property
    def rewards(self) -> dict[int, float | None]:
        """The reward of each episode by sample index: baselines weigh episodes, not segments."""
        return {t.sample_index: t.reward for t in self.trajectories}
