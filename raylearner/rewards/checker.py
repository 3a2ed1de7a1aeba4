"""Checks of answers in processes of their own, since libraries of symbols and tasks may hang.

Waits for: a free process, then its reply; a process that gives none in time is killed and replaced.
"""

import asyncio
import json
import os
import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from raylearner.errors import RewardError
from raylearner.rewards.checker_process import LENGTH_BYTES

START_TIMEOUT_S = 120.0
"""Longest that a new process may take to import the library behind its checks."""
MAX_REPLY_BYTES = 1 << 20


class CheckFailed(Exception):
    """The check raised, or its process died of it."""


class CheckTimeout(CheckFailed):
    """The check did not end in time."""


class Checker:
    """Owns up to `num_processes` processes, started when first needed, until `close`."""

    def __init__(self, *, library: str, num_processes: int, timeout_s: float) -> None:
        """`library` is imported by each process before its first check."""
        self._library = library
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(num_processes)
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()

    async def check(self, name: str, *arguments: object) -> float | None:
        """The value of a check of `checker_process.CHECKS`.

        Raises `CheckTimeout` when it hangs, `CheckFailed` when it raises or its process dies, and
        `RewardError` when there can be no process.
        """
        async with self._places:
            process = self._idle.pop() if self._idle else await _Process.start(self._library)
            self._running.add(process)
            try:
                reply = await process.ask(name, arguments, timeout_s=self._timeout_s)
            except BaseException:
                await process.kill()
                raise
            finally:
                self._running.discard(process)
            self._idle.append(process)
        if "error" in reply:
            raise CheckFailed(f"the check {name!r} raised {reply['error']}")
        value = reply["value"]
        return None if value is None else float(value)

    async def close(self) -> None:
        for process in [*self._idle, *self._running]:
            await process.kill()
        self._idle.clear()


class _Process:
    """One child and its pipes."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, library: str) -> "_Process":
        """Raises `RewardError` when the library cannot be imported, or not in time."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "raylearner.rewards.checker_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_REPLY_BYTES,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        process = cls(child)
        try:
            reply = await process.ask("import", (library,), timeout_s=START_TIMEOUT_S)
            if "error" in reply:
                raise RewardError(f"{library} cannot be imported: {reply['error']}")
        except BaseException as error:
            await process.kill()
            if isinstance(error, CheckFailed):
                raise RewardError(str(error)) from error
            raise
        return process

    async def ask(
        self, name: str, arguments: tuple[object, ...], *, timeout_s: float
    ) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        request = pickle.dumps((name, arguments))
        try:
            async with asyncio.timeout(timeout_s):
                self._child.stdin.write(len(request).to_bytes(LENGTH_BYTES) + request)
                await self._child.stdin.drain()
                line = await self._child.stdout.readline()
        except TimeoutError as error:
            raise CheckTimeout(f"the check {name!r} took longer than {timeout_s:g} s") from error
        except ConnectionError:
            line = b""
        if not line:
            code = await self._child.wait()
            raise CheckFailed(f"the process of the check {name!r} ended with code {code}")
        return json.loads(line)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._child.kill()
        await self._child.wait()
