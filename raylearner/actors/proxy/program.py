"""Agent programs, each of which plays a complete episode: a Python function, or a command line."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from raylearner import network
from raylearner.config.environment import PROGRAM_KEYWORDS, OpenAiProxy
from raylearner.config.section import load_reference
from raylearner.data.dialogue import wire
from raylearner.errors import EnvironmentFault
from raylearner.text import dump_json, encodable
from raylearner.types import Prompt
from raylearner.user_code import host
from raylearner.user_code.frames import describe

OUTPUT_BYTES = 1 << 20
"""Maximum bytes of each stream of a command, and characters of a function's answer; the rest is
dropped."""
SHOWN_CHARACTERS = 2000
"""Maximum characters of the error stream that a failure quotes, from the end."""
PIPE_GRACE_S = 5.0
"""Maximum wait for the rest of the output once a command and its children are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The input of a program: the prompt, the address to call, and the key of this episode."""

    prompt: Prompt
    base_url: str
    api_key: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [wire(message) for message in self.prompt.messages]


class Program(Protocol):
    """Plays one episode. Cancelled at its time limit; raises `EnvironmentFault` for a failure.

    `str` returns its name in error messages.
    """

    async def run(self, task: Task) -> str | None:
        """Return the answer; None if the policy's last turn is the answer."""
        ...


def make_program(config: OpenAiProxy) -> Program:
    """Raises `ConfigError` for a function that cannot be imported."""
    if config.program is not None:
        return FunctionProgram(config.program, config.arguments)
    return CommandProgram(config.command, answers_on_stdout=config.answer_from == "stdout")


class FunctionProgram:
    """A custom function, run by the host of user code: async on its loop, sync in a thread.

    Its episode's time limit cancels it; the key of one that keeps running is void."""

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        self._function = load_reference(path)
        self._arguments = arguments
        self._name = f"program {path}"

    def __str__(self) -> str:
        return self._name

    async def run(self, task: Task) -> str | None:
        given = (task.base_url, task.api_key, task.messages, dict(task.prompt.columns))
        keywords = dict(zip(PROGRAM_KEYWORDS, given, strict=True)) | self._arguments
        try:
            answer = await host.shared().call(
                partial(self._function, **keywords), name=self._name, timeout_s=None
            )
        except EnvironmentFault:
            raise
        except host.CallFailed as error:
            raise EnvironmentFault(f"{self._name} {error}") from error
        except Exception as error:
            raise EnvironmentFault(f"{self._name} {describe(error)}") from error
        if answer is not None and not isinstance(answer, str):
            raise EnvironmentFault(
                f"the program returned {type(answer).__name__}; expected a string or None"
            )
        return None if answer is None else encodable(answer[:OUTPUT_BYTES])


class CommandProgram:
    """A command line in its own process session; all its processes end with the episode."""

    def __init__(self, command: Sequence[str], *, answers_on_stdout: bool) -> None:
        self._command = tuple(command)
        self._answers_on_stdout = answers_on_stdout

    def __str__(self) -> str:
        return f"program {self._command[0]}"

    async def run(self, task: Task) -> str | None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={
                    **os.environ,
                    **network.direct(os.environ, network.host_of(task.base_url)),
                    "OPENAI_BASE_URL": task.base_url,
                    "OPENAI_API_KEY": task.api_key,
                },
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFault(f"{self._command[0]!r} cannot be started: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        streams = asyncio.gather(
            _read(process.stdout),
            _read(process.stderr),
            _feed(process.stdin, _serialize(task)),
        )
        try:
            await process.wait()
        finally:
            await asyncio.to_thread(_end, process.pid, task.api_key)
            await process.wait()
            output, errors = await _read_rest(streams)
        if process.returncode:
            raise EnvironmentFault(
                f"the program exited with {process.returncode}: {errors[-SHOWN_CHARACTERS:]}"
            )
        return output.strip() or None if self._answers_on_stdout else None


def _serialize(task: Task) -> bytes:
    content = {
        "prompt_id": task.prompt.prompt_id,
        "messages": task.messages,
        "columns": dict(task.prompt.columns),
    }
    return dump_json(content).encode()


async def _feed(stdin: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
        stdin.write(content)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _read(stream: asyncio.StreamReader) -> str:
    """Read to the end, so that the program never waits; return the first `OUTPUT_BYTES`."""
    kept = bytearray()
    while part := await stream.read(1 << 16):
        kept += part[: OUTPUT_BYTES - len(kept)]
    return kept.decode(errors="replace")


async def _read_rest(streams: "asyncio.Future[tuple[str, str, None]]") -> tuple[str, str]:
    """Return the output; empty if a process that escaped still holds the streams."""
    try:
        async with asyncio.timeout(PIPE_GRACE_S):
            output, errors, _ = await streams
    except TimeoutError:
        return "", ""
    return output, errors


def _end(pid: int, api_key: str) -> None:
    """Kill the program, its process group, its descendants, and all processes with the episode's key."""
    found = _find_descendants(pid) | _find_by_key(api_key)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for other in found - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(other, signal.SIGKILL)


def _find_descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _find_by_key(api_key: str) -> set[int]:
    """Return processes started with the key in their environment, in any session."""
    mark = f"OPENAI_API_KEY={api_key}".encode()
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                found.add(int(path.parent.name))
    return found
