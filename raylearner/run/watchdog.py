"""Limits of all waits of the controller, and what happens at a limit.

At a limit the actors that the wait depends on are examined: whether they answer, their process, node and
stacks. Actors that can be replaced are then ended, and the error of their role is raised; otherwise the
run ends. An answer that arrives meanwhile counts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from raylearner.config.schema import RunConfig
from raylearner.errors import RaylearnerError, StalledError, summary
from raylearner.run import processes

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 60.0
"""Maximum wait for the replay's description of a stalled run."""
PATIENCE = 3.0
"""Multiple of the limit for calls that start processes, load models or compile."""
END_TIMEOUT_S = 5.0
"""Maximum wait for a call to end by itself after its actors were ended."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Role:
    """Actors on which a wait may depend."""

    name: str
    actors: Callable[[], Mapping[str, Any]]
    """Handles of the running actors by name; each has a method `ping`."""
    death: type[RaylearnerError]
    """Error that is raised in the controller when these actors were ended."""


class Watchdog:
    """Every wait of the controller goes through `wait`, with a label and a limit."""

    def __init__(self, limit_s: float, *, step: Callable[[], int] | None = None) -> None:
        """`limit_s` is `run.watchdog_s`; `step` returns the step to name in messages, if they name one."""
        self.limit_s = limit_s
        self._step = step

    def _within(self, limit_s: float) -> str:
        """Return the limit in words, with the step."""
        place = "" if self._step is None else f" at step {self._step()}"
        return f"within {limit_s:g} s{place} (run.watchdog_s)"

    async def wait(
        self,
        label: str,
        call: Awaitable[T],
        *,
        roles: Sequence[Role] = (),
        limit_s: float | None = None,
        progress: Callable[[], object] | None = None,
    ) -> T:
        """Await the call; at the limit examine the roles, end those that are stuck, and raise.

        The limit, by default `run.watchdog_s`, starts again whenever `progress`, which is called in a
        thread, returns another value. Raises the death of the role that is stuck, or `StalledError`
        where the call depends on none.
        """
        limit_s = limit_s or self.limit_s
        calling = asyncio.ensure_future(call)
        try:
            if not await self._ends(calling, limit_s, progress):
                text = f"{label} did not finish {self._within(limit_s)}"
                error = await self._examine(text, roles, is_needed=lambda: not calling.done())
                if error is not None:
                    if roles:
                        await asyncio.wait([calling], timeout=END_TIMEOUT_S)
                    raise error
                await asyncio.wait([calling])
            return calling.result()
        finally:
            if not calling.done():
                calling.cancel()
                await asyncio.wait([calling], timeout=END_TIMEOUT_S)
            elif not calling.cancelled():
                calling.exception()  # it is raised above, or follows from what was ended

    async def find_silent(self, text: str, roles: Sequence[Role]) -> RaylearnerError | None:
        """End the actors of roles of which one does not answer; return their death, None if all do."""
        return await self._examine(text, roles, is_needed=lambda: True, must_be_silent=True)

    async def watch(self, role: Role) -> None:
        """End actors of the role that do not answer for the limit, each alone. Runs until cancelled."""
        silent_since: dict[str, float] = {}
        while True:
            await asyncio.sleep(self.limit_s / 4)
            actors = dict(role.actors())
            asked_at = time.monotonic()
            answered = await asyncio.gather(*(processes.answers(a) for a in actors.values()))
            for name, does_answer in zip(actors, answered, strict=True):
                since = silent_since.pop(name, asked_at)
                if does_answer or role.actors().get(name) is not actors[name]:
                    continue
                silent_since[name] = since
                if time.monotonic() - since >= self.limit_s:
                    del silent_since[name]
                    await self.end_silent({name: actors[name]})

    async def end_silent(self, actors: Mapping[str, Any]) -> list[str]:
        """End those of these actors that do not answer, which their own watch handles; return their names."""
        findings = await processes.examine(actors)
        silent = [finding for finding in findings if not finding.answers]
        for finding in silent:
            logger.warning(
                "no response %s; the actor is killed and replaced: %s",
                *(self._within(self.limit_s), finding.text),
            )
        processes.end({finding.name: actors[finding.name] for finding in silent})
        return [finding.name for finding in silent]

    async def _ends(
        self, calling: "asyncio.Future[T]", limit_s: float, progress: Callable[[], object] | None
    ) -> bool:
        """Return whether the call ends within the limit, counted from the last progress."""
        seen: object = None
        changed_at = time.monotonic()
        while True:
            left_s = changed_at + limit_s - time.monotonic()
            poll_s = left_s if progress is None else min(left_s, limit_s / 4)
            await asyncio.wait([calling], timeout=max(0.0, poll_s))
            if calling.done():
                return True
            current = None if progress is None else await _ask(progress, timeout_s=limit_s)
            if current is not None and current != seen:
                seen, changed_at = current, time.monotonic()
            elif time.monotonic() - changed_at >= limit_s:
                return False

    async def _examine(
        self,
        text: str,
        roles: Sequence[Role],
        *,
        is_needed: Callable[[], bool],
        must_be_silent: bool = False,
    ) -> RaylearnerError | None:
        """Return the error of the role that is stuck, after ending its actors.

        Without a silent actor it is the first role, or none if it `must_be_silent`. None also if this is
        not needed any more after the examination.
        """
        actors = {role.name: dict(role.actors()) for role in roles}
        findings = {
            name: await processes.examine(members) for name, members in actors.items() if members
        }
        if not is_needed():
            logger.warning("%s, but has finished since", text)
            return None
        stuck = next(
            (r for r in roles if any(not f.answers for f in findings.get(r.name, ()))), None
        )
        if stuck is None and must_be_silent:
            return None
        lines = [finding.text for members in findings.values() for finding in members]
        message = "\n  ".join([f"{text}:", *lines] if lines else [text])
        role = stuck or next(iter(roles), None)
        if role is None:
            return StalledError(message)
        logger.warning("%s\n  killing %s", message, role.name)
        processes.end(actors[role.name])
        return role.death(message)


async def _ask(progress: Callable[[], object], *, timeout_s: float) -> object:
    """Return what `progress` returns, or None where it fails or hangs."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(progress)
    except (OSError, TimeoutError):
        return None


async def unless_set(event: asyncio.Event, call: Coroutine[Any, Any, T]) -> T | None:
    """Await the call; return None, with the call cancelled, when the event is set first."""
    calling = asyncio.ensure_future(call)
    stopping = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([calling, stopping], return_when=asyncio.FIRST_COMPLETED)
        return calling.result() if calling.done() else None
    finally:
        calling.cancel()
        stopping.cancel()
        await asyncio.wait([calling, stopping])


async def describe_stall(replay: Any, folder: Path, *, text: str) -> StalledError:
    """Return an error with a description of all waits, and write the replay's ledger to `folder`."""
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
            lines = await replay.describe.remote()
            await replay.save.remote(str(folder))
    except Exception as error:
        return StalledError(
            f"{text}; the replay actor could not report its state: {summary(error)}"
        )
    return StalledError("\n  ".join([f"{text}; the ledger is in {folder}:", *lines]))


def start_limit_s(config: RunConfig) -> float:
    """Return the limit of calls that start processes or load models."""
    return max(config.actors.start_timeout_s, PATIENCE * config.run.watchdog_s)


def publish_limit_s(config: RunConfig) -> float:
    """Return the limit of a publication behind another one, whose parts have deadlines of their own."""
    return start_limit_s(config) + 4 * config.weights.deadline_s
