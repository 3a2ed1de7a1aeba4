"""Reward models and functions of groups in actors of their own, prompts from a mixture."""

from pathlib import Path

import pytest
import torch
from loop import Launcher, rows
from transformers import LlamaConfig, LlamaForSequenceClassification

from raylearner.observability.metrics import undocumented
from raylearner.tiny.model import make_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


def save_reward_model(folder: Path) -> None:
    tokenizer = make_tokenizer(max_length=512)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_models_group_functions_and_mixtures_make_the_rewards_of_a_run(
    launcher: Launcher,
) -> None:
    save_reward_model(launcher.folder / "taste")
    length = {"kind": "response_length", "target_tokens": 12}
    model = {"kind": "model", "name": "taste", "path": "taste", "weight": 0.5, "cpus": 0.5}
    group = {"kind": "group_functions:longest", "per": "group", "weight": 2.0}
    source = {"kind": "calculator", "num_prompts": 20}
    change = {
        "run": {"num_steps": 2},
        "data": {
            "train": [
                {**source, "source": "sums", "operations": ["+"], "weight": 2.0},
                {**source, "source": "products", "operations": ["*"]},
            ],
            "sampler": {"kind": "by_difficulty"},
        },
        "rewards": {"functions": [length, model, group], "clip": [-10.0, 2.5]},
    }
    launcher.run("run", change)
    metrics = rows(launcher.folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert undocumented(row) == []
        assert row["rollout/source/sums/group_fraction"] == pytest.approx(2 / 3)
        assert 0 < row["rollout/reward/longest/mean"] < 1
        assert row["rollout/reward/taste/std"] > 0
        assert row["rollout/logged/longest/most/mean"] > 0
        assert "rollout/errors/reward" not in row
    for trajectory in rows(launcher.folder / "run" / "trajectories" / "step_000002.jsonl"):
        parts = trajectory["rewards"]
        total = parts["response_length"] + 0.5 * parts["taste"] + 2.0 * parts["longest"]
        assert trajectory["reward"] == pytest.approx(min(2.5, total))
        assert trajectory["columns"]["length"] == trajectory["num_sampled_tokens"]
