"""Returns per token where the oracle has none: loops over trained tokens, and edge cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives import make_table, token_advantages
from torch import Tensor

from raylearner.learner.batch.rows import Rows, terminal_rewards
from raylearner.learner.objective.returns import reverse_scan, rewards_to_go
from raylearner.learner.objective.turn_advantages import turn_ends

LENGTHS = [9, 0, 14, 1, 6, 4]


def make_batch(seed: int = 0) -> tuple[Rows, Tensor, dict[str, Tensor]]:
    """Rows with holes, an empty one and one that does not train, float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = Rows.from_lengths(LENGTHS)
    mask = torch.rand(rows.num_tokens, generator=generator) < 0.6
    mask[rows.index == 5] = False
    names = ("rewards", "values", "log_ratios", "logprobs", "squared_probs")
    flat = {
        name: torch.randn(rows.num_tokens, generator=generator, dtype=torch.float64)
        for name in names
    }
    flat["logprobs"] = -flat["logprobs"].abs()
    flat["squared_probs"] = flat["squared_probs"].abs().clamp(max=1)
    return rows, mask, flat


def trained(rows: Rows, mask: Tensor, row: int) -> list[int]:
    return torch.nonzero((rows.index == row) & mask).squeeze(1).tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 1)), max_size=40))
def test_reverse_scan_is_the_recurrence(entries: list[tuple[float, float]]) -> None:
    addends = torch.tensor([a for a, _ in entries], dtype=torch.float64)
    factors = torch.tensor([f for _, f in entries], dtype=torch.float64)
    wanted, running = [], 0.0
    for addend, factor in reversed(entries):
        running = addend + factor * running
        wanted.append(running)
    actual = reverse_scan(addends, factors)
    torch.testing.assert_close(actual, torch.tensor(wanted[::-1], dtype=torch.float64))


def test_vtrace_is_the_recursion_of_impala() -> None:
    rows, mask, flat = make_batch(1)
    gamma, lam, rho_bar, c_bar = 0.98, 0.9, 1.5, 1.0
    wanted = torch.zeros(rows.num_tokens, dtype=torch.float64)
    targets = wanted.clone()
    for row in range(rows.num_rows):
        next_value = next_target = 0.0
        for t in reversed(trained(rows, mask, row)):
            ratio = math.exp(float(flat["log_ratios"][t]))
            reward, value = float(flat["rewards"][t]), float(flat["values"][t])
            delta = min(ratio, rho_bar) * (reward + gamma * next_value - value)
            trace = lam * min(ratio, c_bar)
            target = value + delta + gamma * trace * (next_target - next_value)
            wanted[t] = min(ratio, rho_bar) * (reward + gamma * next_target - value)
            targets[t] = target
            next_value, next_target = value, target
    actual = token_advantages(
        "vtrace",
        flat["rewards"],
        mask,
        rows,
        inputs={"values": flat["values"], "log_ratio": flat["log_ratios"]},
        gamma=gamma,
        lam=lam,
        rho_bar=rho_bar,
        c_bar=c_bar,
    )
    torch.testing.assert_close(actual, (wanted, targets))


def test_vtrace_is_finite_for_extreme_ratios() -> None:
    rows, mask, flat = make_batch()
    for extreme in (100.0, -100.0):
        inputs = {
            "values": flat["values"],
            "log_ratio": torch.full_like(flat["rewards"], extreme),
        }
        found = token_advantages("vtrace", flat["rewards"], mask, rows, inputs=inputs)
        assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("kind", ["gae", "vtrace", "reinforce_plus_plus"])
def test_returns_off_the_mask_never_leak(kind: str) -> None:
    rows, mask, flat = make_batch()
    poisoned = {name: torch.where(mask, values, math.nan) for name, values in flat.items()}
    found, wanted = (
        token_advantages(
            kind,
            data["rewards"],
            mask,
            rows,
            inputs={"values": data["values"], "log_ratio": data["log_ratios"]},
        )[0]
        for data in (poisoned, flat)
    )
    torch.testing.assert_close(found, wanted)


def test_reinforce_plus_plus_with_a_single_token_is_zero() -> None:
    mask = torch.tensor([False, True])
    actual, _ = token_advantages("reinforce_plus_plus", torch.ones(2), mask, Rows.from_lengths([2]))
    assert actual.tolist() == [0.0, 0.0]


def test_remax_subtracts_the_greedy_reward_on_trained_tokens_only() -> None:
    rows = Rows.from_lengths([3, 2])
    mask = torch.tensor([True, False, True, True, False])
    rewards = terminal_rewards(torch.tensor([1.0, 2.0]), mask, rows)
    assert rewards.tolist() == [0, 0, 1, 2, 0]
    baselines = torch.tensor([0.25, 5.0])
    table = make_table(torch.tensor([1.0, 2.0]), greedy_rewards=baselines)
    actual, found = token_advantages("remax", rewards, mask, rows, table=table)
    assert actual.tolist() == [0.75, 0, 0.75, -3.0, 0]
    assert found.tolist() == [1, 1, 1, 2, 0]


