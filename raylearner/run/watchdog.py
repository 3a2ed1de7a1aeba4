"""How the controller waits: for a stop that is requested meanwhile, and never without end."""

import asyncio
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from raylearner.errors import StalledError, summary

DESCRIBE_TIMEOUT_S = 60.0
"""Longest a run that ends waits for the replay to say who waits for whom."""

T = TypeVar("T")


async def unless_set(event: asyncio.Event, call: Coroutine[Any, Any, T]) -> T | None:
    """What the call returns, or None when the event is set first; the call has been cancelled then."""
    calling = asyncio.ensure_future(call)
    stopping = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([calling, stopping], return_when=asyncio.FIRST_COMPLETED)
        return calling.result() if calling.done() else None
    finally:
        calling.cancel()
        stopping.cancel()
        await asyncio.wait([calling, stopping])


async def in_time(call: Awaitable[T], what: str, *, limit_s: float, step: int) -> T:
    """What the call returns. Raises `StalledError` where that takes longer than `run.watchdog_s`."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call
    except TimeoutError:
        if not limit.expired():
            raise
        raise StalledError(
            f"{what} did not end within {limit_s:g} s at step {step} (run.watchdog_s)"
        ) from None


async def stalled(replay: Any, folder: Path, *, idle_s: float, step: int) -> StalledError:
    """Who waits for whom, as the replay describes it; its ledger is written to `folder`."""
    text = f"no progress for {idle_s:.0f} s at step {step} (run.watchdog_s)"
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
            lines = await replay.describe.remote()
            await replay.save.remote(str(folder))
    except Exception as error:
        return StalledError(f"{text}; the replay actor cannot describe it: {summary(error)}")
    return StalledError("\n  ".join([f"{text}; the ledger is in {folder}:", *lines]))
