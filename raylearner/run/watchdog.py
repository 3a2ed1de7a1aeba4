"""Bounded waits of the controller, which end early when a stop is requested."""

import asyncio
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from raylearner.errors import StalledError, summary

DESCRIBE_TIMEOUT_S = 60.0
"""Maximum wait for the replay's description of a stalled run."""

T = TypeVar("T")


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


async def in_time(call: Awaitable[T], name: str, *, limit_s: float, step: int) -> T:
    """Await the call. Raises `StalledError` where that takes longer than `run.watchdog_s`."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise StalledError(
            f"{name} did not end within {limit_s:g} s at step {step} (run.watchdog_s)"
        ) from None


async def describe_stall(replay: Any, folder: Path, *, idle_s: float, step: int) -> StalledError:
    """Return an error with a description of all waits, and write the replay's ledger to `folder`."""
    text = f"no progress for {idle_s:.0f} s at step {step} (run.watchdog_s)"
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
            lines = await replay.describe.remote()
            await replay.save.remote(str(folder))
    except Exception as error:
        return StalledError(f"{text}; the replay actor cannot describe it: {summary(error)}")
    return StalledError("\n  ".join([f"{text}; the ledger is in {folder}:", *lines]))
