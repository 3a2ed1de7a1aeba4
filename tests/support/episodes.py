"""Episodes as rewards see them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from raylearner.rewards.functions import EpisodeView
from raylearner.types import (
    CompletionStop,
    Message,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)


def make_turn(
    text: str, *, reply: str = "", tool: str | None = None, is_valid: bool = True
) -> Turn:
    return Turn(
        start=0,
        end=1,
        reply_end=1,
        text=text,
        reply=reply,
        stop_reason=CompletionStop.END,
        min_policy_version=0,
        max_policy_version=0,
        tool=tool,
        is_valid=is_valid,
    )


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


def make_group(turns: Sequence[Turn]) -> TrajectoryGroup:
    """A group of one episode with these turns."""
    mask = np.array([False, True])
    trajectory = Trajectory(
        group_id=0,
        sample_index=0,
        attempt=0,
        prompt_id="p",
        token_ids=np.array([1, 2], np.int32),
        loss_mask=mask,
        train_mask=mask,
        behavior_logprobs=np.array([np.nan, -1], np.float32),
        policy_versions=np.array([-1, 0], np.int32),
        claim_policy_version=0,
        turns=tuple(turns),
    )
    return TrajectoryGroup(group_id=0, prompt_id="p", policy_version=0, trajectories=(trajectory,))
