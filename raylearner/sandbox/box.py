"""One started sandbox: its process, its pipes, and its end.

`Box` starts calls; `Call` is a running one. Leaving the context of `Box.open` leaves no process and
no descriptor behind.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from raylearner import leftovers
from raylearner.config.environment import SandboxSection
from raylearner.errors import ConfigError
from raylearner.sandbox import bubblewrap, seccomp
from raylearner.sandbox import supervisor as sandbox_supervisor

KILL_GRACE_S = 5.0
"""A killed box has ended by then, or bubblewrap itself is killed."""

_users = itertools.count()


@dataclass(slots=True, kw_only=True)
class Call:
    """A running box: its process and the reading ends of its three pipes."""

    is_isolated: bool
    process: subprocess.Popen[bytes]
    pidfd: int
    stdout: int
    stderr: int
    status: int

    def kill(self) -> None:
        """End the first process of the box, which exits once the kernel has killed the rest."""
        if self.process.poll() is not None:
            return
        if not self.is_isolated:
            self.process.terminate()
            return
        first = _children(self.process.pid)
        for pid in first or [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill all processes of the call; blocks for the milliseconds that a kill takes."""
        self.kill()
        try:
            self.process.wait(KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Options for the start of a call."""

    limits: SandboxSection
    supervisor_limits: dict[str, float]
    program: str | None
    """The bubblewrap binary; None runs unprotected."""
    interpreter: bubblewrap.Interpreter | None
    filter: bytes | None
    users: bubblewrap.UserNamespace | None
    """Present: each call runs as another user, so that the kernel counts its processes alone."""

    @classmethod
    def of(cls, limits: SandboxSection) -> "Box":
        is_isolated = limits.isolation == "bubblewrap"
        if is_isolated and not sys.platform.startswith("linux"):
            raise ConfigError("sandbox.isolation: bubblewrap needs Linux")
        return cls(
            limits=limits,
            supervisor_limits={
                "wall_s": limits.wall_s,
                "cpu_s": limits.cpu_s,
                "memory_bytes": limits.memory_bytes,
                "file_bytes": limits.file_bytes,
                "files": limits.max_files,
                "processes": limits.max_processes,
            },
            program=bubblewrap.find_bubblewrap() if is_isolated else None,
            interpreter=_interpreter(limits.python, limits.packages) if is_isolated else None,
            filter=seccomp.program() if is_isolated else None,
            users=bubblewrap.user_namespace() if is_isolated else None,
        )

    @contextlib.contextmanager
    def open(self, code: bytes, stdin: bytes) -> Generator[Call]:
        """Starts one call; at exit it is dead, reaped and its descriptors are closed."""
        with contextlib.ExitStack() as stack:
            given = _memory_file(stack, stdin)
            readers, writers = zip(*(_pipe(stack) for _ in range(3)), strict=True)
            try:
                user = self._next_user(writers[:2])
                arguments, kept, folder = self._arguments(
                    stack, code, status_fd=writers[2], user=user
                )
                process = subprocess.Popen(
                    arguments,
                    stdin=given,
                    stdout=writers[0],
                    stderr=writers[1],
                    pass_fds=[*kept, writers[2]],
                    cwd=folder,
                    env=self._environment(folder),
                    start_new_session=True,
                )
            finally:
                for writer in writers:
                    os.close(writer)
            pidfd = os.pidfd_open(process.pid)
            stack.callback(os.close, pidfd)
            call = Call(
                is_isolated=self.program is not None,
                process=process,
                pidfd=pidfd,
                stdout=readers[0],
                stderr=readers[1],
                status=readers[2],
            )
            stack.callback(call.end)
            yield call

    def _arguments(
        self, stack: contextlib.ExitStack, code: bytes, *, status_fd: int, user: int
    ) -> tuple[list[str], list[int], str | None]:
        script = str(Path(sandbox_supervisor.__file__).resolve())
        if self.program is None or self.interpreter is None:
            folder = tempfile.mkdtemp(prefix=leftovers.prefix("unprotected"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            main = Path(folder, "main.py")
            main.write_bytes(code)
            python, head, kept = self.limits.python or sys.executable, [], []
        else:
            folder, main = None, bubblewrap.CODE
            kept = [_memory_file(stack, code)]
            if self.filter is not None:
                kept.append(_memory_file(stack, self.filter))
            head = bubblewrap.command(
                self.program,
                self.interpreter,
                supervisor=script,
                code_fd=kept[0],
                filter_fd=kept[1] if self.filter is not None else None,
                namespace_fd=self.users.descriptor if self.users else None,
                folder_bytes=self.limits.folder_bytes,
            )
            if self.users is not None:
                kept.append(self.users.descriptor)
            python, script = self.interpreter.path, bubblewrap.SUPERVISOR
        limits = json.dumps({**self.supervisor_limits, "user": user})
        tail = [python, "-I", "-S", script, limits, str(status_fd), "--"]
        return [*head, *tail, python, "-s", str(main)], kept, folder

    def _next_user(self, streams: Iterable[int]) -> int:
        """Lend an unused user id; it owns its streams, so that it may reopen /dev/stdout."""
        if self.users is None:
            return 0
        user = next(_users) % bubblewrap.NUM_USERS
        for stream in streams:
            os.fchown(stream, self.users.first_user + user, -1)
        return user + 1

    def _environment(self, folder: str | None) -> dict[str, str]:
        if folder is None:
            return {}
        kept = {k: v for k, v in bubblewrap.ENVIRONMENT.items() if k.startswith(("LANG", "PYTHON"))}
        packages = os.pathsep.join(self.limits.packages)
        return {**kept, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": packages}


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Open a pipe whose reading end does not block and is closed with the stack."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    stack.callback(os.close, reader)
    return reader, writer


def _memory_file(stack: contextlib.ExitStack, content: bytes) -> int:
    """Open an anonymous file at its start; each call has its own, since readers share the
    offset."""
    descriptor = os.memfd_create("raylearner", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _children(pid: int) -> list[int]:
    """Return the processes that `pid` started; empty where the kernel does not report them."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


@lru_cache(maxsize=8)
def _interpreter(python: str | None, packages: tuple[str, ...]) -> bubblewrap.Interpreter:
    return bubblewrap.find_interpreter(python, packages)
