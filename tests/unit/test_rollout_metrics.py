"""Metrics of a step's episodes: rewards, turns, tool calls, ends and images."""

from dataclasses import replace

import numpy as np
from episodes import make_group, make_trajectory, make_turn

from raylearner.config.schema import CompletionsSection
from raylearner.observability import completions
from raylearner.observability.metrics import undocumented
from raylearner.observability.rollout_metrics import rollout_metrics
from raylearner.types import StopReason, Trajectory


def make_episode(
    turns: str, *, stop: StopReason, metrics: dict[str, float] | None = None
) -> Trajectory:
    """A letter for each turn: `t` calls a tool, `a` answers, `x` is invalid."""
    return make_trajectory(
        turns=tuple(
            make_turn(letter, tool="search" if letter == "t" else None, is_valid=letter != "x")
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
        make_episode("tta", stop=StopReason.ANSWER, metrics=counted),
        make_episode("xta", stop=StopReason.END),
        make_episode("x", stop=StopReason.MAX_TOKENS),
        make_episode("", stop=StopReason.ERROR),
    )
    metrics = rollout_metrics([make_group(*trajectories)], [])
    assert metrics["rollout/turns/mean"] == 7 / 4
    assert metrics["rollout/valid_actions/mean"] == 5 / 4
    assert metrics["rollout/invalid_actions/mean"] == 2 / 4
    assert metrics["rollout/valid_tool_calls/mean"] == 3 / 4
    assert metrics["rollout/finish_fraction"] == 0.5
    assert [metrics[f"rollout/active/{turn}"] for turn in (1, 2, 3)] == [0.75, 0.5, 0.5]
    assert "rollout/active/4" not in metrics
    assert undocumented(metrics) == []


def test_segments_of_an_episode_count_as_one_episode() -> None:
    """An episode of three segments with reward 0 beside one of a single segment with reward 1."""
    long = make_episode("tt", stop=StopReason.MAX_TOKENS, metrics={"tool_calls": 5.0, "x": 1.0})
    long = replace(long, rewards={"f": 0.0}, started_at_s=1.0, finished_at_s=4.0)
    short = make_episode("a", stop=StopReason.ANSWER, metrics={"x": 4.0})
    short = replace(short, sample_index=1, reward=1.0, rewards={"f": 1.0}, finished_at_s=1.0)
    both = make_episode("t", stop=StopReason.MAX_TOKENS).turns[0]
    several = replace(long, segment=2, turns=(replace(both, tool="search,open", number=4),))
    trajectories = (long, replace(long, segment=1), several, short)
    metrics = rollout_metrics([make_group(*trajectories)], [])
    expected = {
        "rollout/reward/mean": 0.5,
        "rollout/reward/std": 0.5,
        "rollout/reward/f/mean": 0.5,
        "rollout/source/default/reward/mean": 0.5,
        "rollout/turns/mean": 3.0,
        "rollout/turns/max": 5.0,
        "rollout/segments/mean": 2.0,
        "rollout/sampled_tokens/mean": 2.0,
        "rollout/response_tokens/mean": 2.0,
        "rollout/tool_calls/mean": 3.0,
        "rollout/valid_tool_calls/mean": 2.5,
        "rollout/valid_actions/mean": 3.0,
        "rollout/stop/max_tokens": 0.5,
        "rollout/stop/answer": 0.5,
        "rollout/finish_fraction": 0.5,
        "rollout/active/2": 0.5,
        "rollout/episode_s/mean": 2.0,
        "rollout/logged/x/mean": 2.5,
    }
    assert {key: metrics[key] for key in expected} == expected
    assert undocumented(metrics) == []
    shown = completions.samples(trajectories, policy_version=1)
    assert shown["rollout/reward"].tolist() == [0.0, 1.0]
    assert shown["rollout/turns"].tolist() == [5.0, 1.0]
    rows = completions.rows(trajectories, CompletionsSection(num_completions=9))
    assert [row["completion"] for row in rows] == ["ttttt", "a"]


def test_failed_episodes_count_in_the_mean_reward_alone() -> None:
    good = replace(make_episode("a", stop=StopReason.ANSWER), reward=1.0, rewards={"f": 1.0})
    bad = replace(make_episode("", stop=StopReason.ERROR), sample_index=1, reward=None)
    metrics = rollout_metrics([make_group(good, bad)], [], failed_reward=-1.0)
    assert metrics["rollout/reward/mean"] == 0.0
    assert metrics["rollout/source/default/reward/mean"] == 0.0
    assert metrics["rollout/reward/mean_without_failed"] == 1.0
    assert metrics["rollout/reward/min"] == 1.0
    assert metrics["rollout/stop/error"] == 0.5


def test_logged_columns_hide_no_others() -> None:
    shown = make_episode("a", stop=StopReason.ANSWER, metrics={"prompt": 2.0})
    shown = replace(shown, columns={"reward": "text", "prompt": "x"})
    (row,) = completions.rows([shown], CompletionsSection())
    assert (row["reward"], row["logged_reward"]) == ("0", "text")
    assert (row["logged_prompt"], row["logged_logged_prompt"]) == ("x", "2")


def test_images_are_counted_where_the_model_sees() -> None:
    ids = np.array([7, 9, 9, 9, 8, 9, 8, 1], np.int32)
    blank = np.zeros(len(ids), np.bool_)
    seeing = replace(
        make_episode("t", stop=StopReason.END),
        token_ids=ids,
        loss_mask=blank,
        train_mask=blank,
        images=(b"a", b"b"),
        image_token_id=9,
    )
    blind = replace(seeing, token_ids=np.array([1], np.int32), images=())
    metrics = rollout_metrics([make_group(seeing, blind)], [])
    assert metrics["rollout/images/mean"] == 1
    assert metrics["rollout/images/max"] == 2
    assert metrics["rollout/image_tokens/mean"] == 2
    assert undocumented(metrics) == []
