"""Edge cases of outcome advantages; the oracle has their values."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives import episode_advantages, make_table

from raylearner.learner.objective.episodes import ResamplingSection, resample, resampling_weights
from raylearner.learner.objective.statistics import zero_variance

NAN = math.nan
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25, 3.0, 0.0], dtype=torch.float64)
GROUPS = torch.tensor([40, 7, 40, 40, 7, 7, -3, 7])


def test_rloo_normalizes_over_those_with_a_baseline() -> None:
    plain = episode_advantages("rloo", REWARDS, GROUPS)
    has_baseline = GROUPS != -3
    wanted = (plain - plain[has_baseline].mean()) / (plain[has_baseline].std() + 1e-4)
    actual = episode_advantages("rloo", REWARDS, GROUPS, normalize=True)
    torch.testing.assert_close(actual, torch.where(has_baseline, wanted, 0.0))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "gpg", "opo"])
def test_group_of_one_is_zero_unless_asked_for_its_raw_reward(kind: str) -> None:
    rewards, groups = torch.tensor([2.0, NAN]), torch.tensor([1, 1])
    assert episode_advantages(kind, rewards, groups).tolist() == [0.0, 0.0]
    raw = episode_advantages(kind, rewards, groups, group_of_one="raw")
    torch.testing.assert_close(raw, torch.tensor([2.0, 0.0]), rtol=1e-5, atol=0)


def test_group_of_one_survives_float32_and_equal_rewards_give_zero() -> None:
    rewards = torch.full((3,), 0.1)
    found = episode_advantages("grpo", rewards, torch.zeros(3, dtype=torch.int64))
    assert found.abs().max() < 1e-6


def test_opo_without_any_token_falls_back_to_the_mean() -> None:
    actual = episode_advantages(
        "opo",
        torch.tensor([1.0, 0.0]),
        torch.tensor([0, 0]),
        {"num_tokens": torch.tensor([0, 0])},
    )
    assert actual.tolist() == [0.5, -0.5]


def test_gdpo_leaves_a_missing_reward_out_of_its_column_only() -> None:
    both = torch.stack([REWARDS, REWARDS.flip(0)], dim=1)
    both[0, 0] = NAN
    assert episode_advantages("gdpo", REWARDS, GROUPS, {"parts": both}).isfinite().all()
    both[0, 1] = NAN
    assert episode_advantages("gdpo", REWARDS, GROUPS, {"parts": both})[0] == 0


def test_pass_at_k_rewards_only_the_single_best() -> None:
    rewards = torch.tensor([1.0, 3.0, 0.0, 2.0, 2.0, NAN, 9.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    actual = episode_advantages("pass_at_k", rewards, groups, normalize="none")
    assert actual.tolist() == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    scaled = episode_advantages("pass_at_k", rewards, groups)
    assert scaled[1].item() == pytest.approx(2 / (np.std([1, 3, 0], ddof=1) + 1e-6))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("power", [4.0, 0.0, 1.0, 0.0]),
        ("max_min", [1.0, 0.0, 1.0, 0.0]),
        ("max_random", [0.4, 0.1, 0.1, 0.0]),
    ],
)
def test_resampling_weights(kind: Any, wanted: list[float]) -> None:
    rewards = torch.tensor([2.0, 0.0, -1.0, NAN])
    weights = resampling_weights(rewards, ResamplingSection(kind=kind))
    torch.testing.assert_close(weights, torch.tensor(wanted), rtol=0, atol=2e-8)


def test_resampling_never_draws_an_episode_without_a_reward() -> None:
    table = make_table(torch.tensor([0.0, NAN, 0.0]))
    copies = resample(table, ResamplingSection(), seed=0)
    assert copies is not None
    assert copies.sum() == 2
    assert copies[1] == 0


def test_zero_variance_ignores_missing_rewards() -> None:
    rewards = torch.tensor([1.0, NAN, 1.0, 0.0, 1.0])
    groups = torch.tensor([5, 5, 5, 6, 6])
    assert zero_variance(rewards, groups).tolist() == [True, True, True, False, False]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards and groups"):
        episode_advantages("grpo", torch.zeros(3), torch.zeros(4, dtype=torch.int64))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=12))
def test_order_and_names_of_groups_do_not_matter(members: list[tuple[int, int]]) -> None:
    groups = torch.tensor([group for group, _ in members])
    rewards = torch.tensor([float(reward) for _, reward in members], dtype=torch.float64)
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(1))
    for kind in ("grpo", "rloo", "pass_at_k", "gpg"):
        plain = episode_advantages(kind, rewards, groups)
        found = episode_advantages(kind, rewards[order], groups[order] * -17)
        torch.testing.assert_close(found, plain[order])
