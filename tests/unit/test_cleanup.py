"""How a run ends: every part is closed, the first cause stands, and the system's refusals are one line."""

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from raylearner.cleanup import clean_up, clean_up_now
from raylearner.config.schema import ObservabilitySection
from raylearner.errors import ConfigError, LearnerError, StartError, naming, summary
from raylearner.observability import logs
from raylearner.observability.recorder import Recorder


def failing(error: Exception, made: list[str], name: str) -> Any:
    async def step() -> None:
        made.append(name)
        raise error

    return step


async def test_every_step_is_made_and_the_first_failure_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[str] = []
    with pytest.raises(ValueError, match="first"):
        await clean_up(
            None,
            lambda: made.append("a"),
            failing(ValueError("first"), made, "b"),
            failing(OSError(errno.ENOSPC, "No space left", "x"), made, "c"),
            lambda: made.append("d"),
        )
    assert made == ["a", "b", "c", "d"]
    assert [record.getMessage() for record in caplog.records] == [
        "while ending the run: x: No space left"
    ]


def test_failures_behind_a_cause_are_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    made: list[int] = []
    clean_up_now(KeyError("cause"), lambda: 1 / 0, lambda: made.append(1))
    assert made == [1]
    assert "ZeroDivisionError: division by zero" in caplog.text


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "/a/b: No space left on device"),
        (OSError(errno.EROFS, "Read-only", "/a", None, "/b"), "/a -> /b: Read-only"),
        (ExceptionGroup("", [LearnerError("one"), KeyError("two")]), "one"),
        (RuntimeError("a\nlast"), "RuntimeError: last"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_the_cause_of_an_error_is_one_line_with_the_path(error: Exception, line: str) -> None:
    assert summary(error) == line


def test_a_write_that_fails_names_its_file() -> None:
    with pytest.raises(OSError, match="here") as caught, naming("here"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (caught.value.filename, caught.value.errno) == ("here", errno.ENOSPC)
    with pytest.raises(FileNotFoundError) as caught, naming("here"):
        Path("/none/such").read_text()
    assert caught.value.filename == "/none/such"


def test_a_full_disk_names_the_file_and_the_log_reports_itself_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full takes no byte: a real error of the system for each kind of file."""
    run = tmp_path / "run"
    config = ObservabilitySection(tensorboard=False, trace=False)
    recorder = Recorder(run, config, num_steps=1)
    full = Path("/dev/full")
    recorder._metrics._file.close()
    recorder._metrics._file = full.open("a")
    assert isinstance(recorder._log_handler, logs.LogFile)
    recorder._log_handler.setStream(full.open("a")).close()
    logging.getLogger("raylearner").warning("one")
    logging.getLogger("raylearner").warning("two")
    with pytest.raises(OSError, match="No space left") as caught:
        recorder.step(1, {"learner/loss": 1.0})
    assert caught.value.filename == str(run / "metrics.jsonl")
    with pytest.raises(OSError, match="No space left"):
        recorder.close()
    assert capsys.readouterr().err.count("log.txt: ") == 1


def test_a_run_directory_that_is_removed_ends_the_run_at_its_next_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recorder = Recorder(run, ObservabilitySection(tensorboard=False, trace=False), num_steps=2)
    recorder.step(1, {})
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError) as caught:
        recorder.step(2, {})
    recorder.close()
    assert caught.value.filename == str(run / "metrics.jsonl")
    assert not run.exists()


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylearner.config.schema import ClusterSection
    from raylearner.run import cluster

    def refuse(**_: object) -> None:
        raise RuntimeError("Traceback ...\nthe node timed out")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(StartError) as caught:
        cluster.connect(ClusterSection())
    assert caught.value.__cause__ is None
    assert "RuntimeError: the node timed out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stop_of_the_system_leaves_the_command_line_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from raylearner.cli import exits

    error = OSError(errno.ENOSPC, "No space left on device", "/runs/x\x1b[2J")
    error.__cause__ = ConfigError("inner")
    with pytest.raises(typer.Exit) as left, exits.exit_codes():
        raise error
    assert left.value.exit_code == exits.FAILED
    assert capsys.readouterr().err == ("the run failed: /runs/x\\x1b[2J: No space left on device\n")
