"""`train --retries N`: runs the training as a child process and resumes it after a failure.

Waits for the child; forwards stop signals to it, and never retries a run that was stopped on request.
"""

import ctypes
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from raylearner.config.schema import RunConfig
from raylearner.observability import run_directory
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.run.restarts import RestartBudget

logger = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""Time within which retries count."""
FINAL_CODES = (0, 2, 130, 143)
"""Exit codes after which nothing is retried: success, invalid input, interrupted, stopped on request."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL_POLL_S = 0.5
"""Maximum time for a pause to end after a signal."""
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Supervisor:
    """Owns the child process of a run that is resumed after failures."""

    folder: Path
    """The run directory."""
    first: Sequence[str]
    """Arguments of the first training; later ones resume the run directory."""
    overrides: Sequence[str] = field(default=(), kw_only=True)
    """Changes that every resume repeats, since the first may fail before they are in the run directory."""
    retries: int
    """Maximum number of retries within an hour."""
    environment: Mapping[str, str] | None = None
    program: Sequence[str] = (sys.executable, "-m", "raylearner")
    sleep: Callable[[float], None] | None = None
    """Takes the pauses, if given."""
    _child: "subprocess.Popen[bytes] | None" = None
    _signals: list[int] = field(default_factory=list[int])

    @classmethod
    def of_run(
        cls, config: RunConfig, arguments: Sequence[str], resume: Path | None, retries: int
    ) -> Self:
        """Supervise the training of `config`, which `arguments` of `train` describe."""
        assert config.run.dir is not None, "the run has a directory"
        if resume is None:
            first = ["train", *arguments, f"run.dir={config.run.dir}"]
        else:
            first = ["train", "--resume", str(resume), *arguments]
        overrides = [] if resume is None else [a for a in arguments if a != RESTART_OPTION]
        return cls(folder=Path(config.run.dir), first=first, overrides=overrides, retries=retries)

    def run(self) -> int:
        """Return the exit code of the last child; 128 + N for one that signal N killed."""
        budget = RestartBudget(self.retries, WINDOW_S)
        arguments = self.first
        with self._forwarding():
            while True:
                code = self._run_child(arguments)
                if code in FINAL_CODES or self._signals:
                    return _exit_code(code)
                budget.count()
                if budget.is_used_up:
                    logger.error(
                        "the run %s; all %d retries within an hour (--retries) are used up",
                        _ending(code),
                        self.retries,
                    )
                    return _exit_code(code)
                pause_s = budget.backoff_s()
                logger.warning(
                    "the run %s; it will be resumed in %.0f s, retry %d of %d within an hour",
                    *(_ending(code), pause_s, budget.num_counted, self.retries),
                )
                (self.sleep or self._pause)(pause_s)
                if self._signals:
                    return 128 + self._signals[0]
                if (self.folder / "config.yaml").is_file():
                    resume = ["--resume", str(self.folder), RESTART_OPTION]
                    arguments = ["train", *resume, *self.overrides]
                else:  # it was killed before it wrote anything
                    run_directory.remove_unused(self.folder)

    def _run_child(self, arguments: Sequence[str]) -> int:
        # In a session of its own, so that Ctrl-C reaches it once, from here.
        self._child = subprocess.Popen(
            [*self.program, *arguments],
            env=self.environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        if self._signals:  # one that arrived meanwhile
            self._child.send_signal(self._signals[-1])
        return self._child.wait()

    def _pause(self, pause_s: float) -> None:
        """Sleep until a signal arrives."""
        ends_at_s = time.monotonic() + pause_s
        while not self._signals and (left_s := ends_at_s - time.monotonic()) > 0:
            time.sleep(min(left_s, SIGNAL_POLL_S))

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, _: FrameType | None) -> None:
            self._signals.append(number)
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        before = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_with_parent() -> None:
    """Request a stop of this process, which is about to become the child, when the supervisor dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"
