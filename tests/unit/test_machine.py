"""Checks of a machine before a run starts: socket paths, disks, deadlines, and who uses a directory."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from minimal import MINIMAL

from raylearner import leftovers
from raylearner.config.schema import RunConfig, RunSection
from raylearner.errors import ConfigError
from raylearner.learner.checkpoint.directory import create_checkpoint
from raylearner.observability import run_directory
from raylearner.run import machine, training
from raylearner.run.machine import stop_time_s

LONG = "/tmp/slurm_jobdir/1234567/partition-with-a-long-name/tmp.t0016/another-level"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    for variable in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR", "VLLM_RPC_BASE_PATH"):
        monkeypatch.delenv(variable, raising=False)
    return RunConfig.model_validate(yaml.safe_load(MINIMAL))


def test_a_temporary_directory_too_long_for_sockets_is_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.check_socket_paths(config)
    monkeypatch.setenv("TMPDIR", LONG)
    with pytest.raises(ConfigError, match="TMPDIR") as caught:
        machine.check_socket_paths(config)
    assert f"{len(LONG)} bytes" in str(caught.value)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    machine.check_socket_paths(config)
    monkeypatch.setenv("RAY_TMPDIR", LONG)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    machine.check_socket_paths(config)


def test_the_longest_path_that_is_allowed_holds_rays_sockets(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.utils import validate_socket_filepath

    room = leftovers.MAX_SOCKET_PATH_BYTES - len(machine.RAY_SOCKET) - 1
    folder = "/" + "d" * (room - 1)
    monkeypatch.setenv("RAY_TMPDIR", folder)
    machine.check_socket_paths(config)
    validate_socket_filepath(f"{folder}/{machine.RAY_SOCKET}")
    monkeypatch.setenv("RAY_TMPDIR", f"{folder}d")
    with pytest.raises(ConfigError):
        machine.check_socket_paths(config)


def test_a_folder_set_for_vllms_sockets_that_is_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    assert machine.socket_path_errors(has_vllm=True) == []
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", LONG)
    assert machine.socket_path_errors(has_vllm=False) == []
    (error,) = machine.socket_path_errors(has_vllm=True)
    assert "VLLM_RPC_BASE_PATH" in error


def test_a_full_disk_is_refused_and_one_nearly_full_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = types.SimpleNamespace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    machine.check_disk_space(tmp_path / "not" / "yet")
    assert "5 MiB are free" in caplog.text
    usage.free = 0
    with pytest.raises(ConfigError, match=r"run\.dir") as caught:
        machine.check_disk_space(tmp_path / "not" / "yet")
    assert str(tmp_path) in str(caught.value)


def test_a_directory_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = (
        "import sys; from pathlib import Path; from raylearner.observability import run_directory\n"
        "with run_directory.lock(Path(sys.argv[1]), is_new=True): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        for refuse in (
            lambda: run_directory.check_new(folder),
            lambda: run_directory.lock(folder, is_new=True).__enter__(),
            lambda: run_directory.lock(folder, is_new=False).__enter__(),
        ):
            with pytest.raises(ConfigError, match=f"process {other.pid} on "):
                refuse()
        other.kill()
    with pytest.raises(ConfigError, match="already exists"):
        run_directory.check_new(folder)
    with run_directory.lock(folder, is_new=False):  # a process that is gone holds nothing
        pass


def test_a_new_directory_that_was_not_used_is_gone_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="no room"), run_directory.lock(folder, is_new=True):
        raise ConfigError("no room")
    assert not folder.exists()
    with run_directory.lock(folder, is_new=True):
        (folder / "config.yaml").write_text("")
    assert folder.is_dir()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / run_directory.LOCK_FILE).mkdir()
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        run_directory.lock(tmp_path, is_new=False),
    ):
        pass


async def test_a_resume_with_nothing_left_ends_before_anything_starts(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with create_checkpoint(tmp_path / "checkpoints", step=config.run.num_steps) as partial:
        (partial / "weights").write_text("w")
    section = config.run.model_copy(update={"dir": str(tmp_path)})
    config = config.model_copy(update={"run": section})
    monkeypatch.setattr(training, "_prepare_data", lambda _: 1 / 0)
    caplog.set_level("INFO")
    training.run(config, resume=tmp_path)
    assert "nothing is left to do" in caplog.text
    assert str(tmp_path) in caplog.text
    longer = section.model_copy(update={"num_steps": section.num_steps + 1})
    with pytest.raises(ZeroDivisionError):
        training.run(config.model_copy(update={"run": longer}), resume=tmp_path)
    (tmp_path / "checkpoints" / f"step_{section.num_steps:06d}" / "weights").write_text("v")
    with pytest.raises(ZeroDivisionError):
        training.run(config, resume=tmp_path)


@pytest.mark.parametrize(
    ("deadline", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"SLURM_JOB_END_TIME": "1000000"}, 1000000 - 300),
        (None, {"SLURM_JOB_END_TIME": "1", "RAYLEARNER_DEADLINE": "2000000"}, 2000000 - 300),
        ("1970-01-12T15:46:40+02:00", {"RAYLEARNER_DEADLINE": "5"}, 1000000 - 300),
        ("1970-01-12T13:46:40Z", {}, 1000000 - 300),
        (None, {"RAYLEARNER_DEADLINE": ""}, None),
    ],
)
def test_the_first_time_given_counts(
    deadline: str | None, environment: dict[str, str], expected: float | None
) -> None:
    assert stop_time_s(RunSection(deadline=deadline), environment) == expected


def test_the_margin_is_configured() -> None:
    run = RunSection(deadline="1000", deadline_margin_s=60)
    assert stop_time_s(run, {}) == 940


@pytest.mark.parametrize("text", ["tomorrow", "nan", "18:00"])
def test_what_is_no_time_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.deadline"):
        stop_time_s(RunSection(deadline=text), {})
    with pytest.raises(ConfigError, match="RAYLEARNER_DEADLINE: "):
        stop_time_s(RunSection(), {"RAYLEARNER_DEADLINE": text})


def _without_locks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_holder_file_replaces_the_lock_where_flock_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    _without_locks(monkeypatch, code)
    folder = tmp_path / "run"
    holder = folder / run_directory.HOLDER_FILE
    with run_directory.lock(folder, is_new=True):
        (folder / "config.yaml").touch()
        with (
            pytest.raises(ConfigError, match=str(os.getpid())),
            run_directory.lock(folder, is_new=False),
        ):
            pass
    assert not holder.exists()
    holder.write_text(
        f"{socket.gethostname()} {os.getpid()} 1"
    )  # the id was given to another process
    with run_directory.lock(folder, is_new=False):
        assert holder.exists()
    holder.write_text("another-host 17 1")
    with (
        pytest.raises(ConfigError, match="another-host"),
        run_directory.lock(folder, is_new=False),
    ):
        pass
    assert holder.read_text() == "another-host 17 1"


def test_a_directory_that_cannot_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_locks(monkeypatch, errno.EIO)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"run\.dir"), run_directory.lock(folder, is_new=True):
        pass
