"""Gradients of several micro-batches: what a rank keeps between them saves work and changes no number."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learners import full_state, make_groups, make_learner, one_batch, step
from ranks import run_ranks
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from raylearner.config.memory import Kept
from raylearner.learner.batch.pack import pack
from raylearner.learner.learner import Learner
from raylearner.learner.model import models

SCRIPT = Path(__file__).with_name("accumulation_rank.py")
EVERYTHING, NOTHING = Kept(weights=True, gradients=True), Kept()
OPTIONS = [EVERYTHING, Kept(weights=True), Kept(gradients=True), NOTHING]
CONFIG: dict[str, Any] = {"compute_dtype": "float32", "learning_rate": 1e-2}


def learner_that_keeps(
    kept: Kept, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Learner:
    monkeypatch.setattr(models, "choose_kept", lambda *_, **__: kept)
    return make_learner(folder, CONFIG | changes)


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"compute_dtype": "bfloat16"},
        {"advantage": {"kind": "gae"}, "critic": {"learning_rate": 1e-2}},
        {"lora": {"rank": 4, "alpha": 8}},
        {"offload": True, "reshard": True},
    ],
    ids=["half", "critic", "lora", "offload"],
)
def test_an_update_is_the_same_whatever_is_kept(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    states = []
    for kept in (EVERYTHING, NOTHING):
        learner = learner_that_keeps(kept, tiny_folder, monkeypatch, **changes)
        for seed in range(2):
            step(learner, make_groups(seed, policy_version=seed), num_mini_batches=2)
        states.append(full_state(learner))
    assert_close(*states)
    assert states[0]["num_updates"] == 4


def test_what_is_kept_is_gathered_and_reduced_once_an_update_on_every_rank(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The first rank has one row only, and fills up with an empty micro-batch."""
    groups = make_groups(1, num_groups=1, group_size=3)
    batches = pack(groups, policy_version=0, num_ranks=2, max_tokens_per_micro_batch=24)
    num_micros = len(batches[0].mini_batches[0].micro_batches)
    assert num_micros > 1
    assert any(not rows for b in batches for rows in b.mini_batches[0].micro_batches)
    job = {"config": CONFIG, "model": str(tiny_folder), "batches": batches, "options": OPTIONS}
    (tmp_path / "job.pkl").write_bytes(pickle.dumps(job))
    run_ranks(SCRIPT, tmp_path, num_ranks=2)
    results = pickle.loads((tmp_path / "result.pkl").read_bytes())
    num_units = 3  # two blocks and the rest
    for kept, (num_gathers, num_reductions, state) in zip(OPTIONS, results, strict=True):
        assert num_reductions == num_units * (1 if kept.gradients else num_micros), kept
        # Blocks are gathered again for the backward, the rest is not.
        again = num_units if kept.weights else (2 * num_units - 1) * num_micros
        assert num_gathers == again, kept
        assert_close(state, results[-1][2])


def test_a_step_that_broke_off_leaves_no_gradient_behind(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_that_keeps(EVERYTHING, tiny_folder, monkeypatch)
    learner.save(tmp_path)
    batch = one_batch(make_groups(0))
    assert len(batch.mini_batches[0].micro_batches) > 2
    policy, num_calls = learner.models.policy, 0
    backward = policy.backward

    def fail_at_the_third(share: Any, *, is_last: bool) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise MemoryError
        backward(share, is_last=is_last)

    with monkeypatch.context() as patch:
        patch.setattr(policy, "backward", fail_at_the_third)
        with pytest.raises(MemoryError):
            learner.step(batch)
    learner.restore(tmp_path)
    fresh = learner_that_keeps(EVERYTHING, tiny_folder, monkeypatch)
    for one in (learner, fresh):
        one.step(batch)
    assert_close(full_state(learner), full_state(fresh))


def test_gradients_of_an_update_beyond_max_kl_do_not_reach_the_next_step(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = learner_that_keeps(
        EVERYTHING, tiny_folder, monkeypatch, num_epochs=2, max_kl=1e-7, learning_rate=1e-3
    )
    single = learner_that_keeps(EVERYTHING, tiny_folder, monkeypatch, learning_rate=1e-3)
    for seed in range(2):
        groups = make_groups(seed, policy_version=seed)
        assert step(stopped, groups).metrics["learner/stopped_early"] == 1
        step(single, groups)
    assert_close(full_state(stopped), full_state(single))


def test_one_rank_makes_one_reduction_an_update(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what memory there is on this machine, for a model that is tiny."""
    learner = make_learner(tiny_folder, CONFIG)
    reduce, num_calls = _fsdp_param_group.foreach_reduce, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return reduce(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
    step(learner, make_groups(0))
    assert num_calls == 3
