"""What a starting run waits for, in words."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from raylearner.run.model import RunModel

POLL_S = 1.0


class Starting(Protocol):
    """A group of processes that start."""

    async def phases(self) -> list[str]:
        """Return what each one that is not ready is doing."""
        ...


async def follow(
    model: RunModel, learner: Starting, fleet: Starting, on_wait: Callable[[str], None]
) -> None:
    """Report what is waited for, until cancelled."""
    num_ranks = num_engines = 0
    while True:
        ranks, engines = await asyncio.gather(learner.phases(), fleet.phases())
        num_ranks, num_engines = max(num_ranks, len(ranks)), max(num_engines, len(engines))
        groups = (("engines", engines, num_engines), ("learner ranks", ranks, num_ranks))
        on_wait(describe(groups, is_made=model.is_made))
        await asyncio.sleep(POLL_S)


def describe(groups: Sequence[tuple[str, Sequence[str], int]], *, is_made: bool) -> str:
    """Return a line from the phases of what is not ready in each group, and the size of the group.

    Empty where nothing is waited for.
    """
    parts = [] if is_made else ["the model"]
    for name, phases, size in groups:
        if phases:
            counts = Counter(phases)
            texts = (
                phase if count == len(phases) else f"{count} {phase}"
                for phase, count in counts.most_common()
            )
            parts.append(f"{len(phases)} of {size} {name} ({', '.join(texts)})")
    return f"waiting for {' and '.join(parts)}" if parts else ""
