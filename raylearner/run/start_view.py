"""What a starting run waits for, in words."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
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
    model: RunModel, groups: Mapping[str, Starting], on_wait: Callable[[Sequence[str]], None]
) -> None:
    """Report what is waited for, a line each, until cancelled; `groups` are by name."""
    sizes = dict.fromkeys(groups, 0)
    while True:
        found = await asyncio.gather(*(group.phases() for group in groups.values()))
        lines = [f"model: {model.awaited}"] if model.awaited else []
        for name, phases in zip(groups, found, strict=True):
            sizes[name] = max(sizes[name], len(phases))
            if phases:
                lines.append(ready_line(name, phases, sizes[name]))
        on_wait(lines)
        await asyncio.sleep(POLL_S)
