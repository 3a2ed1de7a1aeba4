"""Console output: startup stages, one aligned line per step, live progress on a terminal."""

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward/mean", "{:6.3f}"),
    ("loss", "learner/loss", "{:+10.3e}"),
    ("grad", "learner/grad_norm", "{:8.3g}"),
    ("gap", "learner/logprob_gap/mean", "{:7.1e}"),
    ("stale", "buffer/staleness/mean", "{:5.2f}"),
    ("tok/s", "rollout/tokens_per_s", "{:8,.0f}"),
    ("idle", "learner/idle_fraction", "{:4.0%}"),
    ("s", "learner/step_s", "{:6.2f}"),
)
"""Label, metric and format of the columns of a step line."""

LOG_INTERVAL_S = 10.0
"""Minimum time between two log lines about what a stage waits for."""
ETA_WINDOW_STEPS = 20


def step_line(metrics: Mapping[str, float | None], *, num_steps: int) -> str:
    """Return one aligned line, with a dash for missing values and NaN."""
    width = len(str(num_steps))
    parts = [f"step {_whole(metrics.get('step')):>{width}}/{num_steps}"]
    parts.append(f"v{_whole(metrics.get('policy_version')):>{width}}")
    for label, key, form in COLUMNS:
        value = metrics.get(key)
        blank = len(form.format(0.0))
        is_number = value is not None and value == value
        parts.append(f"{label} {form.format(value) if is_number else '-':>{blank}}")
    return "  ".join(parts)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def clock(seconds: float) -> str:
    """`4:05` or `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(slots=True, eq=False)
class Stage:
    """A stage that runs."""

    name: str
    started_s: float
    awaited: str = ""
    """What the stage waits for."""
    num_logged: int = 0

    def wait_for(self, awaited: str) -> None:
        """Show what the stage waits for, and log it from time to time; empty for nothing in particular."""
        self.awaited = awaited
        now_s = time.monotonic()
        num_due = int((now_s - self.started_s) / LOG_INTERVAL_S)
        if awaited and num_due > self.num_logged:
            self.num_logged = num_due
            logger.info("%s, %.0f s", awaited, now_s - self.started_s)


class Display:
    """Log lines, and below them, on a terminal, running stages and a progress line."""

    def __init__(self, *, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._console = console or Console(file=sys.stderr)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._stages: list[Stage] = []
        self._spinner = Spinner("dots")
        self._metrics: Mapping[str, float | None] = {}
        self._step_ends_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Show a stage while it runs and log its duration; stages may overlap."""
        stage = Stage(name, time.monotonic())
        self._stages.append(stage)
        if self._is_live:
            self._show()
        else:
            logger.info("%s ...", name)
        outcome = "failed after"
        try:
            yield stage
            outcome = "took"
        finally:
            self._stages.remove(stage)
            logger.info("%s %s %.1f s", name, outcome, time.monotonic() - stage.started_s)

    def step(self, metrics: Mapping[str, float | None]) -> None:
        self._metrics = metrics
        self._step_ends_s.append(time.monotonic())
        logger.info(step_line(metrics, num_steps=self._num_steps))
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

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now_s = time.monotonic()
        for stage in list(self._stages):
            text = stage.awaited or stage.name
            self._spinner.update(text=Text(f"{text}  {clock(now_s - stage.started_s)}"))
            yield self._spinner
        if self._metrics:
            yield self._progress()

    def _progress(self) -> Table:
        metrics, step = self._metrics, self._metrics.get("step") or 0
        remaining_s = self.remaining_s()
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"step {step:.0f}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=step, width=24),
            _figure("reward", metrics.get("rollout/reward/mean"), "{:.3f}"),
            _figure("tokens/s", metrics.get("rollout/tokens_per_s"), "{:,.0f}"),
            _figure("staleness", metrics.get("buffer/staleness/mean"), "{:.2f}"),
            Text(f"ETA {'-' if remaining_s is None else clock(remaining_s)}"),
        )
        return row

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(self, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()


def _figure(label: str, value: float | None, form: str) -> Text:
    is_number = value is not None and value == value
    return Text(f"{label} {form.format(value) if is_number else '-'}")
