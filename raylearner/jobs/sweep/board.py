"""A live table of a sweep's trials while it runs."""

import logging
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raylearner.jobs.sweep.plan import Plan
from raylearner.jobs.sweep.state import Status, SweepState, TrialState
from raylearner.observability.lines import clock

logger = logging.getLogger(__name__)

STYLES = {
    Status.RUNNING: "cyan",
    Status.DONE: "green",
    Status.STOPPED_EARLY: "yellow",
    Status.FAILED: "red",
}


class Board:
    """A live table of all trials on a terminal, and a log line for each change of status."""

    def __init__(self, plan: Plan, state: SweepState, console: Console | None = None) -> None:
        self._plan = plan
        self._state = state
        self._console = console or Console(file=sys.stderr)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, get_renderable=self.table, refresh_per_second=2
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def log_change(self, state: TrialState) -> None:
        """Log the new status of a trial."""
        trial = self._plan.trials[state.number]
        parts = [f"trial {state.number:03d} {state.status}", trial.label, f"seed {trial.seed}"]
        if state.status.is_final:
            parts.append(f"value {_value(state)} at step {state.step} in {_duration(state)}")
        if state.error:
            parts.append(state.error)
        logger.info("%s", "  ".join(parts))

    def table(self) -> Table:
        table = Table(title=Text(self._plan.sweep.name), title_justify="left")
        for head in ("trial", "combination", "seed", "status", "step", "value", "time"):
            table.add_column(head)
        for trial, state in zip(self._plan.trials, self._state.trials, strict=True):
            num_steps = trial.config.run.num_steps
            table.add_row(
                f"{trial.number:03d}",
                Text(trial.label),
                str(trial.seed),
                Text(str(state.status), style=STYLES.get(state.status, "dim")),
                f"{state.step}/{num_steps}",
                _value(state),
                _duration(state),
            )
        return table


def _value(state: TrialState) -> str:
    return "-" if state.value is None else f"{state.value:.4f}"


def _duration(state: TrialState) -> str:
    if state.started_at_s is None:
        return "-"
    return clock((state.finished_at_s or time.time()) - state.started_at_s)
