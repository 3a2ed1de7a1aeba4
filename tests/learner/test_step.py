"""Steps apart from the loss: warm-up, early stop, updated references, skips, resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import learners
import pytest
import torch
from learners import assert_same_weights, make_groups, step, weights_of
from torch import Tensor

from raylearner.errors import CheckpointError, ConfigError, LearnerError
from raylearner.learner.learner import Learner
from raylearner.types import StopReason, TrajectoryGroup

GAE: dict[str, Any] = {"advantage": {"kind": "gae"}, "critic": {"learning_rate": 1e-2}}
REFRESHED = {"kind": "refreshed", "every_steps": 2, "mix": 0.5}
ADAPTIVE = {"kind": "adaptive", "target": 0.01, "horizon": 50}


def make_learner(folder: Path, run_dir: Path | None = None, **changes: Any) -> Learner:
    options = {"compute_dtype": "float64", "learning_rate": 1e-2, "num_epochs": 2} | changes
    return learners.make_learner(folder, options, run_dir=run_dir)


@pytest.mark.parametrize(
    ("changes", "num_before", "folders"),
    [
        ({"schedule": "cosine", "warmup_steps": 2}, 0, {"learner", "model"}),
        (GAE | {"critic": {"warmup_steps": 1}}, 2, {"learner", "model", "critic"}),
        (GAE | {"critic": {"trunk": "shared"}}, 2, {"learner", "model"}),
        (
            {"kl": {"coefficient": 0.1, "reference": REFRESHED, "controller": ADAPTIVE}},
            2,
            {"learner", "model", "reference"},
        ),
        (
            {"loss": {"kind": "clip_cov", "covariance_low": 0.0, "drop_ratio": 0.3}},
            2,
            {"learner", "model"},
        ),
        (GAE | {"resampling": {"kind": "max_random"}}, 2, {"learner", "model", "critic"}),
        ({"lora": {"rank": 4, "alpha": 8}}, 1, {"learner", "model", "adapter"}),
    ],
    ids=["unstarted", "critic", "shared_critic", "reference", "clip_cov", "resampling", "lora"],
)
def test_resume_is_exact(
    tiny_folder: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    num_before: int,
    folders: set[str],
) -> None:
    steps = [make_groups(seed, num_groups=2) for seed in range(3)]
    whole = make_learner(tiny_folder, **changes)
    for groups in steps[:num_before]:
        step(whole, groups)
    whole.save(tmp_path)
    state = torch.get_rng_state()
    after = [step(whole, groups).metrics for groups in steps[num_before:]]

    resumed = make_learner(tiny_folder, **changes)
    resumed.restore(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert resumed.num_steps == num_before
    again = [step(resumed, groups).metrics for groups in steps[num_before:]]
    for ours, theirs in zip(after, again, strict=True):
        times = ("learner/step_s", "learner/tokens_per_s")
        assert {k: v for k, v in ours.items() if k not in times} == {
            k: v for k, v in theirs.items() if k not in times
        }
    assert_same_weights(whole, resumed)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == folders


def test_a_checkpoint_without_a_critic_is_refused_by_a_learner_that_has_one(
    tiny_folder: Path, tmp_path: Path
) -> None:
    make_learner(tiny_folder).save(tmp_path)
    with pytest.raises(CheckpointError, match="critic"):
        make_learner(tiny_folder, **GAE).restore(tmp_path)


def test_while_the_critic_warms_up_policy_and_version_stay(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, **GAE | {"critic": {"warmup_steps": 2}})
    before = weights_of(learner)
    values = []
    for seed in range(2):
        output = step(learner, make_groups(seed))
        assert (output.policy_version, output.is_skipped) == (0, False)
        assert "learner/loss" not in output.metrics
        assert output.metrics["learner/num_updates"] == 2
        values.append(output.metrics["learner/value_loss"])
    assert values[0] > 0
    assert_same_weights(learner, before)
    output = step(learner, make_groups(2))
    assert output.policy_version == 1
    assert not torch.equal(weights_of(learner)["model.norm.weight"], before["model.norm.weight"])


def test_exceeding_max_kl_ends_the_reuse_of_a_batch(tiny_folder: Path) -> None:
    groups = make_groups(0)
    free = step(make_learner(tiny_folder, num_epochs=4), groups).metrics
    assert (free["learner/num_updates"], free["learner/stopped_early"]) == (4, 0)
    assert free["learner/approx_kl_k3"] > 1e-4
    learner = make_learner(tiny_folder, num_epochs=4, max_kl=1e-4)
    metrics = step(learner, groups).metrics
    assert (metrics["learner/num_updates"], metrics["learner/stopped_early"]) == (1, 1)
    assert metrics["learner/skipped_updates"] == 0
    single = make_learner(tiny_folder, num_epochs=1)
    step(single, groups)
    assert_same_weights(single, learner)


def test_a_refreshed_reference_moves_with_every_kth_version_and_the_coefficient_with_the_kl(
    tiny_folder: Path,
) -> None:
    kl = {"coefficient": 0.1, "reference": REFRESHED, "controller": ADAPTIVE}
    learner = make_learner(tiny_folder, kl=kl, num_epochs=1)
    reference = learner.models.reference
    assert reference is not None

    def held() -> Tensor:
        return reference.model.own_parameters()["model.norm.weight"].full_tensor().clone()

    first, initial = step(learner, make_groups(0)).metrics, held()
    # The policy is the reference yet: KL 0 is below the target, by more than the limit of 0.2.
    assert first["learner/kl"] == 0.0
    second = step(learner, make_groups(1)).metrics
    assert second["learner/kl_coefficient"] == pytest.approx(0.1 * (1 - 0.2 * 12 / 50))
    assert second["learner/kl"] > 0
    policy = weights_of(learner)["model.norm.weight"]
    torch.testing.assert_close(held(), (initial + policy) / 2)
    moved = held()
    step(learner, make_groups(2))
    assert torch.equal(held(), moved)


def test_no_reference_is_loaded_at_coefficient_0(tiny_folder: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_folder, kl={"coefficient": 0.0, "reference": {"kind": "frozen"}})
    assert learner.models.reference is None
    frozen = make_learner(tiny_folder, kl={"reference": {"kind": "frozen"}})
    frozen.save(tmp_path)
    assert not (tmp_path / "reference").exists()
    for reference in (None, {"kind": "adapter_off"}):
        with pytest.raises(ConfigError, match=r"learner\.kl\.reference"):
            make_learner(tiny_folder, kl={"reference": reference})


def test_skipped_steps_are_counted_and_the_last_one_writes_its_trajectories(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """One episode of a reward whose loss overflows: its group is what is written down, and no other."""
    groups = make_groups(0, num_groups=2, group_size=4)
    bad, *rest = groups[1].trajectories
    groups[1] = replace(groups[1], trajectories=(replace(bad, reward=1e308), *rest))
    learner = make_learner(
        tiny_folder,
        tmp_path,
        max_skipped_steps=2,
        num_epochs=1,
        advantage={"kind": "dr_grpo"},
    )
    before = weights_of(learner)
    output = step(learner, groups)
    assert (output.is_skipped, output.metrics["learner/skipped_steps"]) == (True, 1)
    with pytest.raises(LearnerError, match=r"2 steps.*norm nan.*skipped/rank_\*/step_0"):
        step(learner, groups)
    lines = (tmp_path / "skipped" / "rank_0" / "step_000002.jsonl").read_text().splitlines()
    written = {json.loads(line)["group_id"] for line in lines}
    assert groups[1].group_id in written
    assert_same_weights(learner, before)


def test_a_value_loss_that_is_not_finite_skips_both_updates(tiny_folder: Path) -> None:
    learner = make_learner(tiny_folder, **GAE)
    critic = learner.models.critic
    assert critic is not None
    with torch.no_grad():
        critic.model.own_parameters()["value_head.bias"].fill_(torch.nan)
    before = weights_of(learner)
    assert step(learner, make_groups(0)).is_skipped
    assert_same_weights(learner, before)


def test_truncated_episodes_train_nothing_and_stay_in_the_baseline(tiny_folder: Path) -> None:
    groups = make_groups(0)
    cut = [
        replace(
            g,
            trajectories=(
                replace(g.trajectories[0], stop_reason=StopReason.MAX_TOKENS, reward=5.0),
                *g.trajectories[1:],
            ),
        )
        for g in groups
    ]
    learner = make_learner(tiny_folder, num_epochs=1)
    metrics = step(learner, cut, should_mask_truncated=True).metrics
    num_cut = sum(g.trajectories[0].num_sampled_tokens for g in groups)
    num_all = sum(t.num_sampled_tokens for g in groups for t in g.trajectories)
    assert metrics["learner/masked_fraction/truncated"] == pytest.approx(num_cut / num_all)
    assert metrics["learner/masked_fraction/stale"] == 0
    assert metrics["learner/trained_tokens"] == num_all - num_cut
    assert metrics["learner/reward/max"] == 5.0
    assert metrics["learner/advantage/max"] < 0  # the rest of each group is below the cut one


def test_gdpo_weighs_reward_functions_as_the_run_does(tiny_folder: Path) -> None:
    """A function of weight 0 changes nothing, whatever it says."""

    def with_parts(noise: float) -> list[TrajectoryGroup]:
        return [
            replace(
                g,
                trajectories=tuple(
                    replace(t, rewards={"a": t.reward, "b": noise * t.num_tokens})
                    for t in g.trajectories
                ),
            )
            for g in make_groups(0)
        ]

    losses = []
    for noise in (1.0, -7.0):
        learner = learners.make_learner(
            tiny_folder,
            {"compute_dtype": "float64", "advantage": {"kind": "gdpo"}},
            reward_weights={"a": 2.0, "b": 0.0},
        )
        losses.append(step(learner, with_parts(noise)).metrics["learner/loss"])
    assert losses[0] == losses[1] != 0
