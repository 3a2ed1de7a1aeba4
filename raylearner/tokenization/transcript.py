"""One episode as tokens, growing turn by turn under a token budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raylearner.tokenization.renderer import Renderer
from raylearner.types import (
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
    start: int
    end: int
    text: str
    stop_reason: CompletionStop
    min_policy_version: int
    max_policy_version: int


@dataclass(slots=True)
class Transcript:
    """The flat arrays of a trajectory in the making. Tokens are appended, never changed."""

    renderer: Renderer
    claim: Claim
    token_ids: list[int] = field(default_factory=list[int])
    prompt_length: int = 0
    _loss_mask: list[bool] = field(default_factory=list[bool])
    _logprobs: list[float] = field(default_factory=list[float])
    _versions: list[int] = field(default_factory=list[int])
    _turns: list[Turn] = field(default_factory=list[Turn])
    _open: _OpenTurn | None = None

    def open(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Starts with the rendered prompt. Raises `RenderError` when it is too long."""
        self._append_fixed(self.renderer.render(messages, tools=tools))
        self.prompt_length = len(self.token_ids)

    def open_empty(self) -> None:
        """Stands in for a prompt that could not be rendered: one end token, so arrays are not empty."""
        self._append_fixed(self.renderer.end_token_ids[:1] or [0])
        self.prompt_length = len(self.token_ids)

    @property
    def remaining_tokens(self) -> int:
        """Tokens left of the response budget."""
        used = len(self.token_ids) - self.prompt_length
        return self.renderer.config.max_response_tokens - used

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    @property
    def response_text(self) -> str:
        """Everything after the prompt, observations included."""
        return self.renderer.decode_all(self.token_ids[self.prompt_length :])

    def add_completion(self, completion: Completion) -> str:
        """Appends sampled tokens verbatim and returns the text of the turn."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self._loss_mask.extend([True] * len(completion.token_ids))
        self._logprobs.extend(completion.logprobs.tolist())
        self._versions.extend(completion.policy_versions.tolist())
        text = self.renderer.decode(completion.token_ids.tolist())
        versions = completion.policy_versions
        fallback = self.claim.policy_version
        self._open = _OpenTurn(
            start=start,
            end=len(self.token_ids),
            text=text,
            stop_reason=completion.stop_reason,
            min_policy_version=int(versions.min()) if len(versions) else fallback,
            max_policy_version=int(versions.max()) if len(versions) else fallback,
        )
        return text

    def add_reply(
        self, messages: Sequence[Message], *, tool: str | None = None, is_valid: bool = True
    ) -> bool:
        """Closes the turn with the environment's reply; False when the reply does not fit.

        A reply that leaves no room for one sampled token is not added, not even in part.
        """
        turn = self._open
        assert turn is not None, "a reply follows a completion"
        reply_ids: list[int] = []
        if messages:
            last = self.token_ids[-1] if turn.end > turn.start else None
            reply_ids = self.renderer.render_reply(messages, last_token_id=last)
        fits = len(reply_ids) < self.remaining_tokens
        if fits:
            self._append_fixed(reply_ids)
        self._turns.append(
            Turn(
                start=turn.start,
                end=turn.end,
                reply_end=len(self.token_ids),
                text=turn.text,
                reply="\n".join(m.content for m in messages) if fits else "",
                stop_reason=turn.stop_reason,
                min_policy_version=turn.min_policy_version,
                max_policy_version=turn.max_policy_version,
                tool=tool,
                is_valid=is_valid,
            )
        )
        self._open = None
        return fits

    def close(
        self,
        *,
        stop_reason: StopReason,
        error: str | None,
        metrics: dict[str, float],
        shown: tuple[str, ...] = (),
        started_at_s: float,
        finished_at_s: float,
    ) -> Trajectory:
        """The finished trajectory, not yet scored."""
        loss_mask = np.array(self._loss_mask, dtype=np.bool_)
        trains = stop_reason is not StopReason.ERROR and stop_reason is not StopReason.ABORTED
        return Trajectory(
            group_id=self.claim.group_id,
            sample_index=self.claim.sample_index,
            attempt=self.claim.attempt,
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
            stop_reason=stop_reason,
            error=error,
            metrics=metrics,
            shown=shown,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
        )

    def _append_fixed(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self._loss_mask.extend([False] * len(token_ids))
        self._logprobs.extend([float("nan")] * len(token_ids))
        self._versions.extend([-1] * len(token_ids))
