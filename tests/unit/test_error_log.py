"""Which line of what vLLM logged becomes the cause of an engine's failure."""

import json
import logging.config
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylearner import leftovers
from raylearner.actors.engines import vllm_process
from raylearner.actors.engines.vllm_process import ErrorLog
from raylearner.errors import CompilationError, EngineError


@pytest.fixture
def log() -> Iterator[ErrorLog]:
    log = ErrorLog()
    logging.config.dictConfig(json.loads(Path(log.configuration()).read_text()))
    yield log
    logging.getLogger("vllm").handlers.clear()
    log.remove()


def log_failure(message: str) -> None:
    try:
        raise ValueError(message)
    except ValueError:
        logging.getLogger("vllm.worker").exception("WorkerProc failed.")


POINTING = RuntimeError("Engine core initialization failed. See root cause above.")


def test_an_error_that_points_to_the_log_gets_the_first_exception_logged(log: ErrorLog) -> None:
    log_failure("no tensor of that name")
    log_failure("worker died")
    assert log.cause(POINTING) == "ValueError: no tensor of that name"


def test_an_error_that_tells_its_cause_keeps_it(log: ErrorLog) -> None:
    log_failure("something else")
    assert log.cause(OSError("no such model")) == "OSError: no such model"
    assert log.cause(EngineError("refused")) == "refused"


def test_what_was_logged_before_the_last_failure_is_no_cause(log: ErrorLog) -> None:
    log_failure("an old one")
    log.cause(EngineError("refused"))
    assert log.cause(POINTING) == f"RuntimeError: {POINTING}"
    log_failure("a new one")
    assert log.cause(POINTING) == "ValueError: a new one"


def test_the_error_about_a_dead_core_is_not_reported_as_the_cause(log: ErrorLog) -> None:
    class EngineDeadError(Exception):
        """Named as vLLM's."""

    gone = EngineDeadError("EngineCore encountered an issue. See stack trace for the root cause.")
    logging.getLogger("vllm.engine").error("vllm.v1.engine.exceptions.EngineDeadError: %s", gone)
    assert "EngineDeadError" not in log.cause(gone)
    log_failure("out of blocks")
    assert log.cause(gone) == "ValueError: out of blocks"


def test_a_logged_traceback_names_the_type_of_its_error(log: ErrorLog) -> None:
    log_failure("CompilationError: of another type")
    assert not log.has_logged(CompilationError)
    try:
        try:
            raise ValueError("520 tokens do not fit")
        except ValueError as error:
            raise CompilationError("no graphs") from error
    except CompilationError:
        logging.getLogger("vllm.worker").exception("EngineCore failed to start.")
    assert log.has_logged(CompilationError)
    assert not log.has_logged(EngineError)


def test_an_assertion_without_a_message_is_told_by_its_place(log: ErrorLog) -> None:
    try:
        assert not POINTING
    except AssertionError as error:
        error.args = ()
        logging.getLogger("vllm.worker").exception("WorkerProc failed.")
    cause = log.cause(POINTING)
    assert cause.startswith('AssertionError at File "')
    assert "test_error_log.py" in cause


def test_sockets_are_created_in_the_folder_that_is_removed_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(vllm_process.SOCKETS_VARIABLE, raising=False)
    for _ in range(2):  # a second engine in the same process has its own
        log = vllm_process.ErrorLog()
        log.hold_sockets()
        folder = Path(os.environ[vllm_process.SOCKETS_VARIABLE])
        assert folder.is_dir()
        log.remove()
        assert not folder.exists()
    monkeypatch.setenv(vllm_process.SOCKETS_VARIABLE, "/tmp")
    log = vllm_process.ErrorLog()
    log.hold_sockets()
    log.remove()
    assert os.environ[vllm_process.SOCKETS_VARIABLE] == "/tmp"


def test_sockets_are_in_shared_memory_where_the_path_would_be_too_long_and_are_swept_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.delenv(vllm_process.SOCKETS_VARIABLE, raising=False)
    monkeypatch.setattr(vllm_process.tempfile, "tempdir", str(deep))
    log = vllm_process.ErrorLog()
    log.hold_sockets()
    folder = Path(os.environ[vllm_process.SOCKETS_VARIABLE])
    assert folder.parent == leftovers.SHARED_MEMORY
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / ("s" * vllm_process.SOCKET_NAME_BYTES)))
    assert list(deep.iterdir()) == []
    monkeypatch.setattr(leftovers, "start_time", lambda pid: 0)  # as if this process had ended
    assert folder in [leftover.path for leftover in leftovers.find()]
    log.remove()
    assert not folder.exists()
