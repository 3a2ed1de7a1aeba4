"""Turns, trajectories and episodes for rewards."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from raylearner.rewards.functions import EpisodeView
from raylearner.types import (
    Claim,
    Completion,
    CompletionStop,
    Message,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def make_turn(text: str = "x", *, start: int = 1, end: int = 2, **changes: Any) -> Turn:
    """A turn of the tokens from `start` to `end`."""
    values: dict[str, Any] = {
        "start": start,
        "end": end,
        "reply_end": end,
        "text": text,
        "reply": "",
        "stop_reason": CompletionStop.END,
        "min_policy_version": 0,
        "max_policy_version": 0,
    }
    return Turn(**values | changes)


def make_completion(
    token_ids: Sequence[int], *, version: int = 0, stop: CompletionStop = CompletionStop.END
) -> Completion:
    count = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.linspace(-2, -1, count, dtype=np.float32),
        policy_versions=np.full(count, version, np.int32),
        stop_reason=stop,
    )


def make_trajectory(
    versions: Sequence[int] = (-1, 0),
    *,
    claim: Claim | None = None,
    logprob: float = -0.5,
    **changes: Any,
) -> Trajectory:
    """Tokens of these policy versions, -1 for those that were not sampled; all sampled ones train."""
    loss_mask = np.array(versions) >= 0
    values: dict[str, Any] = {
        "group_id": 0,
        "sample_index": 0,
        "attempt": 0,
        "prompt_id": "p",
        "token_ids": np.arange(len(versions), dtype=np.int32),
        "loss_mask": loss_mask,
        "train_mask": loss_mask.copy(),
        "behavior_logprobs": np.where(loss_mask, logprob, np.nan).astype(np.float32),
        "policy_versions": np.array(versions, np.int32),
        "claim_policy_version": 0,
    }
    if claim is not None:
        values |= {
            "group_id": claim.group_id,
            "sample_index": claim.sample_index,
            "attempt": claim.attempt,
            "prompt_id": claim.prompt.prompt_id,
            "source": claim.prompt.source,
            "claim_policy_version": claim.policy_version,
        }
    if error := changes.get("error"):
        values |= {"stop_reason": StopReason.ERROR, "error_kind": error.partition(":")[0]}
    return Trajectory(**values | changes)


def make_view(
    *turns: str | Turn,
    answers: tuple[str, ...] = ("46",),
    prompt: Prompt | None = None,
    **fields: Any,
) -> EpisodeView:
    """An episode of these turns; its row is `12+34=` with the accepted `answers`."""
    made = tuple(make_turn(turn) if isinstance(turn, str) else turn for turn in turns)
    row = prompt or Prompt(
        prompt_id="row-7",
        messages=(Message(role="user", content="12+34="),),
        answer=answers[0] if answers else None,
        other_answers=answers[1:],
    )
    values: dict[str, Any] = {
        "prompt": row,
        "turns": made,
        "response": "".join(turn.text + turn.reply for turn in made),
        "completion_ids": (1, 2, 3),
        "stop_reason": StopReason.ANSWER,
        "policy_version": 5,
    }
    return EpisodeView(**values | fields)


def make_group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=trajectories[0].group_id,
        prompt_id="p",
        policy_version=trajectories[0].claim_policy_version,
        trajectories=trajectories,
    )


def assert_same(left: Trajectory, right: Trajectory) -> None:
    """All fields are equal, with equal types."""
    for field in fields(Trajectory):
        old, new = getattr(left, field.name), getattr(right, field.name)
        if isinstance(old, np.ndarray):
            assert old.dtype == new.dtype
            assert np.array_equal(old, new, equal_nan=old.dtype.kind == "f")
        else:
            assert (old, type(old)) == (new, type(new))
