"""Runs Python written by a model in a separate box, within limits for the complete call.

Each call gets fresh namespaces (bubblewrap), an empty working directory in memory, an empty
environment and no network; `supervisor.py` is its first process and counts the whole tree. No
process outlives the call. Waits for: a free place among `max_concurrent`, then the program.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from raylearner.config.environment import SandboxSection
from raylearner.errors import ConfigError, ToolError
from raylearner.sandbox.box import Box, Call
from raylearner.text import encodable

MAX_CODE_BYTES = 1 << 20
MAX_STDIN_BYTES = 16 << 20
GRACE_S = 5.0
"""The supervisor keeps time; if it does not end that long after the limit, it is killed."""
PROBE_TIMEOUT_S = 60.0
READ_BYTES = 1 << 16

log = logging.getLogger(__name__)


class SandboxStatus(StrEnum):
    """Outcome of a call: exit with code 0, another exit, or a limit."""

    OK = "ok"
    ERROR = "error"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Output and outcome of a program; at a limit the return code is that of a kill."""

    status: SandboxStatus
    stdout: str
    stderr: str
    return_code: int
    wall_s: float
    limit_hit: str | None = None
    """`wall`, `cpu`, `memory`, `processes`, `files`, `output` or `code`."""


class Sandbox:
    """Runs programs by one command line; no call leaves anything behind.

    Raises `ConfigError` where isolation is not available, tested by a real call. `run` raises
    `ToolError` when the box itself fails; every result of a program is a `SandboxResult`.
    """

    def __init__(self, limits: SandboxSection | None = None) -> None:
        self.limits = limits or SandboxSection()
        self._places = asyncio.Semaphore(
            self.limits.max_concurrent or 2 * len(os.sched_getaffinity(0))
        )
        self._box = Box.of(self.limits)
        if self.limits.isolation == "none":
            log.warning(
                "sandbox.isolation is none: code written by the model runs with the rights of "
                "user %d, has access to this machine's files and network, and can end the run",
                os.getuid(),
            )
        else:
            _probe(self.limits.python, self.limits.packages)

    async def run(self, code: str, *, stdin: str = "") -> SandboxResult:
        source, given = encodable(code).encode(), encodable(stdin).encode()
        if len(source) > MAX_CODE_BYTES or len(given) > MAX_STDIN_BYTES:
            return _at_limit("code", _Streams(), 0.0)
        async with self._places:
            with self._box.open(source, given) as call:
                started = time.monotonic()
                return await _watch(call, self.limits, started)


@dataclass(slots=True)
class _Streams:
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    @property
    def num_bytes(self) -> int:
        return len(self.stdout) + len(self.stderr)


async def _watch(call: Call, limits: SandboxSection, started: float) -> SandboxResult:
    """Reads both streams until the box is gone; kills it at too much output or far too late."""
    loop = asyncio.get_running_loop()
    streams, gone, limit = _Streams(), loop.create_future(), None

    def read(descriptor: int, into: bytearray) -> None:
        nonlocal limit
        if not _read_into(descriptor, into, limits.output_bytes + 1 - streams.num_bytes):
            loop.remove_reader(descriptor)
        if streams.num_bytes > limits.output_bytes and limit is None:
            limit = "output"
            loop.remove_reader(call.stdout)
            loop.remove_reader(call.stderr)
            call.kill()

    def ended() -> None:
        loop.remove_reader(call.pidfd)
        if not gone.done():
            gone.set_result(None)

    loop.add_reader(call.stdout, read, call.stdout, streams.stdout)
    loop.add_reader(call.stderr, read, call.stderr, streams.stderr)
    loop.add_reader(call.pidfd, ended)
    try:
        async with asyncio.timeout(limits.wall_s + GRACE_S):
            await gone
    except TimeoutError:
        limit = limit or "wall"
        call.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await gone
    finally:
        for descriptor in (call.stdout, call.stderr, call.pidfd):
            loop.remove_reader(descriptor)
    for descriptor, into in ((call.stdout, streams.stdout), (call.stderr, streams.stderr)):
        while limit is None and _read_into(
            descriptor, into, limits.output_bytes + 1 - streams.num_bytes
        ):
            if streams.num_bytes > limits.output_bytes:
                limit = "output"
    wall_s = time.monotonic() - started
    if limit is not None:
        return _at_limit(limit, streams, wall_s, limits)
    return _result(_read_status(call.status), streams, wall_s, limits)


