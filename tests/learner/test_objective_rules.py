"""What holds whatever objective is configured: who trains, what a baseline sees, what counts once."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import learners
import numpy as np
import pytest
import torch
from episodes import make_trajectory, make_turn
from learners import assert_same_weights, one_batch, step, weights_of

from raylearner.config.section import sections_by_kind
from raylearner.learner.batch.rows import Rows
from raylearner.learner.batch.whole_batch import WholeBatch
from raylearner.learner.learner import Learner
from raylearner.learner.objective import estimate
from raylearner.learner.objective.episodes import EpisodeTable
from raylearner.learner.objective.returns import GaeAdvantage
from raylearner.types import Trajectory, TrajectoryGroup


def make_learner(folder: Path, *, num_steps: int = 10, **keys: Any) -> Learner:
    config = {"compute_dtype": "float64", "learning_rate": 1e-2}
    return learners.make_learner(folder, config | keys, num_steps=num_steps)


def make_row(
    sample: int,
    reward: float | None,
    *,
    segment: int = 0,
    num_sampled: int = 6,
    logprob: float = -5.3,
    rewards: Mapping[str, float | None] | None = None,
    group: int = 0,
) -> Trajectory:
    """Two tokens of a prompt, then sampled ones in one turn."""
    num_tokens = 2 + num_sampled
    rng = np.random.default_rng([sample, segment, group])
    return make_trajectory(
        [-1, -1] + [0] * num_sampled,
        logprob=logprob,
        group_id=group,
        sample_index=sample,
        segment=segment,
        prompt_id=str(group),
        token_ids=rng.integers(10, 200, num_tokens).astype(np.int32),
        reward=reward,
        rewards=rewards or {},
        turns=(make_turn("t", start=2, end=num_tokens, reply="r"),),
    )


def make_group(rows: Sequence[Trajectory], *, greedy: float | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=rows[0].group_id,
        prompt_id=str(rows[0].group_id),
        policy_version=0,
        trajectories=tuple(rows),
        greedy_reward=greedy,
    )


def advantages_of(
    folder: Path, groups: list[TrajectoryGroup], **keys: Any
) -> dict[tuple[int, int, int, int], float]:
    output = step(make_learner(folder, **keys), groups)
    return dict(output.advantages)


GROUP_BASELINES = sorted(
    kind
    for kind, section in sections_by_kind(estimate.AdvantageSection).items()
    if section.compares_in_group and kind != "gdpo"
)
UNSCORED: list[dict[str, Any]] = [
    {"advantage": {"kind": kind, **({"normalize": "none"} if kind == "grpo" else {})}}
    for kind in GROUP_BASELINES
] + [
    {"advantage": {"kind": "reinforce_plus_plus"}},
    {"advantage": {"kind": "gdpo"}},
    {"advantage": {"kind": "gae"}, "critic": {}},
    {"advantage": {"kind": "remax"}},
]


@pytest.mark.parametrize("keys", UNSCORED, ids=lambda keys: keys["advantage"]["kind"])
def test_an_episode_without_a_reward_changes_nothing(
    tiny_folder: Path, keys: dict[str, Any]
) -> None:
    shared = {"entropy_coefficient": 0.1, "aggregation": "sequence_mean_of_means", **keys}
    values = [1.0, 0.0, 1.0, 0.25]
    scored = [make_row(i, r, rewards={"a": r, "b": 1 - r}) for i, r in enumerate(values)]
    unscored = [
        make_row(7, None, rewards={"a": 1.0, "b": None}),
        make_row(8, None),
        make_row(9, float("nan")),
    ]
    alone, beside = (make_learner(tiny_folder, **shared) for _ in range(2))
    right = step(alone, [make_group(scored, greedy=0.5)])
    output = step(beside, [make_group([*scored, *unscored], greedy=0.5)])
    assert output.metrics["learner/loss"] == pytest.approx(right.metrics["learner/loss"], abs=1e-12)
    assert output.advantages == pytest.approx(right.advantages)
    assert output.metrics["learner/masked_fraction/unscored"] == pytest.approx(3 / 7)
    assert_same_weights(beside, alone, atol=1e-12)


def test_groups_with_missing_rewards_have_the_advantages_of_the_others(tiny_folder: Path) -> None:
    for rewards, expected in (
        ([1.0, None, 0.0, None], {0: 0.5, 2: -0.5}),
        ([0.5, None, None, None], {0: 0.0}),
        ([float("nan"), 1.0, 0.0, 1.0], {1: 1 / 3, 2: -2 / 3, 3: 1 / 3}),
        ([float("inf"), 0.0, 0.0, 1.0], {1: -1 / 3, 2: -1 / 3, 3: 2 / 3}),
    ):
        group = make_group([make_row(i, r) for i, r in enumerate(rewards)])
        found = advantages_of(tiny_folder, [group], advantage={"kind": "grpo", "normalize": "none"})
        assert {key[1]: a for key, a in found.items()} == pytest.approx(expected)


def test_an_entropy_bonus_moves_nothing_where_no_reward_applies(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, entropy_coefficient=1.0)
    before = weights_of(learner)
    output = step(learner, [make_group([make_row(0, None), make_row(1, None)])])
    assert output.is_skipped
    assert_same_weights(learner, before)


def test_episodes_without_a_greedy_baseline_do_not_train_with_remax(tiny_folder: Path) -> None:
    shared = {"advantage": {"kind": "remax"}, "entropy_coefficient": 0.1}
    known = make_group([make_row(0, 1.0), make_row(1, 0.0)], greedy=0.25)
    unknown = make_group([make_row(0, 1.0, group=1), make_row(1, 0.0, group=1)])
    alone, beside = (make_learner(tiny_folder, **shared) for _ in range(2))
    step(alone, [known])
    step(beside, [known, unknown])
    assert_same_weights(beside, alone, atol=1e-12)


def test_remax_normalizes_the_baseline_with_the_rewards(tiny_folder: Path) -> None:
    groups = [
        make_group([make_row(i, r, group=g) for i, r in enumerate((9.0, 10.0, 11.0))], greedy=10.5)
        for g in range(2)
    ]
    found = advantages_of(
        tiny_folder, groups, advantage={"kind": "remax"}, reward={"normalize": True}
    )
    spread = np.std([9, 10, 11, 9, 10, 11], ddof=1)
    for (_, sample, *_), advantage in found.items():
        assert advantage == pytest.approx((sample + 9 - 10.5) / spread)


def test_gdpo_shapes_the_reward_of_each_function(tiny_folder: Path) -> None:
    parts = [(0.0, 1.0), (1.0, 0.0), (100.0, 1.0), (0.0, 0.0)]

    def found(clip: float | None, values: list[tuple[float, float]]) -> dict[Any, float]:
        rows = [make_row(i, a + b, rewards={"a": a, "b": b}) for i, (a, b) in enumerate(values)]
        return advantages_of(
            tiny_folder,
            [make_group(rows)],
            advantage={"kind": "gdpo", "normalize": "none"},
            reward={"clip_high": clip},
        )

    clipped = [(min(a, 1.0), b) for a, b in parts]
    assert found(1.0, parts) == pytest.approx(found(None, clipped))
    assert found(1.0, parts) != pytest.approx(found(None, parts))


def test_gigpo_pays_an_outcome_once_however_many_segments(tiny_folder: Path) -> None:
    rows = [make_row(0, 1.0), *(make_row(1, 1.0, segment=s) for s in range(3))]
    found = advantages_of(
        tiny_folder, [make_group(rows)], advantage={"kind": "gigpo", "gamma": 1.0}
    )
    assert list(found.values()) == pytest.approx([0.0] * 4)
    found = advantages_of(
        tiny_folder, [make_group(rows[:3])], advantage={"kind": "gigpo", "gamma": 0.5}
    )
    # First turns start alike: returns 1 and 0.5. The second segment's turn was met once.
    assert found[0, 0, 0, 0] == pytest.approx(0.25)
    assert found[0, 1, 0, 0] == pytest.approx(-0.25)
    assert found[0, 1, 0, 1] == pytest.approx(0.0)


def test_the_schedule_of_the_policy_begins_after_the_critic_warmed_up(tiny_folder: Path) -> None:
    learner = make_learner(
        tiny_folder,
        num_steps=6,
        advantage={"kind": "gae"},
        critic={"warmup_steps": 2},
        schedule="linear",
        learning_rate=1e-3,
    )
    rates: list[float | None] = []
    for _ in range(6):
        rows = [make_row(i, float(i % 2)) for i in range(2)]
        rows = [replace(r, claim_policy_version=learner.policy_version) for r in rows]
        output = step(learner, [make_group(rows)])
        rates.append(output.metrics.get("learner/learning_rate"))
    assert rates[:2] == [None, None]
    assert rates[2:] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss": {"kind": "ppo"}, "corrections": [{"kind": "tis", "high": 2.0}]}, (0, 2.0)),
        ({"loss": {"kind": "ppo"}, "corrections": [{"kind": "mis", "high": 2.0}]}, (0, 0.0)),
        ({"loss": {"kind": "decoupled_ppo", "behavior_cap": 3.0}}, (0, 3.0)),
        ({"loss": {"kind": "reinforce", "ratio_cap": 1.5}}, (0, 1.5)),
        ({"loss": {"kind": "topr", "ratio_cap": 1.5}}, (0, 1.0)),  # a good row is not reweighed
        ({"loss": {"kind": "ppo"}, "corrections": [{"kind": "rejection", "high": 2.0}]}, (0, 0.0)),
    ],
    ids=["tis", "mis", "decoupled", "reinforce", "topr", "rejection"],
)
def test_the_optimal_token_baseline_gets_the_weights_of_the_loss(
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    expected: tuple[int, float],
) -> None:
    seen: list[Any] = []
    otb = estimate.TOKEN_ADVANTAGES["tir_otb"]

    def spy(inputs: Any, config: Any) -> Any:
        seen.append(inputs.weights)
        return otb(inputs, config)

    monkeypatch.setitem(estimate.TOKEN_ADVANTAGES, "tir_otb", spy)
    rows = [make_row(0, 1.0, logprob=-30.0), make_row(1, 0.0)]
    step(
        make_learner(tiny_folder, advantage={"kind": "tir_otb"}, **keys),
        [make_group(rows)],
        max_tokens_per_micro_batch=64,
    )
    row, weight = expected
    first = seen[0].split([6, 6])[row]
    # Log-probabilities of -30 are far below the policy's: every ratio is beyond the bound.
    assert first.tolist() == [weight] * 6


def test_segments_of_an_episode_that_is_alone_are_no_baseline_for_each_other(
    tiny_folder: Path,
) -> None:
    rows = [make_row(0, 1.0, segment=0), make_row(0, 1.0, segment=1, num_sampled=3)]
    for kind in ("otb", "tir_otb"):
        found = advantages_of(tiny_folder, [make_group(rows)], advantage={"kind": kind})
        assert list(found.values()) == pytest.approx([0.0, 0.0])


TOKEN_REJECTION = {"kind": "rejection", "level": "token", "high": 2.0}


@pytest.mark.parametrize(
    ("loss", "corrections"),
    [
        (
            {"kind": "gpg"},
            [TOKEN_REJECTION, {"kind": "tis", "level": "sequence", "high": 20.0}],
        ),
        ({"kind": "reinforce", "level": "sequence", "ratio_cap": 20.0}, [TOKEN_REJECTION]),
        ({"kind": "topr", "level": "sequence", "ratio_cap": 20.0}, [TOKEN_REJECTION]),
        ({"kind": "decoupled_ppo", "behavior_level": "geometric"}, [TOKEN_REJECTION]),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_rejection_that_leaves_the_counts_is_decided_on_all_tokens(
    tiny_folder: Path, loss: dict[str, Any], corrections: list[dict[str, Any]]
) -> None:
    rows = [make_row(i, float(i % 2), num_sampled=20) for i in range(4)]
    probe = step(make_learner(tiny_folder), [make_group(rows)])
    ratios = [0.1 * np.random.default_rng(i).standard_normal(22) for i in range(4)]
    ratios[0][5] = 1.5  # one token of ratio 4.5, which the first correction rejects
    rows = [
        replace(
            row,
            behavior_logprobs=np.where(
                row.loss_mask, np.minimum(probe.logprobs[row.key] - ratio, 0), np.nan
            ).astype(np.float32),
        )
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    found = {}
    for counts in (True, False):
        learner = make_learner(
            tiny_folder,
            loss=loss,
            corrections=corrections,
            count_rejected=counts,
        )
        found[counts] = step(learner, [make_group(rows)]).metrics
    # The weights are the same, over 79 tokens in place of 80.
    assert found[False]["learner/loss"] == pytest.approx(found[True]["learner/loss"] * 80 / 79)
    key = "learner/corrections/rejected_fraction"
    assert found[False][key] == found[True][key] == pytest.approx(1 / 80)


@pytest.mark.parametrize("proximal", ["recomputed", "behavior", "interpolated"])
def test_reported_logprobs_are_those_of_the_start_of_the_step(
    tiny_folder: Path, proximal: str
) -> None:
    groups = [make_group([make_row(i, float(i % 2), group=g) for i in range(2)]) for g in range(2)]
    frozen = step(make_learner(tiny_folder, learning_rate=0.0), groups)
    learner = make_learner(tiny_folder, num_mini_batches=2, proximal=proximal, loss={"kind": "ppo"})
    found = step(learner, groups, num_mini_batches=2)
    for key, logprobs in frozen.logprobs.items():
        np.testing.assert_allclose(found.logprobs[key], logprobs, atol=1e-6)


def test_turn_gae_subtracts_the_value_before_the_turn(tiny_folder: Path) -> None:
    learner = make_learner(
        tiny_folder, advantage={"kind": "turn_gae", "normalize": False}, critic={}
    )
    assert learner.models.critic is not None
    head = learner.models.critic.model.value_head
    torch.manual_seed(0)
    with torch.no_grad():
        head.weight.normal_(0, 0.1)
        head.bias.fill_(0.3)
    batch = one_batch([make_group([make_row(i, float(i % 2)) for i in range(2)])])
    whole = learner._prepare(batch)
    (prepared,) = whole.mini_batches[0].micro_batches
    assert prepared.values is not None
    assert prepared.is_target is not None
    for row in range(2):
        (place,) = torch.where((prepared.micro.rows.index == row) & prepared.mask)
        reward = float(whole.table.rewards[prepared.micro.episodes[row]])
        expected = reward - float(prepared.values[place[0]])
        assert prepared.advantages[place].tolist() == pytest.approx([expected] * 6)
        assert prepared.is_target[place].tolist() == [True] + [False] * 5


def test_resampled_episodes_count_as_often_in_the_value_loss(tiny_folder: Path) -> None:
    rewards = [4.0, 1.0, 0.5, 2.0]
    rows = [make_row(i, r, num_sampled=2 + i * i) for i, r in enumerate(rewards)]
    learner = make_learner(
        tiny_folder, advantage={"kind": "gae"}, critic={"clip": None}, resampling={"power": 2.0}
    )
    batch = one_batch([make_group(rows)])
    copies = learner._prepare(batch).table.copies
    assert copies is not None
    drawn = copies.tolist()
    assert sum(drawn) == 4
    assert sum(n * (2 + i * i) for i, n in enumerate(drawn)) != 22  # as many tokens as undrawn
    # A new head says 0 everywhere, so each token's loss is half the square of the reward.
    tokens = [count * (2 + i * i) for i, count in enumerate(drawn)]
    expected = sum(n * r**2 / 2 for n, r in zip(tokens, rewards, strict=True)) / sum(tokens)
    assert learner.step(batch).metrics["learner/value_loss"] == pytest.approx(expected)


def test_all_segments_of_a_cut_episode_bootstrap_from_its_last_one() -> None:
    # Two segments of one token each; values before them 0.5 and 0.25, after them 7 and 2; reward 1.
    whole = WholeBatch(
        rows=Rows.from_lengths([1, 1]),
        episodes=torch.tensor([0, 0]),
        mask=torch.ones(2, dtype=torch.bool),
        of_rows={"bootstrap": torch.tensor([7.0, 2.0]).double()},
        of_tokens={
            "values": torch.tensor([0.5, 0.25]).double(),
            "turns": torch.zeros(2).double(),
            "anchors": torch.zeros(2).double(),
        },
        _mine=torch.arange(2),
        _places=(),
        _micros=(),
    )
    one = torch.ones(1, dtype=torch.float64)
    table = EpisodeTable(
        rewards=one,
        groups=torch.zeros(1, dtype=torch.int64),
        num_tokens=torch.tensor([2]),
        num_rows=torch.tensor([2]),
        greedy_rewards=one * torch.nan,
        parts=one.new_zeros((1, 0)),
        part_weights=one.new_zeros(0),
    )
    section = GaeAdvantage(kind="gae", bootstrap=True, normalize=False)
    found = estimate.token_advantages(section, table, whole, torch.zeros(2, dtype=torch.float64))
    # What follows the episode is worth 2 to both: 1 + 2 - 0.5, and 1 + 2 - 0.25.
    assert found.advantages.tolist() == pytest.approx([2.5, 2.75])


def test_metrics_show_rewards_unshaped(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, reward={"clip_high": 1.0, "normalize": True})
    group = make_group([make_row(0, 5.0), make_row(1, 0.0), make_row(2, None)])
    metrics = step(learner, [group]).metrics
    assert metrics["learner/reward/mean"] == pytest.approx(2.5)
    assert metrics["learner/reward/max"] == pytest.approx(5.0)
