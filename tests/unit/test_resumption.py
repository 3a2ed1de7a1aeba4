"""What `--resume` goes on from, and what it refuses to touch."""

import asyncio
from pathlib import Path

import pytest
from minimal import MINIMAL

from raylearner.config.loader import load
from raylearner.config.report import resolved_yaml
from raylearner.errors import ConfigError
from raylearner.learner.checkpoint import checkpoint
from raylearner.observability import run_directory
from raylearner.run.resumption import changed_keys, described, taken_up


def make_run(folder: Path, *, steps: tuple[int, ...]) -> None:
    """A run directory with two rows of metrics and whole checkpoints of these steps."""
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for step in steps:
        asyncio.run(write(folder / "checkpoints", step))


async def write(checkpoints: Path, step: int) -> None:
    async with checkpoint.writing(checkpoints, step=step) as partial:
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
    with taken_up(folder, or_start_over=True) as latest:
        assert latest is not None
        assert latest.step == 1
        with (
            pytest.raises(ConfigError, match="is in use by"),
            taken_up(folder, or_start_over=True),
        ):
            pass
    said = caplog.text
    assert "step_000003.partial: half-written" in said
    assert "step_000002: weights is corrupt" in said
    assert f"going on from {folder / 'checkpoints' / 'step_000001'}" in said
    assert not (tmp_path / "run.1").exists()


def test_without_a_whole_checkpoint_nothing_is_touched_and_the_way_out_said(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    make_run(folder, steps=(2,))
    (folder / "checkpoints" / "step_000002" / "weights").write_text("half")
    before = content(folder)
    with pytest.raises(ConfigError) as refused, taken_up(folder, or_start_over=False):
        pass
    after = content(folder)
    assert after.pop(run_directory.LOCK_FILE)
    assert after == before
    said = str(refused.value)
    assert "holds no whole checkpoint to go on from, and 2 steps in metrics.jsonl" in said
    assert "step_000002: weights has 4 bytes, not 9" in said
    assert f"train {folder / 'config.yaml'} run.dir=ANOTHER" in said
    assert f"train --resume {folder} --or-start-over" in said


def test_starting_over_keeps_every_byte_under_the_next_number(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in (1, 2):
        make_run(folder, steps=())
        (folder / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        before = content(folder)
        with taken_up(folder, or_start_over=True) as latest:
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
    assert len(list(described(changed))) == len(changed)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.hidden_size=256", "model.hidden_size"),
        ("learner.lora={}", "learner.lora"),
        ("learner.compute_dtype=float64", "learner.compute_dtype"),
        ("learner.vision_tower=frozen", "learner.vision_tower"),
    ],
)
def test_what_a_checkpoint_does_not_let_change_is_refused(
    tmp_path: Path, override: str, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(tmp_path / "run", override, "run.num_steps=7")
    assert f"{key}: " in str(caught.value)
    assert "run.num_steps" not in str(caught.value)
