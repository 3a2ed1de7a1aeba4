"""The data types are the architecture: what travels between prompts, actors, replay, learner and weights.

Shapes: `T` tokens of one trajectory, prompt included. A trajectory is flat arrays without padding.
Only the standard library, numpy and `text` are imported here, so that every room can import this
one. Whatever holds text from outside makes it encodable when it is made.
"""

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raylearner.errors import TrajectoryError
from raylearner.text import make_encodable, outside

PolicyVersion: TypeAlias = int
"""0 is the initial policy; each committed learner step makes the next."""

TrajectoryKey: TypeAlias = tuple[int, int, int, int]
"""Group, sample index, attempt and segment."""

BAN_BIAS = -100.0
"""Added to the logits of banned tokens, by engines and learner alike; vLLM takes no less."""

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
PNG_SIDES = (16, 20)
"""Where a PNG's header has its width and its height, big-endian."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

CALLS, FAILURES = "calls/", "failures/"
"""Before a tool's name among an episode's metrics: its calls, and those that the tool failed."""

IMAGE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands in a message's content where an image is shown."""


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWER = "answer"
    END = "end"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    ERROR = "error"
    ABORTED = "aborted"


class CompletionStop(StrEnum):
    """Why the engine stopped sampling."""

    END = "end"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORTED = "aborted"


CALL_ID_LENGTH = 9
"""Letters and digits of a tool call's id: every template accepts so many, Mistral's no other number."""