def make_turns(rows: Rows) -> Tensor:
    """A new turn every four tokens of each row."""
    starts = torch.cat([torch.zeros(1), torch.tensor(LENGTHS).cumsum(0)])[:-1].long()
    return (torch.arange(rows.num_tokens) - starts[rows.index]) // 4


def test_bilevel_gae_is_two_passes_of_loops() -> None:
    rows, mask, flat = make_batch(3)
    turns = make_turns(rows)
    gamma_turn, gamma, lam = 0.9, 0.99, 0.8
    wanted = torch.zeros(rows.num_tokens, dtype=torch.float64)
    for row in range(rows.num_rows):
        places = trained(rows, mask, row)
        by_turn = [
            [t for t in places if int(turns[t]) == turn] for turn in sorted(set(turns.tolist()))
        ]
        by_turn = [members for members in by_turn if members]
        next_value = running = 0.0
        for members in reversed(by_turn):
            end = members[-1]
            reward = float(flat["rewards"][members].sum())
            value = float(flat["values"][end])
            running = reward + gamma_turn * next_value - value + gamma_turn * lam * running
            next_value = value
            inner, following = 0.0, 0.0
            for t in reversed(members):
                token_reward = running + value if t == end else 0.0
                delta = token_reward + gamma * following - float(flat["values"][t])
                inner = delta + gamma * lam * inner
                following = float(flat["values"][t])
                wanted[t] = inner
    actual, _ = token_advantages(
        "bilevel_gae",
        flat["rewards"],
        mask,
        rows,
        inputs={"values": flat["values"], "turns": turns},
        gamma_turn=gamma_turn,
        gamma=gamma,
        lam=lam,
    )
    torch.testing.assert_close(actual, wanted)


def test_bilevel_gae_sees_a_turn_without_reward() -> None:
    rows, mask = Rows.from_lengths([4]), torch.ones(4, dtype=torch.bool)
    turns, rewards = torch.tensor([0, 0, 1, 1]), torch.tensor([0.0, 0, 0, 1])
    values = torch.tensor([0.0, 0.5, 0.0, 0.0])
    actual, _ = token_advantages(
        "bilevel_gae",
        rewards,
        mask,
        rows,
        inputs={"values": values, "turns": turns},
        gamma_turn=1.0,
    )
    # The first turn's end has reward A_0 + V, with A_0 = 0 + 0 - 0.5 + 1 = 0.5.
    torch.testing.assert_close(actual, torch.tensor([1.0, 0.5, 1.0, 1.0]))


def test_turn_gae_gives_all_tokens_of_a_turn_its_advantage() -> None:
    rows, mask, flat = make_batch(3)
    turns = make_turns(rows)
    actual, _ = token_advantages(
        "turn_gae",
        flat["rewards"],
        mask,
        rows,
        inputs={"values": flat["values"], "turns": turns},
        lam=0.9,
    )
    ends = turn_ends(mask, rows, turns)
    for row in range(rows.num_rows):
        for turn in set(turns.tolist()):
            members = (rows.index == row) & (turns == turn) & mask
            if members.any():
                assert int((ends & members).sum()) == 1
                assert len(set(actual[members].tolist())) == 1
    assert not actual[~mask].any()


def test_otb_group_of_one_is_zero_or_its_return() -> None:
    rows, mask = Rows.from_lengths([2]), torch.ones(2, dtype=torch.bool)
    rewards = torch.tensor([0.0, 3.0])
    inputs = {"logprobs": torch.tensor([-1.0, -1.0]), "squared_probs": torch.full((2,), 0.5)}
    for kept, wanted in (("zero", [0.0, 0.0]), ("raw", [3.0, 3.0])):
        found, _ = token_advantages(
            "tir_otb", rewards, mask, rows, inputs=inputs, group_of_one=kept
        )
        assert found.tolist() == wanted


def test_rows_that_share_nothing_do_not_touch() -> None:
    rows, mask, flat = make_batch()

    def advantages(mask: Tensor, rows: Rows, own: Tensor | slice) -> Tensor:
        inputs = {"values": flat["values"][own]}
        return token_advantages(
            "gae", flat["rewards"][own], mask, rows, inputs=inputs, gamma=0.9, lam=0.8
        )[0]

    together = advantages(mask, rows, slice(None))
    for row in range(rows.num_rows):
        own = rows.index == row
        alone = advantages(mask[own], Rows.from_lengths([LENGTHS[row]]), own)
        torch.testing.assert_close(together[own], alone)


def test_long_rows_stay_exact() -> None:
    rows = Rows.from_lengths([5000, 5000])
    rewards = torch.zeros(10000)
    rewards[4999] = 1.0
    mask = torch.ones(10000, dtype=torch.bool)
    found = rewards_to_go(rewards, mask, rows, gamma=0.999)
    assert found[0].item() == pytest.approx(0.999**4999, rel=1e-5)
    assert not found[5000:].any()
