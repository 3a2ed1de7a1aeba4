"""What a step tells of its trajectories' turns."""

from dataclasses import replace

import numpy as np

from raylearner.observability.metrics import undocumented
from raylearner.observability.step_report import step_metrics
from raylearner.types import CompletionStop, StopReason, Trajectory, TrajectoryGroup, Turn


def make_trajectory(
    turns: str, *, stop: StopReason, metrics: dict[str, float] | None = None
) -> Trajectory:
    """A letter for each turn: `t` calls a tool, `a` answers, `x` is invalid."""
    mask = np.array([False, True])
    return Trajectory(
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
        turns=tuple(
            Turn(
                start=1,
                end=2,
                reply_end=2,
                text=letter,
                reply="",
                stop_reason=CompletionStop.END,
                min_policy_version=0,
                max_policy_version=0,
                tool="search" if letter == "t" else None,
                is_valid=letter != "x",
            )
            for letter in turns
        ),
        stop_reason=stop,
        error="tool: down" if stop is StopReason.ERROR else None,
        metrics=metrics or {},
        reward=0.0,
    )


def test_turns_actions_calls_and_ends_are_counted() -> None:
    counted = {"tool_calls": 3.0, "failed_tool_calls": 1.0}
    trajectories = (
        make_trajectory("tta", stop=StopReason.ANSWER, metrics=counted),
        make_trajectory("xta", stop=StopReason.END),
        make_trajectory("x", stop=StopReason.MAX_TOKENS),
        make_trajectory("", stop=StopReason.ERROR),
    )
    group = TrajectoryGroup(group_id=0, prompt_id="p", policy_version=0, trajectories=trajectories)
    metrics = step_metrics([group], [])
    assert metrics["rollout/turns/mean"] == 7 / 4
    assert metrics["rollout/valid_actions/mean"] == 5 / 4
    assert metrics["rollout/invalid_actions/mean"] == 2 / 4
    assert metrics["rollout/valid_tool_calls/mean"] == 3 / 4
    assert metrics["rollout/finish_fraction"] == 0.5
    assert [metrics[f"rollout/active/{turn}"] for turn in (1, 2, 3)] == [0.75, 0.5, 0.5]
    assert "rollout/active/4" not in metrics
    assert undocumented(metrics) == []


def test_images_are_counted_where_the_model_sees() -> None:
    ids = np.array([7, 9, 9, 9, 8, 9, 8, 1], np.int32)
    blank = np.zeros(len(ids), np.bool_)
    seeing = replace(
        make_trajectory("t", stop=StopReason.END),
        token_ids=ids,
        loss_mask=blank,
        train_mask=blank,
        images=(b"a", b"b"),
        image_token_id=9,
    )
    blind = replace(seeing, token_ids=np.array([1], np.int32), images=())
    group = TrajectoryGroup(
        group_id=0, prompt_id="p", policy_version=0, trajectories=(seeing, blind)
    )
    metrics = step_metrics([group], [])
    assert metrics["rollout/images/mean"] == 1
    assert metrics["rollout/images/max"] == 2
    assert metrics["rollout/image_tokens/mean"] == 2
    assert undocumented(metrics) == []