def new_call_id() -> str:
    """The id of one tool call."""
    return uuid.uuid4().hex[:CALL_ID_LENGTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One call of a tool; `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str

    __post_init__ = make_encodable

    def wire(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
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
    """Tools that a message of the assistant calls."""
    call_id: str | None = None
    """The call that a message of a tool answers."""
    name: str | None = None
    """Who speaks; for a message of a tool, the tool."""
    reasoning: str = ""
    """Thoughts of the assistant's turn, which its content leaves out."""
    is_cut: bool = False
    """Whether the assistant's turn was cut at its token limit."""

    __post_init__ = make_encodable


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data source: what an episode starts from and what its rewards need."""

    prompt_id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    other_answers: tuple[str, ...] = ()
    """Accepted as well as `answer`."""
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
        """All that are accepted; empty where the row has none."""
        return () if self.answer is None else (self.answer, *self.other_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine samples; log-probabilities are those of the distribution that results."""

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
    """Of the engine, as it names them."""
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one generate call sampled. The three arrays are of equal length `[n]`."""

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
    """Learner steps committed when it was given; None outside of training."""
    is_greedy: bool = False
    """Sampled greedily: its reward is the group's baseline, and it never trains."""

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.group_id, self.sample_index, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimReply:
    """What a rollout actor may play, and what it plays in vain; both empty after a timeout."""

    claims: list[Claim]
    cancelled: list[tuple[int, int, int]]
    """Keys of this actor's running claims whose group wants them no longer; each is told once."""
    policy_version: PolicyVersion
    """The learner's version as the replay knows it."""


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
    """Names of the tools that it called, joined by commas."""
    is_valid: bool = True
    """False for an invalid action of the policy. A turn that was cut before its action is not judged."""
    foreign_form: str | None = None
    """Form of a tool call that the turn holds and that is not the configured one."""
    opening: str = ""
    """Opening tag of the thought in which the turn begins, as the header before it opened it."""
    thoughts: tuple[tuple[int, int], ...] = ()
    """Characters of `text` that are reasoning, tags included."""

    @property
    def is_cut(self) -> bool:
        """Whether its length ended it before an action that could be read."""
        is_long = self.stop_reason is CompletionStop.LENGTH
        return is_long and self.is_valid and self.tool is None

    @property
    def said(self) -> str:
        """The text without its thoughts: what is parsed and scored."""
        return outside(self.text, self.thoughts)

    number: int = 0
    """Its place among all turns of the episode in time, from 0, whatever their segments."""

    __post_init__ = make_encodable


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One segment of one episode, prompt and observations included. Checked by `validation_error` at `put`."""

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
    """As the model sees them, PNG, in the order of their placeholders."""
    image_token_id: int | None = None
    """The placeholder: each run of it is one image. None for models that read text alone."""
    image_unit: int | None = None
    """Side in pixels of the square that becomes one placeholder. None where sizes mean nothing."""
    shown: tuple[str, ...] = ()
    """Ids of the passages and pages that tools showed, in order."""
    response_text: str = ""
    """All text after the prompt, observations included."""
    given_answer: str | None = None
    """What an agent program returned as its answer; None where the last turn is it."""
    claim_step: int | None = None
    """Learner steps committed when the episode was claimed; None outside of training."""
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What reward functions logged beside their values: text, numbers, truth values or None."""
    stop_reason: StopReason = StopReason.END
    error: str | None = None
    error_kind: str = "other"
    """`TrajectoryError.kind` of the failure, which counts it."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    started_at_s: float = 0.0
    finished_at_s: float = 0.0

    __post_init__ = make_encodable

    @property
    def episode_key(self) -> tuple[int, int, int]:
        return (self.group_id, self.sample_index, self.attempt)

    @property
    def key(self) -> TrajectoryKey:
        """Of this segment alone."""
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
        """Whether it ran out of tokens, so that more might have come."""
        return self.stop_reason is StopReason.MAX_TOKENS

    @property
    def min_policy_version(self) -> PolicyVersion:
        """The oldest version that sampled a token; an episode that never sampled has its claim's."""
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
        """Lengths of the runs of placeholders, one for each image that the tokens speak of."""
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

    def validation_error(self) -> str | None:
        """Return the first rule of the data contract that this trajectory breaks; None for a valid one."""
        size = len(self.token_ids)
        arrays = {
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            "train_mask": self.train_mask,
            "behavior_logprobs": self.behavior_logprobs,
            "policy_versions": self.policy_versions,
        }
        lengths = {name: len(array) for name, array in arrays.items()}
        if size == 0:
            return "token_ids is empty: a trajectory holds at least its prompt"
        if len(set(lengths.values())) != 1:
            return f"arrays must have equal length, got {lengths}"
        for name in ("loss_mask", "train_mask"):
            if arrays[name].dtype != np.bool_:
                return f"{name} must be bool, got {arrays[name].dtype}"
        if (self.token_ids < 0).any():
            return "token_ids must not be negative"
        if (self.train_mask & ~self.loss_mask).any():
            return "train_mask must be a subset of loss_mask"
        if not np.array_equal(np.isfinite(self.behavior_logprobs), self.loss_mask):
            return "behavior_logprobs must be finite exactly where loss_mask is True"
        if (self.behavior_logprobs[self.loss_mask] > 1e-4).any():
            return "behavior_logprobs must not be positive"
        if ((self.policy_versions >= 0) != self.loss_mask).any():
            return "policy_versions must be >= 0 exactly where loss_mask is True, -1 elsewhere"
        if (error := self._image_error()) is not None:
            return error
        if (self.loss_mask & self.is_placeholder).any():
            return "placeholders of images must not be sampled"
        if self.reward is not None and not np.isfinite(self.reward):
            return f"reward must be a finite number or None, got {self.reward!r}"
        if self.stop_reason is StopReason.ERROR and self.error is None:
            return "stop_reason 'error' needs a cause in error"
        return None

    def _image_error(self) -> str | None:
        runs, num_images = self.placeholder_runs, len(self.images)
        if len(runs) != num_images:
            return (
                f"every image needs its placeholders: {num_images} images, "
                f"{len(runs)} runs of placeholders"
            )
        if self.image_unit is None:
            return None
        for number, (image, num_placeholders) in enumerate(zip(self.images, runs, strict=True), 1):
            if not image.startswith(PNG_MAGIC):
                return f"image {number} of {num_images} is not a PNG"
            width, height = (int.from_bytes(image[at : at + 4]) for at in PNG_SIDES)
            num_features = (width // self.image_unit) * (height // self.image_unit)
            if num_features != num_placeholders:
                return (
                    f"image {number} of {num_images}, {width}x{height}, has {num_features} "
                    f"features, but {num_placeholders} placeholders"
                )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeScore:
    """The final rewards of an episode; with `error`, they could not be computed."""

    reward: float | None = None
    """Weighted, clipped sum of those that apply; None when none does."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """By function, unweighted."""
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
    """Of the greedy episode of the prompt, where one was played; it is none of the trajectories."""

    @property
    def rewards(self) -> dict[int, float | None]:
        """The reward of each episode by sample index: baselines weigh episodes, not segments."""
        return {t.sample_index: t.reward for t in self.trajectories}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Prompts with the learner's log-probabilities, which an engine must reproduce."""

    token_ids: tuple[tuple[int, ...], ...]
    """Sequences of at least 2 tokens, as engines take them: one placeholder for each image."""
    logprobs: tuple[tuple[float, ...], ...]
    """Of the last tokens of each sequence: all but the first, or those behind its images."""
    tolerance: float
    images: tuple[tuple[bytes, ...], ...] = ()
    """Of each sequence, encoded; empty where none has any."""
    statistic: Literal["max", "mean"] = "max"
    """What of |engine - learner| over all tokens must be within `tolerance`."""

    def prompts(self) -> Iterator[tuple[tuple[int, ...], tuple[bytes, ...], int]]:
        """Token ids, images, and how many of the last tokens are to be scored."""
        images = self.images or ((),) * len(self.token_ids)
        for ids, shown, scored in zip(self.token_ids, images, self.logprobs, strict=True):
            yield ids, shown, len(scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """One push: which version, how its tensors travel, and how the arrival is verified.

    The payload has the `checksums` of what is sent, by name.
    """

    policy_version: PolicyVersion
    transport: str
    payload: Mapping[str, Any]
    probe: Probe
    should_clear_caches: bool = True
    is_collective: bool = False
    """Whether it is made for the members of one push, which must all take it; joiners need another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReceipt:
    """An engine's acknowledgement of one push."""

    policy_version: PolicyVersion
    logprob_error: float
    """|engine - learner| log-probability on the probe, in nats."""
    pause_s: float
    update_s: float
    probe_s: float
    """Time to score the probe."""
    verify_s: float = 0.0
    """Time to compare the checksums of all parameters."""
    num_verified: int = 0
    """Number of tensors whose checksums match those sent."""