def _result(status: str, streams: _Streams, wall_s: float, limits: SandboxSection) -> SandboxResult:
    word, _, rest = status.partition(" ")
    match word:
        case "exit":
            code = int(rest)
            return SandboxResult(
                status=SandboxStatus.OK if code == 0 else SandboxStatus.ERROR,
                stdout=_decoded(streams.stdout),
                stderr=_decoded(streams.stderr),
                return_code=code,
                wall_s=wall_s,
            )
        case "limit":
            return _at_limit(rest, streams, wall_s, limits)
        case _:
            output = _decoded(streams.stderr).strip()[-500:]
            raise ToolError(f"the sandbox itself failed: {rest or output or 'no reason given'}")


def _at_limit(
    name: str, streams: _Streams, wall_s: float, limits: SandboxSection | None = None
) -> SandboxResult:
    return SandboxResult(
        status=SandboxStatus.LIMIT,
        stdout=_decoded(streams.stdout),
        stderr=f"killed: {_describe_limit(name, limits)}\n{_decoded(streams.stderr)}",
        return_code=-signal.SIGKILL,
        wall_s=wall_s,
        limit_hit=name,
    )


def _describe_limit(name: str, limits: SandboxSection | None) -> str:
    if limits is None:
        return f"code or input too long, at most {MAX_CODE_BYTES} and {MAX_STDIN_BYTES} bytes"
    return {
        "wall": f"ran longer than {limits.wall_s:g} s",
        "cpu": f"used more than {limits.cpu_s:g} s of CPU time",
        "memory": f"used more than {limits.memory_bytes >> 20} MiB of memory",
        "processes": f"started more than {limits.max_processes} processes and threads",
        "files": f"made more than {limits.max_files} files",
        "output": f"wrote more than {limits.output_bytes} bytes of output",
    }.get(name, name)


def _read_into(descriptor: int, into: bytearray, most: int) -> bool:
    """Append the available bytes, `most` at most; return False at the end of the stream or of the
    room."""
    if most <= 0:
        return False
    try:
        chunk = os.read(descriptor, min(most, READ_BYTES))
    except BlockingIOError:
        return False
    into += chunk
    return bool(chunk)


def _read_status(descriptor: int) -> str:
    try:
        return os.read(descriptor, 4096).decode("utf-8", "replace").partition("\n")[0]
    except BlockingIOError:
        return ""


def _decoded(stream: bytearray) -> str:
    return stream.decode("utf-8", "replace")


_PROBE = """
import os
found = sorted(os.listdir('/'))
assert os.getpid() == 2, f'process {os.getpid()} instead of 2'
assert os.listdir('.') == [], 'the working directory is not empty'
assert not {'etc', 'home', 'root', 'usr', 'var', 'run'} & set(found), f'the host is visible: {found}'
interfaces = [line.split(':')[0].strip() for line in open('/proc/net/dev') if ':' in line]
assert interfaces in ([], ['lo']), f'network: {interfaces}'
for path in ('/x', '/code/x', '/proc/self/comm'):
    try:
        open(path, 'w')
    except OSError:
        continue
    raise AssertionError(f'{path} can be written')
print('isolated')
"""


@lru_cache(maxsize=8)
def _probe(python: str | None, packages: tuple[str, ...]) -> None:
    """Test isolation by a call; raises `ConfigError` unless the program is alone in its
    namespaces."""
    limits = SandboxSection(python=python, packages=packages, wall_s=PROBE_TIMEOUT_S)
    with Box.of(limits).open(_PROBE.encode(), b"") as call:
        try:
            call.process.wait(PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            call.kill()
        output = b"".join(_drained(call.stdout) + _drained(call.stderr)).decode("utf-8", "replace")
        status = _read_status(call.status)
    if output.strip() != "isolated":
        raise ConfigError(
            "sandbox.isolation: bubblewrap cannot isolate here"
            f" ({' '.join((output.strip() or status or 'no answer').split())[-400:]});"
            " it needs user namespaces and an unmasked /proc: allow them on this machine or in its"
            " container, name a code service by url, or set isolation: none, which runs the model's"
            " code unprotected"
        )


def _drained(descriptor: int) -> list[bytes]:
    held = bytearray()
    while _read_into(descriptor, held, READ_BYTES):
        pass
    return [bytes(held)]
