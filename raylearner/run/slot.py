"""One place of the fleet, and what happens in it."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """What happens in a slot."""

    UNPLACED = "starting the process or waiting for resources"
    STARTING = "starting"
    PLAYING = "playing"
    RESTING = "waiting before the next try"
    GIVEN_UP = "waiting until the budget allows a restart"


@dataclass(slots=True, eq=False)
class Slot:
    """One place of the fleet, with the actor that is in it now."""

    actor_id: str = ""
    actor: Any = None
    """The actor, once its engine has started."""
    stage: Stage = Stage.UNPLACED
    node: str = ""
    joined_at_s: float = 0.0
    num_in_row: int = 0
    """Number of failures in a row."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where the slot ends with its actor."""
    task: asyncio.Task[None] | None = None

    @property
    def is_released(self) -> bool:
        return self.release.is_set()
