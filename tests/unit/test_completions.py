"""The table of completions and the distributions of a step."""

from typing import Any

import numpy as np
import pytest
from episodes import make_group, make_trajectory, make_turn

from raylearner.config.schema import CompletionsSection
from raylearner.observability import completions, transcripts
from raylearner.observability.metrics import undocumented
from raylearner.observability.rollout_metrics import rollout_metrics
from raylearner.types import Trajectory, TrajectoryGroup


def make_episode(reward: float | None, *, sample: int = 0, **changes: Any) -> Trajectory:
    turn = make_turn("an <answer> | of\ntwo lines", min_policy_version=3, max_policy_version=3)
    values: dict[str, Any] = {
        "group_id": 7,
        "sample_index": sample,
        "prompt_text": "what?",
        "token_ids": np.array([5, 6], np.int32),
        "claim_policy_version": 3,
        "turns": (turn,),
        "reward": reward,
        "rewards": {"exact": reward},
    }
    return make_trajectory([-1, 3], logprob=-0.1, **values | changes)


def test_rows_go_from_the_worst_reward_to_the_best() -> None:
    trajectories = [make_episode(r, sample=i) for i, r in enumerate((0.5, 1.0, 0.0, None, 0.25))]
    config = CompletionsSection(num_completions=3)
    rows = completions.rows(trajectories, config, advantages={(7, 1, 0, 0): 1.5})
    assert [row["reward"] for row in rows] == ["-", "0.25", "1"]
    assert [row["advantage"] for row in rows] == ["-", "-", "1.5"]
    assert set(rows[0]) == {"prompt", "completion", "exact", "reward", "advantage"}


def test_unique_prompts_show_one_completion_each_and_logged_numbers_have_columns() -> None:
    trajectories = [
        make_episode(0.1, metrics={"length": 4.0}),
        make_episode(0.9, sample=1),
        make_episode(0.5, prompt_id="q", metrics={"length": 2.0}),
    ]
    config = CompletionsSection(unique_prompts=True)
    rows = completions.rows(trajectories, config)
    assert [(row["reward"], row["length"]) for row in rows] == [("0.1", "4"), ("0.5", "2")]


def test_text_of_completions_cannot_break_the_table() -> None:
    rows = completions.rows([make_episode(1.0)], CompletionsSection(max_characters=20))
    _, _, line = completions.markdown(rows).splitlines()
    assert "an &lt;answer ... <br>two lines" in line
    assert line.count("|") == 6
    assert "[bold]" in completions.plain([{"prompt": "[bold]x"}])
    assert completions.markdown([]) == ""


def test_samples_hold_staleness_by_the_version_that_trained() -> None:
    samples = completions.samples([make_episode(1.0), make_episode(None)], policy_version=5)
    assert samples["buffer/staleness"].tolist() == [2, 2]
    assert samples["rollout/reward"].tolist() == [1.0]


def test_weights_are_drawn_by_the_shares_of_their_bins() -> None:
    shares = {"learner/importance_weight/share_5": 0.75, "learner/importance_weight/share_9": 0.25}
    drawn = completions.weight_samples(shares)
    assert drawn is not None
    assert np.mean(drawn) == pytest.approx(0.75 * 1.0 + 0.25 * 1.6)
    assert completions.weight_samples({}) is None


def test_weight_shares_add_up_and_name_their_bins() -> None:
    import torch

    from raylearner.learner.objective.diagnostics import WEIGHT_BOUNDS, weight_shares

    assert len(completions.WEIGHT_MIDDLES) == len(WEIGHT_BOUNDS) + 1
    ratios = torch.tensor([0.0, 0.0, 1.0, -2.0])
    shares = weight_shares(ratios, torch.tensor([True, True, True, False]))
    found = {k: m.value() for k, m in shares.items() if m.value() > 0}
    assert found == {
        "importance_weight/share_5": pytest.approx(2 / 3),
        "importance_weight/share_10": pytest.approx(1 / 3),
    }


def test_logged_values_are_in_the_table_and_in_the_transcript() -> None:
    columns = {"given": "46", "is_right": True, "score": 0.25}
    trajectory = make_episode(1.0, columns=columns)
    (row,) = completions.rows([trajectory], CompletionsSection())
    assert (row["given"], row["is_right"], row["score"]) == ("46", "True", "0.25")
    assert transcripts.transcript(trajectory)["columns"] == columns


def test_a_step_reports_each_source_and_each_function_apart() -> None:
    def group(source: str, *rewards: float | None) -> TrajectoryGroup:
        return make_group(
            *(make_episode(r, sample=i, source=source) for i, r in enumerate(rewards))
        )

    metrics = rollout_metrics([group("a", 0.0, 1.0), group("b", 0.5, None), group("b", 0.0)], [])
    assert metrics["rollout/source/a/reward/mean"] == 0.5
    assert metrics["rollout/source/b/reward/mean"] == 0.25
    assert metrics["rollout/source/b/group_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout/reward/exact/mean"] == pytest.approx(0.375)
    assert metrics["rollout/reward/exact/std"] == pytest.approx(np.std([0.0, 1.0, 0.5, 0.0]))
    assert undocumented(metrics) == []
