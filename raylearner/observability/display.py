"""Console output: stages of startup, one line per step, and on a terminal a live panel below them."""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raylearner.observability.lines import WIDTH, Metrics, clock, figures, share, step_line
from raylearner.observability.logs import IN_PANEL
from raylearner.text import visible

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
"""Minimum time between two log lines about what a stage waits for."""
REPEAT_INTERVAL_S = 30.0
"""Time after which they are logged again if nothing changed."""
SHORT_S = 1.0
"""Duration below which the end of a stage is not logged."""
ETA_WINDOW_STEPS = 20
BAR_WIDTH = 24


@dataclass(slots=True, eq=False)
class Stage:
    """A stage that runs."""

    name: str
    started_s: float
    is_logged: bool = True
    awaited: Sequence[str] = ()
    """What the stage waits for, a line each."""
    _logged_s: float = 0.0
    _logged: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        self._logged_s = self.started_s

    def wait_for(self, awaited: Sequence[str]) -> None:
        """Show what the stage waits for, and log it from time to time, all of it or what changed."""
        self.awaited = awaited
        silent_s = time.monotonic() - self._logged_s
        changed = [line for line in awaited if line not in self._logged]
        lines = awaited if silent_s >= REPEAT_INTERVAL_S else changed
        if self.is_logged and lines and silent_s >= LOG_INTERVAL_S:
            self._logged_s, self._logged = time.monotonic(), awaited
            for line in lines:
                logger.info("%s", line, extra={IN_PANEL: True})


class Display:
    """Log lines, and below them, on a terminal, running stages, progress and the last step's figures."""

    def __init__(self, *, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console or Console(file=sys.stderr)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._stages: list[Stage] = []
        self._spinner = Spinner("dots")
        self._metrics: Metrics = {}
        self._started_s = time.monotonic()
        self._step_ends_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    @contextmanager
    def stage(self, name: str, *, is_logged: bool = True) -> Iterator[Stage]:
        """Show a stage while it runs, and log it if `is_logged`; stages may overlap."""
        stage = Stage(name, time.monotonic(), is_logged)
        self._stages.append(stage)
        if self._is_live:
            self._show()
        elif is_logged:
            logger.info("%s ...", name)
        outcome = "failed after"
        try:
            yield stage
            outcome = "took"
        finally:
            self._stages.remove(stage)
            duration_s = time.monotonic() - stage.started_s
            if is_logged and (duration_s >= SHORT_S or outcome != "took"):
                logger.info("%s %s %.1f s", name, outcome, duration_s)

    def step(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._step_ends_s.append(time.monotonic())
        line = step_line(metrics, num_steps=self._num_steps, remaining_s=self.remaining_s())
        logger.info("%s", line)
        if self._is_live:
            self._show()

    def remaining_s(self) -> float | None:
        """Return the remaining time at the pace of the last steps; None before two have ended."""
        ends, step = self._step_ends_s, self._metrics.get("step")
        if len(ends) < 2 or step is None:
            return None
        pace_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        since_s = time.monotonic() - ends[-1]
        return max(0.0, pace_s * (self._num_steps - step) - since_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [self._progress(), _line(figures(self._metrics), WIDTH)] if self._metrics else []
        yield from rows
        now_s = time.monotonic()
        for stage in list(self._stages):
            first, *others = stage.awaited or [stage.name]
            self._spinner.update(text=_line(f"{first}  {clock(now_s - stage.started_s)}"))
            yield self._spinner
            yield from (_line(f"  {other}") for other in others)

    def _progress(self) -> Table:
        step, remaining_s = self._metrics.get("step") or 0, self.remaining_s()
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"step {step:.0f}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=step, width=BAR_WIDTH),
            Text(share(step / max(1, self._num_steps))),
            Text(f"{clock(time.monotonic() - self._started_s)} elapsed"),
            Text(f"ETA {'-' if remaining_s is None else clock(remaining_s)}"),
        )
        return row

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(self, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()


def _line(text: str, width: int = WIDTH - len("⠋ ")) -> Text:
    """Return one line that a terminal neither wraps nor interprets, by default beside a spinner."""
    line = Text(visible(text).replace("\n", " "), no_wrap=True, overflow="ellipsis", end="\n")
    line.truncate(width, overflow="ellipsis")
    return line
