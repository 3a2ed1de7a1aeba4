"""What a process that starts is doing now, with a span for each phase."""

import time

from raylearner.observability.spans import Tracer


class Phases:
    """The phases of one process, one after the other."""

    def __init__(self, tracer: Tracer, first: str) -> None:
        self._tracer = tracer
        self._since_s = time.time()
        self.current = first
        """Empty after the last one."""

    def enter(self, name: str) -> None:
        """Begin a phase, which ends the one before; a name that is the current one changes nothing."""
        if name == self.current:
            return
        if self.current:
            self._tracer.since(f"start: {self.current}", self._since_s)
        self.current, self._since_s = name, time.time()

    def end(self) -> None:
        self.enter("")
