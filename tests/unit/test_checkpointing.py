"""Checkpoints beside training, with a learner and a replay that tell what is asked of them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from minimal import MINIMAL

from raylearner.config.loader import load
from raylearner.config.report import resolved_yaml
from raylearner.errors import CheckpointError, ConfigError, LearnerDied, LearnerError
from raylearner.learner.checkpoint.directory import create_checkpoint, find_latest, list_damage
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


def make_saver(folder: Path, learner: FakeLearner, **changes: Any) -> CheckpointWriter:
    async def cut() -> None:
        pass

    async def save(folder: str) -> None:
        await asyncio.to_thread(Path(folder).mkdir)

    replay = SimpleNamespace(cut=SimpleNamespace(remote=cut), save=SimpleNamespace(remote=save))
    options: dict[str, Any] = {"keep_last": 2, "should_defer": True, **changes}
    tracer = Tracer("controller", is_enabled=False)
    watchdog = Watchdog(60.0, step=lambda: 0)
    return CheckpointWriter(
        folder,
        learner=learner,  # pyright: ignore[reportArgumentType]
        replay=replay,
        watchdog=watchdog,
        roles=[],
        tracer=tracer,
        **options,
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


def test_the_last_whole_checkpoint_is_taken_and_the_corrupt_one_named(
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
