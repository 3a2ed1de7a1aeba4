"""Checkpoints: exact, complete or absent, found again, and usable with other numbers of ranks."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import learners
import pytest
import torch
from learners import assert_same_weights, make_groups, step, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from raylearner.errors import CheckpointError
from raylearner.learner.checkpoint.directory import (
    create_checkpoint,
    find_latest,
    prune_checkpoints,
)
from raylearner.learner.checkpoint.state import AGREEMENT_TIMEOUT_S
from raylearner.learner.learner import Learner
from raylearner.learner.model.mesh import COLLECTIVE_TIMEOUT_S


def make_learner(folder: Path, **changes: Any) -> Learner:
    config = {"compute_dtype": "float32", "learning_rate": 1e-2, "schedule": "cosine"}
    return learners.make_learner(folder, config | {"warmup_steps": 2} | changes)


async def write(folder: Path, number: int, text: str) -> None:
    async with create_checkpoint(folder, step=number) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file.txt").write_text(text)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_two_ranks_are_resumed_by_one(tiny_folder: Path, two_ranks: Any) -> None:
    learner = learners.make_learner(tiny_folder, two_ranks.config)
    learner.restore(two_ranks.saved)
    assert learner.policy_version == 3
    assert_same_weights(learner, two_ranks.weights)


def test_a_rank_that_cannot_write_its_files_does_not_block_others(
    tiny_folder: Path, two_ranks: Any
) -> None:
    assert (two_ranks.saved_beside / "learner" / "rng_00001.json").is_dir()
    learner = learners.make_learner(tiny_folder, two_ranks.config)
    learner.restore(two_ranks.saved_beside)
    assert_same_weights(learner, two_ranks.weights)


def test_ranks_wait_for_each_others_files_for_less_than_for_a_step(tiny_folder: Path) -> None:
    group: Any = make_learner(tiny_folder)._saver.group
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    assert timeout.total_seconds() == AGREEMENT_TIMEOUT_S < COLLECTIVE_TIMEOUT_S


@pytest.mark.parametrize("model", ["tiny_folder", "untied_folder"])
def test_the_exported_model_loads_with_from_pretrained(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    learner = make_learner(request.getfixturevalue(model))
    step(learner, make_groups(0))
    monkeypatch.setattr("raylearner.learner.model.export.MAX_SHARD_BYTES", 100_000)
    learner.save(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tensors = dict(exported.named_parameters())
    for name, tensor in weights_of(learner, torch.float32).items():
        assert torch.equal(tensor, tensors[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert "policy version 1" in (tmp_path / "model" / "README.md").read_text()
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()


def test_a_checkpoint_of_another_model_is_refused(
    tiny_folder: Path, untied_folder: Path, tmp_path: Path
) -> None:
    make_learner(tiny_folder).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is None"):
        make_learner(untied_folder).restore(tmp_path)
    with pytest.raises(CheckpointError, match=r"progress\.json"):
        make_learner(tiny_folder).restore(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "path"),
    [
        ("tensors", r"learner/tensors/\S+\.safetensors"),
        ("progress.json", r"learner/progress\.json"),
        ("rng_00000.json", r"learner/rng_00000\.json"),
    ],
)
async def test_a_damaged_file_is_named_with_the_latest_complete_checkpoint(
    tiny_folder: Path, tmp_path: Path, damage: str, path: str
) -> None:
    learner = make_learner(tiny_folder)
    for number in (1, 2):
        async with create_checkpoint(tmp_path, step=number) as partial:
            learner.save(partial)
    damaged = tmp_path / "step_000002"
    (file,) = (
        (damaged / "learner" / "tensors").iterdir()
        if damage == "tensors"
        else [damaged / "learner" / damage]
    )
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=path) as refused:
        make_learner(tiny_folder).restore(damaged)
    assert str(tmp_path / "step_000001") in str(refused.value)


async def test_the_newest_complete_checkpoint_is_found_and_skipped_ones_are_named(
    tmp_path: Path,
) -> None:
    for number in (1, 2, 3, 4):
        await write(tmp_path, number, f"text {number}")
    (tmp_path / "step_000005.partial").mkdir()
    (tmp_path / "step_000004" / "inner" / "file.txt").write_text("TEXT 4")
    (tmp_path / "step_000003" / "inner" / "file.txt").unlink()
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.folder.name) == (2, "step_000002")
    assert [reason.split(":")[0] for reason in found.skipped] == [
        "step_000005.partial",
        "step_000004",
        "step_000003",
    ]
    assert "inner/file.txt is corrupt" in found.skipped[1]
    assert "is missing" in found.skipped[2]
    assert find_latest(tmp_path / "nowhere") is None


async def test_a_failure_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    await write(tmp_path, 1, "one")

    async def fail() -> None:
        async with create_checkpoint(tmp_path, step=2) as partial:
            (partial / "half").write_text("...")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        await fail()
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 1
    await write(tmp_path, 2, "two")
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (2, ())


def test_a_kill_while_writing_leaves_the_previous_one(tmp_path: Path) -> None:
    script = """
        import asyncio, sys
        from pathlib import Path
        from raylearner.learner.checkpoint.directory import create_checkpoint

        async def main(folder):
            for step in range(1, 10_000):
                async with create_checkpoint(folder, step=step) as partial:
                    for name in range(20):
                        (partial / str(name)).write_bytes(bytes([step % 256]) * 50_000)
                sys.stdout.write(f"{step}\\n")
                sys.stdout.flush()

        asyncio.run(main(Path(sys.argv[1])))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    last = 3 + len(process.communicate()[0].split())
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step in (last, last + 1)
    values = {(found.folder / str(name)).read_bytes() for name in range(20)}
    assert values == {bytes([found.step % 256]) * 50_000}


async def test_a_step_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    await write(tmp_path, 1, "old")
    await write(tmp_path, 1, "new")
    assert (tmp_path / "step_000001" / "inner" / "file.txt").read_text() == "new"
    assert names_in(tmp_path) == ["step_000001"]


async def test_pruning_keeps_the_newest_and_removes_steps_after_a_roll_back(
    tmp_path: Path,
) -> None:
    """Resumed from 20, since 30 was corrupt, and stopped at 22."""
    for number in (8, 9, 10, 20, 30, 22):
        await write(tmp_path, number, "text")
    (tmp_path / "step_000030" / "inner" / "file.txt").write_text("TEXT")
    for name in ("step_000009.partial", "step_000012.partial", "step_000031.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000040.mine").mkdir()
    prune_checkpoints(tmp_path, step=22, keep_last=2)
    assert names_in(tmp_path) == ["step_000020", "step_000022", "step_000040.mine"]
    prune_checkpoints(tmp_path, step=22, keep_last=1)
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (22, ())
