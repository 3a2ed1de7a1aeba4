"""Where a run's directory lies, and that one run at a time writes into it."""

import fcntl
import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raylearner.config.schema import RunSection
from raylearner.errors import ConfigError, summary

logger = logging.getLogger(__name__)

JOB_FILES = "working_dir_files"
"""Part of the path that Ray unpacks a job's working directory to; it is deleted after the job."""
LOCK_FILE = "run.lock"
FAILURES_FILE = "failures.jsonl"
"""The first failed episode of each kind, with its cause."""
RESTART_OPTION = "--restart-if-no-checkpoint"
"""The option of a resume that may find nothing to go on from."""


def durable(path: Path) -> Path:
    """`path`, but under `~/raylearner` where it is relative to the unpacked files of a Ray job."""
    if path.is_absolute() or JOB_FILES not in Path.cwd().parts:
        return path
    return Path.home() / "raylearner" / path


def named(run: RunSection) -> Path:
    """`run.dir`, or `runs/<name>-<time>` where that is not set."""
    return Path(run.dir or f"runs/{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def refuse_existing(folder: Path) -> None:
    """Raises `ConfigError`: only `--resume` goes on in a directory that exists.

    One that a run is using is named with its owner.
    """
    if folder.exists():
        _refuse_held(folder)
        raise ConfigError(
            f"run.dir: {str(folder)!r} exists already; name another, or go on with "
            f"--resume {folder}"
        )


def refuse_unwritable(folder: Path) -> None:
    """Raises `ConfigError` where `folder` could not be made, as far as the folders above it tell."""
    parent = next((p for p in folder.absolute().parents if os.path.lexists(p)), Path("/"))
    if not parent.is_dir():
        raise ConfigError(
            f"run.dir: {str(folder)!r} lies in {str(parent)!r}, which is no directory"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.dir: {str(folder)!r} lies in {str(parent)!r}, which is not writable"
        )


def _refuse_held(folder: Path) -> None:
    """Raises `ConfigError` with the owner where another process holds `folder`."""
    try:
        with (folder / LOCK_FILE).open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(_in_use(folder, file)) from error
    except OSError:  # no such file, or not ours to read: nobody that we could name
        return


def _in_use(folder: Path, lock: IO[str]) -> str:
    lock.seek(0)
    holder = lock.read().strip() or "another process"
    return f"{str(folder)!r} is in use by {holder}; wait for its end, stop it, or name another"


def set_aside(folder: Path) -> Path:
    """Renames a run directory, with every byte in it, to the first of `NAME.1`, `NAME.2`, .. that is free."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    folder.rename(aside)
    return aside


@contextmanager
def claimed(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Holds `folder` for this process; made first where `is_new`. A lock dies with its process.

    A new directory that holds nothing at the end but its lock is removed, so that the same command
    can be given again. Raises `ConfigError` where it exists although it should be new, where it
    cannot be written, or where another run has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=not is_new)
    except FileExistsError as error:
        _refuse_held(folder)
        raise ConfigError(
            f"run.dir: {str(folder)!r} was made by another run meanwhile; name another"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.dir: {str(folder)!r} cannot be made: {error.strerror}; name another"
        ) from error
    try:
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise ConfigError(
            f"run.dir: {str(folder)!r} cannot be written: {error.strerror}; name another"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(_in_use(folder, file)) from error
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:
            raise ConfigError(
                f"run.dir: {str(folder)!r} cannot be written: {error.strerror}; free some space, or"
                " name another"
            ) from error
        try:
            yield
        finally:
            if is_new:
                _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    try:
        if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
            folder.rmdir()
    except FileNotFoundError:  # removed under the run
        return
    except OSError as error:
        logger.warning("%s is left behind: %s", folder, summary(error))
