"""Checkpoints beside training, with a learner and a replay that tell what is asked of them."""

import asyncio
import json
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from minimal import MINIMAL
from ray.exceptions import ActorDiedError

from raylearner.config.loader import load
from raylearner.config.report import resolved_yaml
from raylearner.config.schema import RunSection
from raylearner.errors import CheckpointError, ConfigError, LearnerDied, LearnerError, ReplayDied
from raylearner.learner.checkpoint import directory
from raylearner.learner.checkpoint.directory import (
    create_checkpoint,
    find_latest,
    list_damage,
    write_hashes,
)
from raylearner.observability import run_directory
from raylearner.observability.spans import Tracer
from raylearner.run.checkpointing import (
    CheckpointWriter,
    changed_keys,
    format_changes,
    locked_checkpoint,
)
from raylearner.run.watchdog import Watchdog


class FakeLearner:
    """Copies a number and writes it once it is let."""

    def __init__(self) -> None:
        self.number = 0
        self.may_write = asyncio.Event()
        self.error: Exception | None = None
        self._copied: tuple[Path, int] | None = None

    async def save(self, folder: Path, *, should_defer: bool) -> None:
        assert self._copied is None, "two in flight"
        self._copied = folder, self.number
        if not should_defer:
            self._write()

    async def finish_save(self) -> None:
        await self.may_write.wait()
        self._write()

    def _write(self) -> None:
        if self.error is not None:
            raise self.error
        assert self._copied is not None
        folder, number = self._copied
        (folder / "number").write_text(str(number))
        self._copied = None


