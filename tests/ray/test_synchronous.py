"""`max_staleness: 0` is the synchronous algorithm: the loop against the plain one in tests/support."""

import pytest
import torch
from loop import SCRIPTED, TINY, Launcher, merged, rows
from reference import reference_loop
from transformers import AutoModelForCausalLM

from raylearner.config.schema import RunConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def test_losses_and_parameters_equal_a_synchronous_loop(launcher: Launcher) -> None:
    """With two ranks, whose rows share their prompts."""
    change = {
        "model": TINY,
        "data": {"system_prompt": "Compute the value of the expression, exactly."},
        "renderer": {"max_prompt_tokens": 128},
        "learner": {"num_ranks": 2},
    }
    launcher.run("run", change)
    folder = launcher.folder / "run"
    config = RunConfig.model_validate(merged(SCRIPTED, change))
    losses, parameters = reference_loop(config, folder / "model")
    metrics = rows(folder / "metrics.jsonl")
    assert [row["learner/loss"] for row in metrics] == pytest.approx(losses, abs=1e-6, rel=1e-6)
    trained = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoints" / "step_000005" / "model", dtype=torch.float64
    ).state_dict()
    started = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    moved = 0.0
    for name, expected in parameters.items():
        assert torch.allclose(trained[name], expected, atol=1e-6, rtol=0), name
        moved = max(moved, float((expected - started.state_dict()[name]).abs().max()))
    assert moved > 1e-4
    assert all(row["buffer/staleness/max"] == 0 for row in metrics)
    assert all(row["learner/shared_prefix_fraction"] > 0.2 for row in metrics)
