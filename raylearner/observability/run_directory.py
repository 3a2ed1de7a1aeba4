"""Paths of run directories, and the lock by which one run at a time writes into each."""

import errno
import fcntl
import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from raylearner import leftovers
from raylearner.config.schema import RunSection
from raylearner.errors import ConfigError, summary

logger = logging.getLogger(__name__)

JOB_FILES = "working_dir_files"
"""Part of the path to which Ray unpacks a job's working directory, which it deletes after the job."""
LOCK_FILE = "run.lock"
HOLDER_FILE = "run.holder"
"""Replaces the lock on file systems without `flock`: it exists while its process uses the directory."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors by which file systems report that they do not support `flock`."""
FAILURES_FILE = "failures.jsonl"
"""The first failed episode of each kind, with its cause."""
RESTART_OPTION = "--restart-if-no-checkpoint"
"""The option to start over if a run cannot be resumed."""


def resolve(path: Path) -> Path:
    """Return `path`, moved to `~/raylearner` if it is relative in the unpacked files of a Ray job."""
    if path.is_absolute() or JOB_FILES not in Path.cwd().parts:
        return path
    return Path.home() / "raylearner" / path


def name_new(run: RunSection) -> Path:
    """Return `run.dir`, or `runs/<name>-<time>` if it is not set."""
    return Path(run.dir or f"runs/{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def check_new(folder: Path) -> None:
    """Raise `ConfigError` if the directory exists, with its owner if it is in use: that needs `--resume`."""
    if folder.exists():
        _check_unlocked(folder)
        raise ConfigError(
            f"run.dir: {str(folder)!r} already exists; choose another, or resume the run with "
            f"--resume {folder}"
        )


def check_writable(folder: Path) -> None:
    """Raise `ConfigError` if `folder` cannot be created, judging by its nearest existing parent."""
    parent = next((p for p in folder.absolute().parents if os.path.lexists(p)), Path("/"))
    if not parent.is_dir():
        raise ConfigError(
            f"run.dir: {str(folder)!r} is in {str(parent)!r}, which is not a directory"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir: {str(folder)!r} is in {str(parent)!r}, which is not writable")


def _check_unlocked(folder: Path) -> None:
    """Raise `ConfigError` with the owner if another process has locked `folder`."""
    try:
        with (folder / LOCK_FILE).open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(_in_use(folder, file)) from error
    except OSError:  # missing or unreadable, so the owner is unknown
        return


def is_in_use(folder: Path) -> bool:
    """Return whether a process has locked `folder`."""
    try:
        _check_unlocked(folder)
    except ConfigError:
        return True
    return False


def _in_use(folder: Path, lock: IO[str]) -> str:
    lock.seek(0)
    holder = lock.read().strip() or "another process"
    return f"{str(folder)!r} is in use by {holder}; wait for it to end, stop it, or choose another directory"


def rename_aside(folder: Path) -> Path:
    """Rename a run directory to the first of `NAME.1`, `NAME.2`, .. that is free, and return its new path."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    folder.rename(aside)
    return aside


@contextmanager
def lock(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Lock `folder` for this process, and create it if `is_new`. The lock ends with the process.

    A new directory with nothing in it but the lock is removed at the end, so that the same command
    can be repeated. Raises `ConfigError` if a new directory already exists, or if the directory cannot be
    written or is locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=not is_new)
    except FileExistsError as error:
        _check_unlocked(folder)
        raise ConfigError(
            f"run.dir: {str(folder)!r} was created by another run meanwhile; choose another"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.dir: {str(folder)!r} cannot be created: {error.strerror}; choose another"
        ) from error
    try:
        file = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise ConfigError(
            f"run.dir: {str(folder)!r} cannot be written: {error.strerror}; choose another"
        ) from error
    with file, ExitStack() as stack:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(_in_use(folder, file)) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ConfigError(
                    f"run.dir: {str(folder)!r} cannot be locked: {error.strerror}; choose another directory"
                ) from error
            stack.enter_context(_held(folder))
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        except OSError as error:
            raise ConfigError(
                f"run.dir: {str(folder)!r} cannot be written: {error.strerror}; free some space, or"
                " choose another"
            ) from error
        try:
            yield
        finally:
            if is_new:
                remove_unused(folder)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a directory of a file system without locks by a file that names this process.

    Raises `ConfigError` if another process holds it. A file of a dead process of this host is replaced.
    """
    path = folder / HOLDER_FILE
    own = f"{socket.gethostname()} {os.getpid()} {leftovers.start_time(os.getpid())}"
    for _ in range(2):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(own)
            break
        except FileExistsError:
            holder = path.read_text(encoding="utf-8")
            if _may_live(holder):
                host, pid, *_ = [*holder.split(), "an unknown host", "?"]
                raise ConfigError(
                    f"{str(folder)!r} is in use by process {pid} on {host}; wait for it to end, stop it, or"
                    f" choose another directory. Its file system has no locks: if that process is gone,"
                    f" remove {path}"
                ) from None
            path.unlink(missing_ok=True)
    else:
        raise ConfigError(
            f"{str(folder)!r} was taken by another run that started at the same time; choose another directory"
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _may_live(holder: str) -> bool:
    """Return whether the process of a holder file may be alive; one of another host may."""
    match holder.split():
        case [host, pid, start] if host == socket.gethostname() and pid.isdigit():
            return str(leftovers.start_time(int(pid))) == start
        case _:
            return True


def remove_unused(folder: Path) -> None:
    """Remove a directory that holds nothing but its lock."""
    try:
        files = list(folder.iterdir())
        if all(path.name in (LOCK_FILE, HOLDER_FILE) for path in files):
            for path in files:
                path.unlink()
            folder.rmdir()
    except FileNotFoundError:  # removed under the run
        return
    except OSError as error:
        logger.warning("%s was not removed: %s", folder, summary(error))
