"""Numbers of an evaluation: pass@k, votes, standard errors, and failed episodes in each of them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from episodes import make_trajectory

from raylearner.errors import ToolError
from raylearner.observability.episodes import Episode, episodes_of
from raylearner.observability.metrics import spec_of
from raylearner.run.evaluation_metrics import (
    Scoring,
    find_answer,
    majority,
    pass_at_k,
    pass_sizes,
    standard_error,
    summarize,
)
from raylearner.types import Claim, CompletionStop, Prompt, Trajectory, Turn

FAILED, UNFINISHED = "failed", "unfinished"


def make_turn(text: str) -> Turn:
    return Turn(
        start=0,
        end=1,
        reply_end=1,
        text=text,
        reply="",
        stop_reason=CompletionStop.END,
        min_policy_version=0,
        max_policy_version=0,
    )


def evaluated(
    outcomes: Sequence[Sequence[Any]], *, scoring: Scoring | None = None
) -> dict[str, Any]:
    """Rewards by prompt and sample; a reward may come with an answer."""
    claims: list[Claim] = []
    found: list[Trajectory] = []
    for group_id, row in enumerate(outcomes):
        prompt = Prompt(prompt_id=f"p{group_id}", messages=())
        for sample, outcome in enumerate(row):
            claim = Claim(
                group_id=group_id,
                sample_index=sample,
                attempt=0,
                prompt=prompt,
                policy_version=0,
                seed=0,
            )
            claims.append(claim)
            reward, answer = outcome if isinstance(outcome, tuple) else (outcome, None)
            if outcome == UNFINISHED:
                continue
            text = "no tag" if answer is None else f"<answer>{answer}</answer>"
            number = None if outcome == FAILED else reward
            trajectory = make_trajectory(
                claim=claim, reward=number, rewards={"exact": number}, turns=(make_turn(text),)
            )
            found.append(trajectory.failed(ToolError("x")) if outcome == FAILED else trajectory)
    return summarize(claims, episodes_of(found), scoring=scoring or Scoring())


@pytest.mark.parametrize("solved", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample(solved: int, k: int) -> None:
    outcomes = [1] * solved + [0] * (5 - solved)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(5, solved, k) == pytest.approx(np.mean([max(s) for s in subsets]))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1)
    assert (pass_at_k(1000, 0, 999), pass_at_k(1000, 2, 999)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("samples", "sizes"), [(2, [1, 2]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])]
)
def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples(
    samples: int, sizes: list[int]
) -> None:
    assert pass_sizes(samples) == sizes


def test_the_standard_error_of_single_samples_is_the_ordinary_one() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    expected = np.std(values, ddof=1) / np.sqrt(5)
    assert standard_error({i: [v] for i, v in enumerate(values)}) == pytest.approx(expected)
    assert standard_error({0: [0.0, 1.0]}) is None
    assert standard_error({i: [0.2 * 0.1] for i in range(7)}) == 0.0


def test_repeated_samples_of_equal_outcome_add_no_certainty() -> None:
    single = {i: [float(i % 3 == 0)] for i in range(9)}
    repeated = {i: found * 8 for i, found in single.items()}
    error = standard_error(single)
    assert error is not None
    assert standard_error(repeated) == pytest.approx(error)
    mixed = {0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}
    means = np.std([0.5, 1.0, 0.0], ddof=1) / np.sqrt(3)
    assert standard_error(mixed) == pytest.approx(means)


@pytest.mark.parametrize(
    ("votes", "solved", "value"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),
        ([None, None, "4"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_the_most_frequent_answer_decides(
    votes: list[str | None], solved: list[bool], value: float
) -> None:
    assert majority(votes, solved) == value


@pytest.mark.parametrize(
    ("text", "tag", "answer"),
    [
        ("<answer> 42.0 </answer>", "answer", "42"),
        ("<answer>1</answer> or <answer>2</answer>", "answer", "2"),
        ("42", "answer", None),
        ("so \\boxed{1} and \\boxed{x_{2}}", None, "x_{2}"),
        ("Paris", None, "paris"),
        ("", None, None),
    ],
)
def test_an_answer_is_found_by_its_tag_or_box(text: str, tag: str | None, answer: str) -> None:
    episode = Episode([make_trajectory(turns=(make_turn(text),))])
    assert find_answer(episode, tag) == answer


def test_the_answer_of_a_program_counts() -> None:
    episode = Episode([make_trajectory(turns=(make_turn("<answer>1</answer>"),), given_answer="2")])
    assert find_answer(episode, "answer") == "2"


def test_several_samples_have_an_average_passes_and_a_vote() -> None:
    record = evaluated(
        [
            [(1.0, "4"), (1.0, "4"), (0.0, "5"), FAILED],
            [(0.0, "7"), (0.0, "7"), (1.0, "8"), UNFINISHED],
        ]
    )
    assert record["reward/mean"] == 3 / 8
    assert record["pass@1"] == 3 / 8
    assert record["pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert record["pass@4"] == 1.0
    assert record["majority@4"] == 0.5
    assert (record["num_prompts"], record["samples_per_prompt"]) == (2, 4)
    assert (record["errors"], record["unfinished"]) == (1, 1)
    assert record["reward/exact/mean"] == 0.5
    assert record["reward/exact/episodes"] == 6
    assert record["reward/mean_without_failed"] == 0.5
    assert all(spec_of(f"evaluation/{key}") is not None for key in record)


def test_the_threshold_decides_what_is_solved() -> None:
    outcomes = [[0.9, 0.0], [0.5, 0.5]]
    assert evaluated(outcomes)["pass@2"] == 0.0
    assert evaluated(outcomes, scoring=Scoring(solved_reward=0.9))["pass@2"] == 0.5


def test_failures_count_as_the_lowest_reward_in_mean_and_error() -> None:
    record = evaluated([[1.0], [-2.0], [FAILED]])
    assert record["reward/mean"] == -1.0
    assert record["reward/standard_error"] == pytest.approx(np.std([1, -2, -2], ddof=1) / 3**0.5)
    assert "pass@1" not in record


def test_rows_without_any_reward_are_in_no_mean() -> None:
    record = evaluated([[1.0, 1.0], [None, None]])
    assert (record["reward/mean"], record["pass@2"]) == (1.0, 1.0)
    assert record["reward/exact/episodes"] == 2
    assert record["num_prompts"] == 2


def test_an_evaluation_in_which_all_fails_is_zero() -> None:
    record = evaluated([[FAILED, FAILED], [FAILED, UNFINISHED]])
    assert (record["reward/mean"], record["pass@2"]) == (0.0, 0.0)
    assert "majority@2" not in record
