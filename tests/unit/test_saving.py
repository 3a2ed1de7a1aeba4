"""Checkpoints beside training, with a learner and a replay that tell what is asked of them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylearner.errors import CheckpointError, LearnerDied, LearnerError
from raylearner.learner.checkpoint import checkpoint
from raylearner.observability.spans import Tracer
from raylearner.run.saving import Saver


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


def make_saver(folder: Path, learner: FakeLearner, **changes: Any) -> Saver:
    async def cut() -> None:
        pass

    async def save(folder: str) -> None:
        await asyncio.to_thread(Path(folder).mkdir)

    replay = SimpleNamespace(cut=SimpleNamespace(remote=cut), save=SimpleNamespace(remote=save))
    options: dict[str, Any] = {"keep_last": 2, "should_defer": True, **changes}
    tracer = Tracer("controller", is_enabled=False)
    return Saver(folder, learner=learner, replay=replay, tracer=tracer, **options)  # pyright: ignore[reportArgumentType]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_training_goes_on_while_the_copy_is_written_and_one_is_in_flight(
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
    assert checkpoint.faults(tmp_path) == []
    assert saver.drain_metrics()["checkpoint/stall_s"] >= 0.04
    await saver.start(3)
    await saver.wait()
    assert names(tmp_path) == ["step_000002", "step_000003"]


async def test_without_deferring_it_is_whole_when_training_goes_on(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, FakeLearner(), should_defer=False)
    await saver.start(1)
    assert (names(tmp_path), checkpoint.faults(tmp_path)) == (["step_000001"], [])
    assert saver.drain_metrics().keys() == {"checkpoint/stall_s", "checkpoint/write_s"}


async def test_a_step_behind_a_corrupt_checkpoint_is_the_one_that_is_kept(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, FakeLearner(), should_defer=False, keep_last=1)
    await saver.start(30)
    (tmp_path / "step_000030" / "number").write_text("corrupt")
    await saver.start(22)
    assert (names(tmp_path), checkpoint.faults(tmp_path)) == (["step_000022"], [])


@pytest.mark.parametrize(
    ("should_defer", "error"),
    [
        (True, CheckpointError("learner rank 1: OSError: no space left on device")),
        (False, LearnerError("learner rank 1: OSError: no space left on device")),
    ],
)
async def test_a_write_that_failed_is_told_with_its_step_and_the_last_whole_one(
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
    assert f"the last other whole checkpoint is {tmp_path / 'step_000001'}" in str(refused.value)


async def test_a_rank_that_died_is_told_as_such_and_what_it_wrote_given_up(tmp_path: Path) -> None:
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
    assert checkpoint.latest(tmp_path) is None
