"""A learner whose shards live in host memory: the same numbers, and less of a GPU's memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from learners import full_state, make_groups, make_learner, step

from raylearner.learner.learner import Learner
from raylearner.types import TrajectoryGroup


def play(folder: Path, steps: list[list[TrajectoryGroup]], device: str, **changes: Any) -> Learner:
    config = {"learning_rate": 1e-2, "gpus_per_rank": float(device == "cuda")}
    learner = make_learner(folder, config | {"compute_dtype": "float32"} | changes)
    for groups in steps:
        step(learner, groups)
    return learner


def test_the_update_is_the_same_to_the_bit(tiny_folder: Path) -> None:
    steps = [make_groups(seed, policy_version=seed) for seed in range(2)]
    kept, offloaded = (
        full_state(play(tiny_folder, steps, "cpu", offload=is_offloaded))
        for is_offloaded in (False, True)
    )
    assert kept["num_updates"] == 2
    assert kept.keys() == offloaded.keys()
    assert [name for name in kept if (kept[name] != offloaded[name]).any()] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_shards_stay_on_the_host_and_numbers_close(
    tiny_folder: Path, tmp_path: Path
) -> None:
    steps = [make_groups(seed, policy_version=seed) for seed in range(2)]
    kept = play(tiny_folder, steps, "cuda")
    offloaded = play(tiny_folder, steps, "cuda", offload=True)
    assert {p.device.type for p in offloaded.models.policy.parameters()} == {"cpu"}
    assert {
        tensor.device.type
        for state in offloaded.models.optimizer.state.values()
        for tensor in state.values()
    } == {"cpu"}
    theirs = dict(offloaded.models.policy.named_weights(torch.float32))
    for name, tensor in kept.models.policy.named_weights(torch.float32):
        assert theirs[name].is_cuda
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-4, atol=1e-4)
    offloaded.save(tmp_path, should_defer=True)
    step(offloaded, make_groups(2, policy_version=2))
    offloaded.finish_save()
    kept.restore(tmp_path)
    for name, tensor in kept.models.policy.named_weights(torch.float32):
        assert torch.equal(theirs[name], tensor), name