def make_saver(
    folder: Path,
    learner: FakeLearner,
    *,
    keep_last: int = 2,
    should_defer: bool = True,
    save: Callable[[str], Awaitable[None]] | None = None,
    **keys: Any,
) -> CheckpointWriter:
    """One that tolerates no failure unless `keys` of the section tell."""

    async def cut() -> None:
        pass

    async def make_folder(folder: str) -> None:
        await asyncio.to_thread(Path(folder).mkdir)

    replay = SimpleNamespace(
        cut=SimpleNamespace(remote=cut), save=SimpleNamespace(remote=save or make_folder)
    )
    actors: Any = SimpleNamespace(learner=learner, replay=replay)
    keys = {"max_checkpoint_failures": 1, **keys}
    return CheckpointWriter(
        RunSection(keep_last=keep_last, checkpoint_async=should_defer, **keys),
        folder,
        actors=actors,
        watchdog=Watchdog(60.0, step=lambda: 0),
        roles=[],
        tracer=Tracer("controller", is_enabled=False),
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_training_continues_while_one_copy_is_written(
    tmp_path: Path,
) -> None:
    learner = FakeLearner()
    saver = make_saver(tmp_path, learner)
    await saver.start(1)
    learner.number = 7
    assert names(tmp_path) == ["step_000001.partial"]
    assert saver.drain_metrics().keys() == {"checkpoint/stall_s"}
    second = asyncio.ensure_future(saver.start(2))
    await asyncio.sleep(0.05)
    assert not second.done(), "the first must be whole before the second starts"
    learner.may_write.set()
    await second
    await saver.wait()
    assert [(tmp_path / name / "number").read_text() for name in names(tmp_path)] == ["0", "7"]
    assert list_damage(tmp_path) == []
    assert saver.drain_metrics()["checkpoint/stall_s"] >= 0.04
    await saver.start(3)
    await saver.wait()
    assert names(tmp_path) == ["step_000002", "step_000003"]


async def test_without_deferring_it_is_complete_before_training_continues(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, FakeLearner(), should_defer=False)
    await saver.start(1)
    assert (names(tmp_path), list_damage(tmp_path)) == (["step_000001"], [])
    assert saver.drain_metrics().keys() == {"checkpoint/stall_s", "checkpoint/write_s"}


async def test_a_step_behind_a_corrupt_checkpoint_is_the_one_that_is_kept(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, FakeLearner(), should_defer=False, keep_last=1)
    await saver.start(30)
    (tmp_path / "step_000030" / "number").write_text("corrupt")
    await saver.start(22)
    assert (names(tmp_path), list_damage(tmp_path)) == (["step_000022"], [])


@pytest.mark.parametrize(
    ("should_defer", "error"),
    [
        (True, CheckpointError("learner rank 1: OSError: no space left on device")),
        (False, LearnerError("learner rank 1: OSError: no space left on device")),
    ],
)
async def test_a_failed_write_names_its_step_and_the_last_complete_checkpoint(
    tmp_path: Path, should_defer: bool, error: Exception
) -> None:
    """At once, or by the next call where it was made beside training."""
    learner = FakeLearner()
    learner.may_write.set()
    saver = make_saver(tmp_path, learner, should_defer=should_defer)
    await saver.start(1)
    await saver.wait()
    learner.error = error
    if should_defer:
        await saver.start(2)
    with pytest.raises(CheckpointError) as refused:
        await saver.start(3 if should_defer else 2)
    assert "the checkpoint of step 2 was not written: learner rank 1: OSError" in str(refused.value)
    assert str(tmp_path / "step_000001") in str(refused.value)


async def test_a_dead_rank_is_named_and_its_files_are_abandoned(tmp_path: Path) -> None:
    learner = FakeLearner()
    saver = make_saver(tmp_path, learner)
    await saver.start(1)
    learner.error = LearnerDied("rank 0")
    learner.may_write.set()
    with pytest.raises(LearnerDied):
        await saver.wait()
    learner.may_write.clear()
    learner._copied = None
    await saver.start(2)
    await saver.cancel()
    await saver.wait()
    assert find_latest(tmp_path) is None


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("should_defer", [True, False])
async def test_consecutive_failed_writes_are_counted_and_leave_no_files(
    tmp_path: Path, should_defer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    learner = FakeLearner()
    learner.may_write.set()
    saver = make_saver(tmp_path, learner, should_defer=should_defer, max_checkpoint_failures=2)
    for step, fails in ((1, False), (2, True), (3, False), (4, True)):
        learner.error, learner._copied = CheckpointError("rank 1: full") if fails else None, None
        await saver.start(step)
        await saver.wait()
        assert saver.completed == (step - 1 if fails else step)
    assert names(tmp_path) == ["step_000001", "step_000003"]
    assert str(shutil.disk_usage(tmp_path).free)[:3] in caplog.text
    assert "rank 1: full" in caplog.text
    learner._copied = None
    with pytest.raises(CheckpointError, match="step 5"):
        await saver.complete(5)
    assert names(tmp_path) == ["step_000001", "step_000003"]


async def test_the_last_checkpoint_is_retried_until_it_is_complete(tmp_path: Path) -> None:
    tried: list[str] = []

    async def save(folder: str) -> None:
        tried.append(folder)
        if len(tried) < 3:
            raise FULL
        await asyncio.to_thread(Path(folder).mkdir)

    learner = FakeLearner()
    learner.may_write.set()
    saver = make_saver(tmp_path, learner, save=save, max_checkpoint_failures=3)
    await saver.start(7)
    await saver.complete(7)
    assert (len(tried), saver.completed, list_damage(tmp_path)) == (3, 7, [])
    await saver.complete(7)
    assert len(tried) == 3


async def test_the_death_of_the_replay_actor_is_not_counted_as_a_failed_write(
    tmp_path: Path,
) -> None:
    async def save(_: str) -> None:
        raise ActorDiedError()

    learner = FakeLearner()
    learner.may_write.set()
    saver = make_saver(tmp_path, learner, save=save, max_checkpoint_failures=3)
    await saver.start(1)
    with pytest.raises(ReplayDied):
        await saver.wait()


def test_a_checkpoint_is_due_by_steps_or_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("raylearner.run.checkpointing.time.monotonic", lambda: now)
    saver = make_saver(tmp_path, FakeLearner(), checkpoint_every_steps=3, checkpoint_every_s=10.0)
    assert [saver.is_due(step) for step in (1, 2, 3)] == [False, False, True]
    now = 110.0
    assert saver.is_due(1)
    by_steps = make_saver(tmp_path, FakeLearner(), checkpoint_every_steps=0)
    now = 10_000.0
    assert not by_steps.is_due(1)


async def test_ranks_hash_their_own_files_and_the_manifest_has_every_hash(tmp_path: Path) -> None:
    async with create_checkpoint(tmp_path, step=1) as partial:
        tensors = partial / "learner" / "tensors"
        tensors.mkdir(parents=True)
        (partial / "model").mkdir()
        for name in ("shard-00001-x", "shard-00002-x"):
            (tensors / f"{name}.safetensors").write_text(name)
        (partial / "model" / "model.safetensors").write_text("model")
        for rank in (0, 1):
            write_hashes(partial, rank=rank)
        (tensors / "shard-00002-x.safetensors").write_text("longer than hashed")
        (partial / "progress.json").write_text("{}")
    files = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())["files"]
    assert len(files) == 4, "the ranks' hashes are no part of it"
    assert list_damage(tmp_path) == []


def test_a_rollback_compares_only_file_sizes(tmp_path: Path) -> None:
    asyncio.run(write(tmp_path, 1))
    asyncio.run(write(tmp_path, 2))
    (tmp_path / "step_000002" / "weights").write_text("weights 3")
    assert found(tmp_path, should_hash=False) == 2
    assert found(tmp_path, should_hash=True) == 1
    (tmp_path / "step_000002" / "weights").write_text("shorter")
    assert found(tmp_path, should_hash=False) == 1


def found(folder: Path, *, should_hash: bool) -> int:
    latest = find_latest(folder, should_hash=should_hash)
    assert latest is not None
    return latest.step


def make_run(folder: Path, *, steps: tuple[int, ...]) -> None:
    """A run directory with two rows of metrics and whole checkpoints of these steps."""
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for step in steps:
        asyncio.run(write(folder / "checkpoints", step))


async def write(checkpoints: Path, step: int) -> None:
    async with create_checkpoint(checkpoints, step=step) as partial:
        (partial / "weights").write_text(f"weights {step}")


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_last_complete_checkpoint_is_used_and_the_corrupt_one_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=(1, 2))
    (folder / "checkpoints" / "step_000002" / "weights").write_text("weights 3")
    (folder / "checkpoints" / "step_000003.partial").mkdir()
    caplog.set_level("INFO")
    with locked_checkpoint(folder, restart_if_no_checkpoint=True) as latest:
        assert latest is not None
        assert latest.step == 1
        with (
            pytest.raises(ConfigError, match="is in use by"),
            locked_checkpoint(folder, restart_if_no_checkpoint=True),
        ):
            pass
    said = caplog.text
    assert "step_000003.partial: half-written" in said
    assert "step_000002: weights is corrupt" in said
    assert f"resuming from {folder / 'checkpoints' / 'step_000001'}" in said
    assert not (tmp_path / "run.1").exists()


