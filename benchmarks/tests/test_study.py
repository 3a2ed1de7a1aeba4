"""The study harness: what it samples with, its tables, and a small run from end to end."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import study
from study_harness import Harness, Run, prepare_model, train

SMALL = (
    "run.num_steps=3",
    "model={hidden_size: 64, num_heads: 2, intermediate_size: 96, warm_start: null}",
    "data.train={kind: calculator, num_prompts: 20}",
    "replay={groups_per_step: 2, group_size: 3}",
    "sampling.max_turn_tokens=12",
    "evaluation={num_prompts: 4, sampling: {temperature: 0.0, max_turn_tokens: 12}}",
)
"""A model that knows nothing."""

REWARDED = (*SMALL, "rewards={functions: [{kind: 'studied_reward:parity'}]}")
"""A reward that a model which knows nothing gets now and then, so that weights move."""

PARITY = "def parity(episode):\n    return float(len(episode.response) % 2)\n"


@pytest.fixture
def rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    (tmp_path / "studied_reward.py").write_text(PARITY)
    monkeypatch.syspath_prepend(tmp_path)
    return REWARDED


@pytest.mark.parametrize("lag", [0, 2])
async def test_tokens_are_sampled_exactly_lag_versions_behind(
    rewarded: tuple[str, ...], tmp_path: Path, lag: int
) -> None:
    """By their own account, and by the learner's: only its own tokens have its log-probabilities."""
    run = Run(study="test", name="grpo", overrides=rewarded, lag=lag)
    config = run.config()
    model_path = prepare_model(config, tmp_path / "cache")
    async with Harness(config, lag=lag, model_path=model_path) as harness:
        for version in range(3):
            assert harness.learner.policy_version == version
            step = await harness.step()
            seen = {int(v) for t in step.trajectories for v in t.policy_versions[t.loss_mask]}
            assert seen == {max(0, version - lag)}
            is_on_policy = step.output.metrics["learner/logprob_gap/max"] < 1e-4
            assert is_on_policy == (seen == {version})


async def test_the_same_seed_gives_the_same_run(rewarded: tuple[str, ...], tmp_path: Path) -> None:
    def timeless(record: dict[str, object]) -> dict[str, object]:
        return {key: value for key, value in record.items() if key not in ("seconds", "cpu_s")}

    records = [
        await train(
            Run(study="test", name="grpo", overrides=rewarded, lag=1, seed=seed),
            cache=tmp_path / "cache",
        )
        for seed in (7, 7, 8)
    ]
    assert timeless(records[0]) == timeless(records[1])
    assert records[0]["reward"] != records[2]["reward"]
    assert len(list((tmp_path / "cache").iterdir())) == 1  # seeds share the model


@pytest.mark.parametrize("cache", ["recompute", "keep"])
async def test_later_versions_reach_the_sampler_while_it_samples(
    rewarded: tuple[str, ...], tmp_path: Path, cache: Literal["recompute", "keep"]
) -> None:
    run = Run(study="test", name=cache, overrides=rewarded, lag=2, cache=cache)
    config = run.config()
    model_path = prepare_model(config, tmp_path / "cache")
    async with Harness(config, lag=2, model_path=model_path, cache=cache) as harness:
        gaps = []
        for _ in range(4):
            step = await harness.step()
            gaps.append(step.output.metrics["learner/on_policy_gap/max"])
        assert max(len(set(t.policy_versions[t.loss_mask].tolist())) for t in step.trajectories) > 1
        assert (harness.num_recomputed > 0) == (cache == "recompute")
        if cache == "recompute":
            assert max(gap for gap in gaps if gap == gap) < 1e-4


def test_every_run_of_every_study_is_a_valid_configuration() -> None:
    for name in study.TABLES:
        runs = study.runs_of(name)
        assert len({run.key for run in runs}) == len(runs)
        for run in runs:
            assert run.config().replay.max_staleness == run.lag


def test_the_off_policy_tables_compare_with_the_same_objective_at_lag_0() -> None:
    """At lag 0 a weighted one is the same as none."""
    values = {0: (0.9, 0.8, 1.0), 4: (0.81, 0.81, 0.81), 16: (0.0, 0.45, 0.9)}
    records = [
        {
            "name": "tis" if lag else "none",
            "lag": lag,
            "seed": seed,
            "late_accuracy": accuracy,
            "num_steps": 4,
            "reward": [0.0, 0.0, accuracy, accuracy],
        }
        for lag, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    tables = study.off_policy_tables(records)
    assert tables[2:4] == [
        "| none | 0.90 (0.80 to 1.00) |  |  |",
        "| tis | 0.90 (0.80 to 1.00) | 0.81 (0.81 to 0.81), -10% | 0.45 (0.00 to 0.90), -50% |",
    ]
    assert tables[7:] == tables[2:4]  # of the second half of the run


@pytest.mark.slow
async def test_a_whole_run_learns_the_task(tmp_path: Path) -> None:
    run = next(run for run in study.runs_of("objectives") if run.name == "grpo")
    record = await train(run, cache=tmp_path)
    assert record["accuracy"] >= 0.8
    assert np.mean(record["reward"][-10:]) > np.mean(record["reward"][:10]) + 0.2
