"""Rewards whose check runs in a separate process: mathematics and reasoning-gym tasks.

Libraries of symbols and tasks may hang: a process that does not reply in time is killed and replaced.
"""

import asyncio
import json
import logging
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from raylearner.config.rewards import CheckedAnswer
from raylearner.credentials import without_credentials
from raylearner.errors import RewardError
from raylearner.rewards.built_in import compose
from raylearner.rewards.checker_process import LENGTH_BYTES
from raylearner.rewards.functions import EpisodeView, RewardLog, last_answer
from raylearner.types import Prompt

TASK_COLUMN = "reasoning_gym"
"""Column of a prompt that its reasoning-gym task fills: `task`, `parameters` and `entry`."""


logger = logging.getLogger(__name__)


class CheckedReward:
    """Scores answers by a check; an answer that cannot be checked counts as wrong.

    The metrics `timeouts` and `failures` count the checks that took too long or raised.
    """

    def __init__(self, section: CheckedAnswer) -> None:
        self._section = section
        self._checker = Checker(
            library=section.kind,
            num_processes=section.num_processes,
            timeout_s=section.check_timeout_s,
        )

    async def score(
        self, episodes: Sequence[EpisodeView], log: RewardLog
    ) -> Sequence[float | None]:
        scores: list[float | None] = []
        num_timeouts = num_failures = 0
        for episode in episodes:
            try:
                scores.append(await self._score(episode))
            except CheckTimeout:
                scores.append(0.0)
                num_timeouts += 1
            except CheckFailed as error:
                logger.info("an answer to %r counts as wrong: %s", episode.prompt.prompt_id, error)
                scores.append(0.0)
                num_failures += 1
        log.metric("timeouts", num_timeouts)
        log.metric("failures", num_failures)
        return scores

    async def close(self) -> None:
        await self._checker.close()

    async def _score(self, episode: EpisodeView) -> float | None:
        """Return the check's value, and 0 for a blank answer without a check."""
        given = last_answer(episode, self._section.answer_tag)
        if self._section.kind == "math_verify":
            return await self._score_math(episode.prompt, given)
        task = cast(dict[str, Any] | None, episode.prompt.columns.get(TASK_COLUMN))
        if task is None:
            return None
        if not given.strip():
            return 0.0
        return await self._checker.check(
            "reasoning", task["task"], task["parameters"], task["entry"], given
        )

    async def _score_math(self, prompt: Prompt, given: str) -> float | None:
        golds = tuple(gold for answer in prompt.answers if (gold := compose(answer)))
        if not golds:
            return None
        return await self._checker.check("math", golds, compose(given))


START_TIMEOUT_S = 120.0
"""Maximum time for a new process to import the library behind its checks."""
MAX_REPLY_BYTES = 1 << 20


class CheckFailed(Exception):
    """A check raised, or its process died."""


class CheckTimeout(CheckFailed):
    """A check did not end in time."""


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
        """Return the value of a check of `checker_process.CHECKS`.

        Raises `CheckTimeout` when it hangs, `CheckFailed` when it raises or its process dies, and
        `RewardError` when no process can be started.
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
        return reply["value"]

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
            env={**without_credentials(os.environ), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
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
        except ValueError as error:
            raise CheckFailed(f"the check {name!r} sent an endless line") from error
        if not line:
            code = await self._child.wait()
            raise CheckFailed(f"the process of the check {name!r} ended with code {code}")
        return _read_reply(name, line)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._child.kill()
        await self._child.wait()


def _read_reply(name: str, line: bytes) -> dict[str, Any]:
    """Return `{"error": text}` or `{"value": score}`; the score is from 0 to 1, or None."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckFailed(f"the check {name!r} sent a malformed reply") from error
    if isinstance(reply, dict):
        found = cast(dict[str, Any], reply)
        value = found.get("value")
        if isinstance(found.get("error"), str):
            return {"error": found["error"]}
        if "value" in found and (value is None or (_is_number(value) and 0 <= value <= 1)):
            return {"value": None if value is None else float(value)}
    raise CheckFailed(f"the check {name!r} sent a malformed reply")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
