"""Records of a learner step: advantages, log-probabilities, spans, profiles."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from learners import make_groups, make_learner, step
from transformers import AutoModelForCausalLM

from raylearner.config.schema import ProfileSection
from raylearner.learner.recording import StepProfiler
from raylearner.observability.spans import Tracer


def test_a_step_returns_advantages_and_start_log_probabilities_by_trajectory(
    tiny_folder: Path,
) -> None:
    config = {"compute_dtype": "float64", "learning_rate": 1e-2, "num_epochs": 2}
    tracer = Tracer("learner-0")
    learner = make_learner(tiny_folder, config, tracer=tracer)
    groups = make_groups(3)
    trajectories = [t for group in groups for t in group.trajectories]
    output = step(learner, groups, num_mini_batches=2)
    trained = [t for t in trajectories if t.train_mask.any()]
    assert set(output.advantages) == {t.key for t in trained}
    assert any(value != 0 for value in output.advantages.values())
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()
    for trajectory in trained:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        logprobs = output.logprobs[trajectory.key]
        mask = trajectory.loss_mask
        assert logprobs[mask] == pytest.approx(expected[mask[1:]], abs=1e-5)
    names = [span.name for span in tracer.drain()]
    assert {"prepare", "forward", "backward", "update"} <= set(names)
    assert names.count("forward") == names.count("backward") >= 4


def test_chosen_steps_are_profiled_and_no_others(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileSection(steps=(2,)), tmp_path, rank=3)
    for number in (1, 2, 3):
        with profiler.step(number):
            torch.ones(8) @ torch.ones(8)
    (path,) = tmp_path.iterdir()
    assert path.name == "step_000002_rank_3.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("aten::dot" in event.get("name", "") for event in events)
    with StepProfiler(None, tmp_path / "none", rank=0).step(2):
        pass
    assert not (tmp_path / "none").exists()
