"""Episodes as rewards see them."""

from typing import Any

from raylearner.rewards.functions import EpisodeView
from raylearner.types import CompletionStop, Message, Prompt, StopReason, Turn


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
