"""What a person sees of a running sweep: a live table on a terminal, lines elsewhere."""

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
from raylearner.observability.display import clock

logger = logging.getLogger(__name__)

STYLES = {
    Status.RUNNING: "cyan",
    Status.DONE: "green",
    Status.STOPPED_EARLY: "yellow",
    Status.FAILED: "red",
}


class Board:
    """Shows every trial; `tell` logs a change, which is all there is without a terminal."""

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

    def tell(self, found: TrialState) -> None:
        """One line about a trial whose status changed."""
        trial = self._plan.trials[found.number]
        parts = [f"trial {found.number:03d} {found.status}", trial.label, f"seed {trial.seed}"]
        if found.status.is_final:
            parts.append(f"value {_value(found)} at step {found.step} in {_duration(found)}")
        if found.error:
            parts.append(found.error)
        logger.info("%s", "  ".join(parts))

    def table(self) -> Table:
        table = Table(title=Text(self._plan.sweep.name), title_justify="left")
        for head in ("trial", "combination", "seed", "status", "step", "value", "time"):
            table.add_column(head)
        for trial, found in zip(self._plan.trials, self._state.trials, strict=True):
            num_steps = trial.config.run.num_steps
            table.add_row(
                f"{trial.number:03d}",
                Text(trial.label),
                str(trial.seed),
                Text(str(found.status), style=STYLES.get(found.status, "dim")),
                f"{found.step}/{num_steps}",
                _value(found),
                _duration(found),
            )
        return table


def _value(found: TrialState) -> str:
    return "-" if found.value is None else f"{found.value:.4f}"


def _duration(found: TrialState) -> str:
    if found.started_at_s is None:
        return "-"
    return clock((found.finished_at_s or time.time()) - found.started_at_s)
