"""Objectives as the configuration gives them, against numbers worked out by hand.

Probabilities are chosen so that every ratio is a short decimal; each expected number has its
derivation beside it, in a form other than the code's.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objectives import (
    correct,
    correction_inputs,
    episode_advantages,
    make_table,
    section_of,
    token_advantages,
)
from torch import Tensor

from raylearner.learner.batch.rows import Rows
from raylearner.learner.objective.loss import LossInputs, LossOutput
from raylearner.learner.objective.losses import POLICY_LOSSES
from raylearner.learner.objective.rejection import m2po_bound
from raylearner.learner.objective.turn_advantages import gigpo_of_steps


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    kind: str,
    *,
    current: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    lengths: list[int],
    rewards: Tensor | None = None,
    **keys: Any,
) -> tuple[LossOutput, Tensor]:
    """The loss with the defaults of its section, and the gradient of its sum by log pi."""
    logprobs = current.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=advantages,
        mask=torch.ones(len(current), dtype=torch.bool),
        rows=Rows.from_lengths(lengths),
        rewards=numbers(*[0.0] * len(lengths)) if rewards is None else rewards,
    )
    output = POLICY_LOSSES[kind](inputs, section_of("loss", kind, **keys))
    output.values.sum().backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


def test_decoupled_ppo() -> None:
    output, gradient = loss_of(
        "decoupled_ppo",
        current=logs(0.75, 0.30, 0.30, 0.90, 0.55),
        proximal=logs(0.50, 0.50, 0.50, 0.30, 0.50),
        behavior=logs(0.20, 0.40, 0.50, 0.60, 0.625),
        advantages=numbers(1, 1, -1, -2, -1),
        lengths=[2, 3],
    )
    # pi/old: 1.5 0.6 0.6 3 1.1; old/mu: 2.5 (capped at 2) 1.25 1 0.5 0.8.
    # A=1 R=1.5 clips to 1.2: -1.2 * 2. A=1 R=0.6 does not clip: -0.6 * 1.25.
    # A=-1 R=0.6 clips to 0.8: 0.8 * 1. A=-2 R=3 does not clip, no dual clip: 6 * 0.5. 1.1 * 0.8.
    torch.testing.assert_close(output.values, numbers(-2.4, -0.75, 0.8, 3.0, 0.88))
    # d R / d log pi = R, and 0 where it is clipped.
    torch.testing.assert_close(gradient, numbers(0.0, -0.75, 0.0, 3.0, 0.88))


def test_topr_tapers_bad_rows_by_the_ratio_of_the_whole_row() -> None:
    output, gradient = loss_of(
        "topr",
        current=logs(0.5, 0.5, 0.2, 0.5, 0.8, 0.5),
        proximal=logs(0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
        behavior=logs(0.25, 0.25, 0.5, 0.5, 0.4, 0.25),
        advantages=numbers(1, 1, -1, -1, -2, -2),
        lengths=[2, 2, 2],
        rewards=numbers(1, 0, -1),
    )
    # Row 1, reward 1: untouched. Row 2, reward 0: 0.4 * 1 = 0.4. Row 3: 2 * 2 = 4, capped at 1.
    expected = [-math.log(0.5)] * 2
    expected += [0.4 * math.log(0.2), 0.4 * math.log(0.5), 2 * math.log(0.8), 2 * math.log(0.5)]
    torch.testing.assert_close(output.values, numbers(*expected))
    torch.testing.assert_close(gradient, numbers(-1, -1, 0.4, 0.4, 2, 2))


def test_topr_with_a_ratio_per_token() -> None:
    _, gradient = loss_of(
        "topr",
        level="token",
        current=logs(0.2, 0.5),
        proximal=logs(0.2, 0.5),
        behavior=logs(0.5, 0.25),
        advantages=numbers(-1, -1),
        lengths=[2],
        rewards=numbers(0),
    )
    torch.testing.assert_close(gradient, numbers(0.4, 1.0))


def test_gppo_keeps_the_gradient_of_the_bound_where_ppo_has_none() -> None:
    output, gradient = loss_of(
        "gppo",
        current=logs(0.75, 0.30, 0.30, 0.75),
        proximal=logs(0.50, 0.50, 0.50, 0.50),
        behavior=logs(0.50, 0.50, 0.50, 0.50),
        advantages=numbers(2, 2, -3, -3),
        lengths=[4],
    )
    # Ratios 1.5 0.6 0.6 1.5. Clipped: 2 * 1.2, and 3 * 0.8; open: 2 * 0.6, and 3 * 1.5.
    torch.testing.assert_close(output.values, numbers(-2.4, -1.2, 2.4, 4.5))
    # The gradient of bound * R / sg(R) by log pi is the bound.
    torch.testing.assert_close(gradient, numbers(-2.4, -1.2, 2.4, 4.5))


def test_veto_drops_whole_rows_for_one_token() -> None:
    rows, mask = Rows.from_lengths([2, 3, 1]), torch.tensor([True, True, True, True, False, True])
    # Ratios 1 and 2e-4; 3 and 0.9e-4 (and one that does not train); 1e3.
    ratio = numbers(1.0, 2e-4, 3.0, 0.9e-4, 1e-9, 1e3).log()
    found = correct("veto", correction_inputs(ratio, mask, rows), threshold=1e-4)
    assert found.keep.tolist() == [True, True, False, False, False, True]
    assert found.weights.tolist() == [1, 1, 0, 0, 0, 1]


def test_m2po_bounds_what_moves_outward() -> None:
    # Outward (log-ratio and advantage of one sign): 0.1, 0.2, 0.3, 1.0; all else moves back.
    ratio = numbers(0.1, -0.2, 0.3, 1.0, 5.0, -5.0, 0.4)
    advantages = numbers(1, -1, 2, 1, -1, 1, 0)
    mask = torch.ones(7, dtype=torch.bool)
    rows = Rows.from_lengths([7])
    inputs = correction_inputs(ratio, mask, rows, advantages=advantages)

    def bound_and_kept(threshold: float) -> tuple[float, list[bool]]:
        bound = m2po_bound(inputs, section_of("correction", "m2po", threshold=threshold))
        return bound, correct("m2po", replace(inputs, batch_value=bound)).keep.tolist()

    # Squares 0.01 0.04 0.09 1: (0.01 + 0.04 + 2 c) / 4 = 0.05 gives c = 0.075, below 0.09.
    bound, kept = bound_and_kept(0.05)
    assert bound == pytest.approx(0.075)
    assert kept == [True, True, False, False, True, True, True]
    # (0.01 + 0.04 + 0.09 + c) / 4 = 0.1 gives c = 0.26: one token less.
    bound, kept = bound_and_kept(0.1)
    assert bound == pytest.approx(0.26)
    assert kept == [True, True, True, False, True, True, True]
    # Their mean is 0.285: within the threshold nothing is rejected.
    assert bound_and_kept(0.29)[0] == math.inf


def test_gigpo_adds_the_advantage_among_turns_from_one_state() -> None:
    # One prompt, three episodes of two turns; rewards 1, 0 and 2 come at the end. First turns all
    # start from state 7; second turns from 8, 8 and 9. Discount 0.5.
    found = gigpo_of_steps(
        numbers(1, 0, 2),
        torch.tensor([4, 4, 4]),
        numbers(0, 1, 0, 0, 0, 2),
        Rows.from_lengths([2, 2, 2]),
        torch.tensor([7, 8, 7, 8, 7, 9]),
        section_of("advantage", "gigpo", gamma=0.5, step_weight=2.0),
    )
    # Episodes: mean 1, so 0 -1 1. State 7: returns 0.5 0 1, mean 0.5, so 0 -0.5 0.5.
    # State 8: returns 1 0, so 0.5 -0.5. State 9 was met once: 0.
    torch.testing.assert_close(found, numbers(0, 1, -2, -2, 2, 1))


def test_gigpo_divides_by_the_deviation_when_asked() -> None:
    found = gigpo_of_steps(
        numbers(1, 0),
        torch.tensor([0, 0]),
        numbers(1, 0),
        Rows.from_lengths([1, 1]),
        torch.tensor([3, 3]),
        section_of("advantage", "gigpo", normalize="group"),
    )
    # Deviation (ddof 1) of 1 and 0 is 1/sqrt 2: each part 0.5 sqrt 2.
    torch.testing.assert_close(found, numbers(1, -1) * math.sqrt(2), atol=1e-5, rtol=0)


def test_bilevel_gae_over_turns_then_inside_each() -> None:
    # A prompt token, turn 0 of two tokens, an observation, turn 1 of two tokens.
    mask = torch.tensor([False, True, True, False, True, True])
    turns = torch.tensor([-1, 0, 0, 0, 1, 1])
    values = numbers(9, 0.1, 0.2, 9, 0.4, 0.5)
    rewards = numbers(0, 0, 0.3, 0, 0, 1)
    found, targets = token_advantages(
        "bilevel_gae",
        rewards,
        mask,
        Rows.from_lengths([6]),
        inputs={"values": values, "turns": turns},
        gamma_turn=0.5,
        lam=0.5,
    )
    # Turns, values at their last tokens 0.2 and 0.5. Turn 1: delta = 1 - 0.5 = 0.5.
    # Turn 0: delta = 0.3 + 0.5 * 0.5 - 0.2 = 0.35, plus 0.5 * 0.5 * 0.5 = 0.475.
    # Tokens, rewards of last ones 0.475 + 0.2 and 0.5 + 0.5. Turn 1: 1 - 0.5 = 0.5, before it
    # 0.5 - 0.4 + 0.5 * 0.5 = 0.35. Turn 0: 0.675 - 0.2 = 0.475, before it 0.2 - 0.1 + 0.2375.
    torch.testing.assert_close(found, numbers(0, 0.3375, 0.475, 0, 0.35, 0.5))
    torch.testing.assert_close(targets, numbers(0, 0.4375, 0.675, 0, 0.75, 1.0))


def test_turn_gae_compares_with_the_value_before_the_turn() -> None:
    # Two turns of two tokens with an observation between; outcome 1.
    mask = torch.tensor([False, True, True, False, True, True])
    turns = torch.tensor([-1, 0, 0, 0, 1, 1])
    values = numbers(9, 0.3, 0.9, 9, 0.6, 1.0)
    rewards = numbers(0, 0, 0, 0, 0, 1)
    rows = Rows.from_lengths([6])
    inputs = {"values": values, "turns": turns}
    found, targets = token_advantages("turn_gae", rewards, mask, rows, inputs=inputs)
    # With lambda 1 the return minus the value of the state before the turn: 1 - 0.3, 1 - 0.6.
    torch.testing.assert_close(found, numbers(0, 0.7, 0.7, 0, 0.4, 0.4))
    torch.testing.assert_close(targets, numbers(0, 1, 0, 0, 1, 0))
    found, targets = token_advantages("turn_gae", rewards, mask, rows, inputs=inputs, lam=0.0)
    # With lambda 0 the next turn's value takes the place of the return.
    torch.testing.assert_close(found, numbers(0, 0.3, 0.3, 0, 0.4, 0.4))
    torch.testing.assert_close(targets, numbers(0, 0.6, 0, 0, 1, 0))


def test_a_perfect_critic_leaves_a_turn_its_gradient() -> None:
    # The first token decides (good with 0.3): the exact value before it is 0.3, after it 1 or 0.
    mask, turns = torch.tensor([False, True, True, True]), torch.tensor([-1, 0, 0, 0])
    rows, gradient = Rows.from_lengths([4]), 0.0
    for outcome, score in ((1.0, 0.3 * 0.7), (0.0, 0.7 * -0.3)):
        values, rewards = numbers(0, 0.3, outcome, outcome), numbers(0, 0, 0, outcome)
        inputs = {"values": values, "turns": turns}
        found, _ = token_advantages("turn_gae", rewards, mask, rows, inputs=inputs)
        gradient += score * float(found[1])
    assert gradient == pytest.approx(0.3 * 0.7)


def test_segments_of_an_episode_share_a_vote_in_the_optimal_token_baseline() -> None:
    # Three rows of one token, return 0, 0 and 3: two are segments of one episode. Energies are alike.
    def baselined(rewards: Tensor, row_episodes: list[int], outcomes: Tensor) -> Tensor:
        halves = torch.full_like(rewards, 0.5)
        return token_advantages(
            "otb",
            rewards,
            torch.ones(len(rewards), dtype=torch.bool),
            Rows.from_lengths([1] * len(rewards)),
            inputs={
                "logprobs": halves.log(),
                "squared_probs": halves,
                "row_episodes": torch.tensor(row_episodes),
            },
            table=make_table(outcomes),
        )[0]

    found = baselined(numbers(0, 0, 3), [0, 0, 1], numbers(0, 3))
    torch.testing.assert_close(found, numbers(-1.5, -1.5, 1.5), rtol=0, atol=1e-6)
    assert baselined(numbers(1, 3), [0, 0], numbers(2)).tolist() == [0, 0]


def test_group_statistics_of_rewards_at_the_edge_of_float32() -> None:
    rewards = torch.tensor([1e38, -1e38, 0, 0])
    found = episode_advantages("grpo", rewards, torch.zeros(4, dtype=torch.int64))
    # Mean 0, deviation sqrt(2e76 / 3).
    torch.testing.assert_close(found, torch.tensor([1.5**0.5, -(1.5**0.5), 0, 0]))
