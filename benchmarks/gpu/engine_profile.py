"""A scheduler that profiles the process it runs in: the core, and on one GPU its worker too.

It writes the functions with the most time of their own, per step, to the file that `PROFILE_VARIABLE` names.
"""

import cProfile
import os
import pstats
from pathlib import Path
from typing import Any

from raylearner.actors.engines.vllm_scheduler import AsyncPartScheduler

PROFILE_VARIABLE = "ENGINE_PROFILE"
FIRST_STEP, NUM_STEPS, NUM_LINES = 60, 100, 40


class ProfiledScheduler(AsyncPartScheduler):
    """Profiles `NUM_STEPS` full steps after the first ones."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_steps = 0
        self._profile = cProfile.Profile()

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        self._num_steps += 1
        if self._num_steps == FIRST_STEP:
            self._profile.enable()
        elif self._num_steps == FIRST_STEP + NUM_STEPS:
            self._profile.disable()
            self._write()
        return super().schedule(*arguments, **named)

    def _write(self) -> None:
        with Path(os.environ[PROFILE_VARIABLE]).open("w") as file:
            for order in ("tottime", "cumulative"):
                file.write(f"{NUM_STEPS} steps with {len(self.running)} requests at the end\n")
                pstats.Stats(self._profile, stream=file).sort_stats(order).print_stats(NUM_LINES)
