"""One episode as tokens, growing turn by turn under a token budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raylearner.errors import RenderError, TrajectoryError
from raylearner.text import outside
from raylearner.tokenization.reasoning import Thoughts
from raylearner.tokenization.renderer import Renderer
from raylearner.tokenization.template import images_of, texts_of
from raylearner.types import (
    IMAGE_MARK,
    Claim,
    Completion,
    CompletionStop,
    Message,
    StopReason,
    Trajectory,
    Turn,
)


@dataclass(slots=True)
class _OpenTurn:
    number: int
    start: int
    end: int
    text: str
    stop_reason: CompletionStop
    min_policy_version: int
    max_policy_version: int
    opening: str
    thoughts: Thoughts


@dataclass(slots=True)
class Transcript:
    """The flat arrays of an unfinished trajectory. Tokens are appended, never changed.

    `token_ids` are in the learner's form; images come and go with their placeholders.
    """

    renderer: Renderer
    claim: Claim
    token_ids: list[int] = field(default_factory=list[int])
    prompt_length: int = 0
    images: list[bytes] = field(default_factory=list[bytes])
    open_thought: str = ""
    """Opening tag of the thought that the next turn begins in; empty for none."""
    num_left_out: int = 0
    """Number of pages and passages of replies that did not fit."""
    _loss_mask: list[bool] = field(default_factory=list[bool])
    _logprobs: list[float] = field(default_factory=list[float])
    _versions: list[int] = field(default_factory=list[int])
    _turns: list[Turn] = field(default_factory=list[Turn])
    _open: _OpenTurn | None = None
    _tools: Sequence[Mapping[str, Any]] = ()
    _opening: Sequence[Message] = ()
    _replies: list[Sequence[Message]] = field(default_factory=list[Sequence[Message]])

    def open(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start with the rendered prompt, its images fitted before.

        Raises `RenderError` when it has too many tokens or images.
        """
        images = images_of(messages)
        if len(images) > self.renderer.config.images.max_images:
            raise RenderError(
                f"prompt has {len(images)} images, renderer.images.max_images is"
                f" {self.renderer.config.images.max_images}"
            )
        token_ids = self.renderer.render(messages, tools=tools)
        self.open_with(token_ids, opening=self.renderer.opening(messages, tools=tools))
        self._opening, self._tools = messages, tools
        self.images.extend(images)

    def open_with(self, token_ids: Sequence[int], *, opening: str = "") -> None:
        """Start with a prompt that was rendered already, and the thought that its header opens."""
        self._append_fixed(token_ids)
        self.open_thought = opening
        self.prompt_length = len(self.token_ids)

    def open_empty(self) -> None:
        """Start with one end token in place of a prompt that could not be rendered, so arrays are
        not empty."""
        self.open_with(self.renderer.end_token_ids[:1] or [0])

    @property
    def engine_token_ids(self) -> Sequence[int]:
        """Token ids as engines take them, one placeholder for each image."""
        return self.renderer.collapse(self.token_ids)

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens left of the response budget."""
        used = len(self.token_ids) - self.prompt_length
        return self.renderer.config.max_response_tokens - used

    @property
    def is_full(self) -> bool:
        """Whether the context is too long for a further turn."""
        limit = self.renderer.config.max_context_tokens
        return limit is not None and len(self.token_ids) > limit

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    @property
    def response_text(self) -> str:
        """All text after the prompt, observations included."""
        return self.renderer.decode_all(self.token_ids[self.prompt_length :])

    def add_completion(self, completion: Completion, *, number: int | None = None) -> str:
        """Append sampled tokens verbatim and return the text of the turn.

        `number` is the turn's place in the episode, where that has other transcripts.
        """
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self._loss_mask.extend([True] * len(completion.token_ids))
        self._logprobs.extend(completion.logprobs.tolist())
        self._versions.extend(completion.policy_versions.tolist())
        text = self.renderer.decode(completion.token_ids.tolist())
        versions = completion.policy_versions
        fallback = self.claim.policy_version
        thoughts = self.renderer.turns.reasoning.thoughts(text, opening=self.open_thought)
        self._open = _OpenTurn(
            number=len(self._turns) if number is None else number,
            start=start,
            end=len(self.token_ids),
            text=text,
            stop_reason=completion.stop_reason,
            min_policy_version=int(versions.min()) if len(versions) else fallback,
            max_policy_version=int(versions.max()) if len(versions) else fallback,
            opening=self.open_thought,
            thoughts=thoughts,
        )
        return text

    @property
    def message(self) -> Message:
        """The turn sampled last, before its reply, with its reasoning separated."""
        turn = self._open
        assert turn is not None, "a message follows a completion"
        return Message(
            role="assistant",
            content=outside(turn.text, turn.thoughts.spans),
            reasoning="\n".join(map(str.strip, turn.thoughts.contents)),
            is_cut=turn.stop_reason is CompletionStop.LENGTH,
        )

    def add_reply(
        self,
        messages: Sequence[Message],
        *,
        tool: str | None = None,
        is_valid: bool = True,
        foreign_form: str | None = None,
        num_shown: int = 0,
    ) -> bool:
        """Close the turn with the environment's reply; return False when the reply does not fit.

        A reply that leaves no room for one sampled token is not added, not even in part; of one
        with images, the part up to the last image that fits is added.
        """
        turn = self._open
        assert turn is not None, "a reply follows a completion"
        messages = self.renderer.cut(messages)
        reply_ids: list[int] = []
        if messages:
            last = self.token_ids[-1] if turn.end > turn.start else None
            reply_ids = self.renderer.render_reply(messages, tools=self._tools, last_token_id=last)
        images = images_of(messages)
        image_room = self.renderer.config.images.max_images - len(self.images)
        fits = len(reply_ids) < self.remaining_tokens and len(images) <= image_room
        reply = "\n".join(m.content for m in messages)
        if not fits:
            ends = self._fitting_ends(reply_ids, image_room)
            reply_ids, images = reply_ids[: max(ends, default=0)], images[: len(ends)]
            self.num_left_out += max(0, num_shown - len(images))
            reply = "".join(f"{text}{IMAGE_MARK}" for text in texts_of(messages)[: len(ends)])
        self.images.extend(images)
        is_inline = self.renderer.config.observation_role == "inline"
        self.end_turn(
            reply_ids,
            reply=reply,
            tool=tool,
            is_valid=is_valid,
            foreign_form=foreign_form,
            opening=turn.thoughts.unclosed
            if is_inline
            else self.renderer.turns.opening_behind(reply_ids),
        )
        return fits

    def _fitting_ends(self, reply_ids: Sequence[int], max_images: int) -> list[int]:
        """Return the places where the reply may end: behind each of its first images that leave
        room for a token."""
        vision = self.renderer.vision
        ends = [] if vision is None else vision.image_ends(reply_ids)
        return [end for end in ends[:max_images] if end < self.remaining_tokens]

    def end_turn(
        self,
        reply_ids: Sequence[int],
        *,
        reply: str,
        tool: str | None,
        is_valid: bool,
        foreign_form: str | None = None,
        opening: str = "",
    ) -> None:
        """Close the turn with a rendered reply that fits and opens the thought `opening`."""
        turn = self._open
        assert turn is not None, "a reply follows a completion"
        self._append_fixed(reply_ids)
        self.open_thought = opening
        self._turns.append(
            Turn(
                start=turn.start,
                end=turn.end,
                reply_end=len(self.token_ids),
                text=turn.text,
                reply=reply,
                stop_reason=turn.stop_reason,
                min_policy_version=turn.min_policy_version,
                max_policy_version=turn.max_policy_version,
                tool=tool,
                is_valid=is_valid,
                number=turn.number,
                foreign_form=foreign_form,
                opening=turn.opening,
                thoughts=turn.thoughts.spans,
            )
        )
        self._open = None

    def close(
        self,
        *,
        stop_reason: StopReason,
        error: TrajectoryError | None,
        metrics: dict[str, float],
        tool_errors: Mapping[str, str] | None = None,
        shown: tuple[str, ...] = (),
        given_answer: str | None = None,
        segment: int = 0,
        started_at_s: float,
        finished_at_s: float,
    ) -> Trajectory:
        """Return the finished trajectory, not yet scored. A turn without a reply, since its
        environment failed, is included."""
        if self._open is not None:
            self.end_turn([], reply="", tool=None, is_valid=True)
        loss_mask = np.array(self._loss_mask, dtype=np.bool_)
        vision = self.renderer.vision
        trains = stop_reason is not StopReason.ERROR and stop_reason is not StopReason.ABORTED
        return Trajectory(
            group_id=self.claim.group_id,
            sample_index=self.claim.sample_index,
            attempt=self.claim.attempt,
            segment=segment,
            prompt_id=self.claim.prompt.prompt_id,
            source=self.claim.prompt.source,
            doc_id=self.claim.prompt.doc_id,
            prompt_text=self.renderer.decode_all(self.token_ids[: self.prompt_length]),
            answer=self.claim.prompt.answer,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            loss_mask=loss_mask,
            train_mask=loss_mask.copy() if trains else np.zeros_like(loss_mask),
            behavior_logprobs=np.array(self._logprobs, dtype=np.float32),
            policy_versions=np.array(self._versions, dtype=np.int32),
            claim_policy_version=self.claim.policy_version,
            turns=self.turns,
            images=tuple(self.images),
            image_token_id=None if vision is None else vision.image_token_id,
            image_unit=None if vision is None else vision.unit,
            stop_reason=stop_reason,
            error=None if error is None else error.text,
            error_kind="other" if error is None else error.kind,
            metrics=metrics,
            tool_errors=tool_errors or {},
            shown=shown,
            response_text=self.response_text,
            given_answer=given_answer,
            claim_step=self.claim.step,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
        )

    def _append_fixed(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self._loss_mask.extend([False] * len(token_ids))
        self._logprobs.extend([float("nan")] * len(token_ids))
        self._versions.extend([-1] * len(token_ids))
