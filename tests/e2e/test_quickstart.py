"""The quickstart as the README starts it, on a local Ray of its own, with real vLLM engines."""

import re
from pathlib import Path
from typing import Any

import pytest
from loop import ROOT, rows, run_cli

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def train(folder: Path, *arguments: str, timeout_s: float = 600) -> str:
    config = f"{ROOT}/configs/quickstart.yaml"
    return run_cli("train", config, f"run.dir={folder}", *arguments, timeout_s=timeout_s)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def rewards(folder: Path) -> list[float]:
    return [row["rollout/reward/mean"] for row in rows(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    return folder, train(folder)


@pytest.mark.timeout(700)
def test_the_policy_learns_to_use_the_calculator(quickstart: tuple[Path, str]) -> None:
    folder, _ = quickstart
    first, last = rows(folder / "eval.jsonl")
    assert (first["step"], last["step"]) == (0, 60)
    assert first["reward/mean"] <= 0.5
    assert last["reward/mean"] >= 0.8
    steps = rewards(folder)
    assert mean(steps[-10:]) >= 0.85
    assert mean(steps[-10:]) - mean(steps[:10]) >= 0.3


def test_the_run_was_asynchronous_and_every_engine_is_vllm_at_the_last_version(
    quickstart: tuple[Path, str],
) -> None:
    folder, output = quickstart
    assert len(re.findall(r"^[\d:]{8} step +\d+/60 ", output, re.MULTILINE)) == 60
    assert output.count("with VllmEngine runs as process") == 2
    metrics = rows(folder / "metrics.jsonl")
    assert mean([row["buffer/staleness/mean"] for row in metrics]) > 0
    assert max(row["buffer/staleness/max"] for row in metrics) <= 2
    assert max(row["weights/logprob_error"] for row in metrics) < 1e-4
    assert "every engine (2) holds policy version 60, log-probability error" in output
    assert "model: warm start, step " in output
    summary = output[output.index("finished at step 60 of 60") :]
    assert all(str(folder) in summary.partition(label)[2] for label in ("view", "resume"))
    assert f"checkpoint={folder}/checkpoints/step_000060" in summary
    trajectories = read_trajectories(folder)
    mixed = [t for t in trajectories if len({v for v in t["policy_versions"] if v >= 0}) > 1]
    assert len(mixed) >= 0.05 * len(trajectories)


def test_recorded_logprobs_of_fresh_tokens_are_the_learners(quickstart: tuple[Path, str]) -> None:
    metrics = rows(quickstart[0] / "metrics.jsonl")
    assert metrics[0]["buffer/staleness/max"] == 0
    assert metrics[0]["learner/logprob_gap/max"] < 1e-4


def test_trajectories_keep_the_data_contract(quickstart: tuple[Path, str]) -> None:
    for t in read_trajectories(quickstart[0])[:256]:
        arrays = [t[k] for k in ("token_ids", "loss_mask", "train_mask", "behavior_logprobs")]
        assert len({len(a) for a in [*arrays, t["policy_versions"]]}) == 1
        for is_sampled, logprob, version in zip(
            t["loss_mask"], t["behavior_logprobs"], t["policy_versions"], strict=True
        ):
            assert is_sampled == (logprob is not None) == (version >= 0)


def test_every_key_that_is_emitted_is_documented(quickstart: tuple[Path, str]) -> None:
    from raylearner.observability.metrics import undocumented

    keys = {key for row in rows(quickstart[0] / "metrics.jsonl") for key in row}
    assert undocumented(sorted(keys)) == []


@pytest.mark.timeout(300)
def test_a_checkpoint_is_evaluated_alone(quickstart: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = quickstart
    place = folder / "checkpoints" / "step_000060"
    output = run_cli(
        "eval",
        f"checkpoint={place}",
        f"run.dir={tmp_path / 'eval'}",
        "actors.num_actors=1",
        timeout_s=250,
    )
    (alone,) = rows(tmp_path / "eval" / "eval.jsonl")
    last = rows(folder / "eval.jsonl")[-1]
    assert (alone["step"], alone["policy_version"]) == (last["step"], last["policy_version"])
    assert alone["num_prompts"] == last["num_prompts"]
    assert alone["reward/mean"] == pytest.approx(last["reward/mean"], abs=0.02)
    assert "calculator" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_learning_rate_nothing_rises(
    quickstart: tuple[Path, str], tmp_path: Path
) -> None:
    model = f"model={{kind: pretrained, path: {quickstart[0] / 'model'}}}"
    train(tmp_path / "run", model, "learner.learning_rate=0")
    steps = rewards(tmp_path / "run")
    assert abs(mean(steps[-10:]) - mean(steps[:10])) < 0.1
    first, last = rows(tmp_path / "run" / "eval.jsonl")
    assert last["reward/mean"] == first["reward/mean"]


def read_trajectories(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / "trajectories").iterdir()) for row in rows(path)]