def test_without_a_complete_checkpoint_nothing_changes_and_the_error_names_the_way_out(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=(2,))
    (folder / "checkpoints" / "step_000002" / "weights").write_text("half")
    before = content(folder)
    with (
        pytest.raises(ConfigError) as refused,
        locked_checkpoint(folder, restart_if_no_checkpoint=False),
    ):
        pass
    after = content(folder)
    assert after.pop(run_directory.LOCK_FILE)
    assert after == before
    said = str(refused.value)
    assert "2 steps in metrics.jsonl" in said
    assert "step_000002: weights has 4 bytes" in said
    assert f"train {folder / 'config.yaml'} run.dir=ANOTHER" in said
    assert f"train --resume {folder} --restart-if-no-checkpoint" in said


def test_starting_over_keeps_every_byte_under_the_next_number(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in (1, 2):
        make_run(folder, steps=())
        (folder / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        before = content(folder)
        with locked_checkpoint(folder, restart_if_no_checkpoint=True) as latest:
            assert latest is None
            assert content(folder).keys() == {run_directory.LOCK_FILE}
        kept = content(tmp_path / f"run.{number}")
        assert kept.pop(run_directory.LOCK_FILE)
        assert kept == before
        assert not folder.exists()


def resumed(folder: Path, *overrides: str) -> dict[str, tuple[object, object]]:
    """What changes when a run of the minimal configuration in `folder` is resumed with these."""
    if not folder.is_dir():
        folder.mkdir()
        (folder / "minimal.yaml").write_text(MINIMAL)
        config = load([str(folder / "minimal.yaml")], [])
        (folder / "config.yaml").write_text(resolved_yaml(config))
    return changed_keys(folder, load([str(folder / "config.yaml")], overrides))


def test_every_changed_key_is_listed_with_both_values(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert resumed(folder, f"run.dir={folder}") == {}
    changed = resumed(
        folder,
        "replay.groups_per_step=4",
        "learner.learning_rate=2e-6",
        "learner.loss={kind: gspo}",
        "data.system_prompt=Be brief.",
    )
    assert changed["replay.groups_per_step"] == (16, 4)
    assert changed["learner.learning_rate"] == (1e-6, 2e-6)
    assert changed["learner.loss.kind"] == ("decoupled_ppo", "gspo")
    assert changed["data.system_prompt"] == ("null", "Be brief.")
    assert len(list(format_changes(changed))) == len(changed)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.hidden_size=256", "model.hidden_size"),
        ("learner.lora={}", "learner.lora"),
        ("learner.compute_dtype=float64", "learner.compute_dtype"),
        ("learner.vision_tower=frozen", "learner.vision_tower"),
    ],
)
def test_changes_that_a_checkpoint_does_not_allow_are_refused(
    tmp_path: Path, override: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(tmp_path / "run", override, "run.num_steps=7")
    assert f"{key}: " in str(caught.value)
    assert "run.num_steps" not in str(caught.value)


async def test_a_cancelled_wait_leaves_the_write_to_be_finished(tmp_path: Path) -> None:
    learner = FakeLearner()
    saver = make_saver(tmp_path, learner)
    await saver.start(1)
    waiting = asyncio.create_task(saver.start(2))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    learner.may_write.set()
    await saver.wait()
    assert (names(tmp_path), saver.completed) == (["step_000001"], 1)


async def test_after_a_cancellation_a_checkpoint_changes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, finish = threading.Event(), threading.Event(), directory._finish

    def slowly(*arguments: Any) -> None:
        began.set()
        may_end.wait(5)
        finish(*arguments)

    monkeypatch.setattr(directory, "_finish", slowly)
    learner = FakeLearner()
    learner.may_write.set()
    saver = make_saver(tmp_path, learner)
    await saver.start(1)
    await asyncio.to_thread(began.wait, 5)
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    await saver.cancel()
    assert names(tmp_path) == ["step_000001"]
