"""What a starting run waits for, in words."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from raylearner.observability.lines import ready_line
from raylearner.run.model import RunModel

POLL_S = 1.0


class Starting(Protocol):
    """A group of processes that start."""

    async def phases(self) -> list[str]:
        """Return what each one that is not ready is doing."""
        ...


async def follow(
    model: RunModel,
    learner: Starting,
    fleet: Starting,
    on_wait: Callable[[Sequence[str]], None],
) -> None:
    """Report what is waited for, a line each, until cancelled."""
    num_ranks = num_engines = 0
    while True:
        ranks, engines = await asyncio.gather(learner.phases(), fleet.phases())
        num_ranks, num_engines = max(num_ranks, len(ranks)), max(num_engines, len(engines))
        lines = [] if model.is_made else [f"model: {model.progress}"]
        groups = (("engines", engines, num_engines), ("learner ranks", ranks, num_ranks))
        lines += [ready_line(name, phases, size) for name, phases, size in groups if phases]
        on_wait(lines)
        await asyncio.sleep(POLL_S)
