"""The waits of a push, each bounded, each with its own words when it is over."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from raylearner.errors import WeightTransferError
from raylearner.types import PolicyVersion, WeightReceipt, WeightUpdate

BUSY_POLL_S = 0.5
"""Pause between two looks at whether a write that takes long waits for a step."""


async def written(
    writing: Awaitable[WeightUpdate],
    policy_version: PolicyVersion,
    *,
    deadline_s: float,
    is_busy: Callable[[], bool],
) -> WeightUpdate:
    """What the learner wrote, that version or a later one; time while it `is_busy` does not count.

    Raises `WeightTransferError`, and what writing raised.
    """
    task = asyncio.ensure_future(writing)
    free_since = time.monotonic()
    try:
        while not task.done():
            await asyncio.wait([task], timeout=min(BUSY_POLL_S, deadline_s))
            if is_busy():
                free_since = time.monotonic()
            elif not task.done() and time.monotonic() - free_since > deadline_s:
                raise WeightTransferError(
                    f"the learner did not write policy version {policy_version} within "
                    f"{deadline_s:g} s"
                )
    finally:
        task.cancel()
    update = task.result()
    if update.policy_version < policy_version:
        raise WeightTransferError(
            f"the learner wrote policy version {update.policy_version}, asked for {policy_version}"
        )
    return update


async def sent(
    sending: Awaitable[Mapping[str, float]], update: WeightUpdate, *, deadline_s: float
) -> Mapping[str, float]:
    """Timings of the learner's side. Raises `WeightTransferError`, and what sending raised."""
    try:
        async with asyncio.timeout(deadline_s):
            return await sending
    except TimeoutError as error:
        raise WeightTransferError(
            f"the learner did not send policy version {update.policy_version} within "
            f"{deadline_s:g} s"
        ) from error


async def acknowledged(
    actor_id: str, receiving: Awaitable[WeightReceipt], update: WeightUpdate, *, deadline_s: float
) -> WeightReceipt:
    """An engine's receipt for just this update. Raises `WeightTransferError`, whatever went wrong."""
    version = update.policy_version
    try:
        async with asyncio.timeout(deadline_s):
            receipt = await receiving
    except TimeoutError as error:
        raise WeightTransferError(
            f"{actor_id} did not acknowledge policy version {version} within {deadline_s:g} s"
        ) from error
    except WeightTransferError:
        raise
    except Exception as error:
        raise WeightTransferError(
            f"{actor_id} failed to receive policy version {version}: {type(error).__name__}: {error}"
        ) from error
    if receipt.policy_version != version:
        raise WeightTransferError(
            f"{actor_id} acknowledged policy version {receipt.policy_version}, sent was {version}"
        )
    return receipt
