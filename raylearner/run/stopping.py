"""The request to stop a run: by SIGTERM, from the first line of a run to its last, or by a deadline.

While no event loop of the run is active, as when Ray starts, the request ends the run immediately.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raylearner.errors import RunStopped, StoppedEarly
from raylearner.learner.checkpoint.directory import find_newest
from raylearner.observability.run_directory import RESTART_OPTION

logger = logging.getLogger(__name__)


class StopRequest:
    """Receives requests to stop; `event` is set by the first one."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run directory, which may not exist yet."""
        self.event = asyncio.Event()
        self._folder = folder
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_requested = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGTERM during the block. Raises `RunStopped` if no loop is active."""
        previous = signal.getsignal(signal.SIGTERM)
        self.handle()
        try:
            yield
        except SystemExit as end:
            # Raised here, or by Ray, which replaces the handler when it starts.
            if end.code != signal.SIGTERM:
                raise
            raise stopped(self._folder) from None
        finally:
            signal.signal(signal.SIGTERM, previous)

    def handle(self) -> None:
        """Handle SIGTERM, also after Ray replaced the handler."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def listen(self, stop_at_s: float | None) -> None:
        """Set `event` of the running loop from now on; `stop_at_s` is the Unix time of the deadline."""
        self._loop = asyncio.get_running_loop()
        if stop_at_s is not None:
            self._loop.call_later(max(0.0, stop_at_s - time.time()), self._request)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            if not self._loop.is_closed():  # nothing must break off the end of the cluster
                self._loop.call_soon_threadsafe(self._request)
        elif not self._is_requested:  # a second signal must not interrupt the clean-up
            self._is_requested = True
            raise SystemExit(signal.SIGTERM)

    def _request(self) -> None:
        if not self.event.is_set():
            logger.info(
                "stop requested: the run ends after the current step, or immediately if none is running"
            )
            self.event.set()


def stopped(folder: Path) -> RunStopped:
    """Return the error of a run that was stopped, with the checkpoint that it can continue from."""
    latest = find_newest(folder / "checkpoints") if folder.exists() else None
    if latest is not None:
        return RunStopped(
            f"stopped on request at step {latest.step}; resume with --resume {folder}"
        )
    if not folder.exists():
        return StoppedEarly("stopped on request before the run started; run the command again")
    return StoppedEarly(
        f"stopped on request before the first checkpoint of {folder}; start again with"
        f" --resume {folder} {RESTART_OPTION}, or in another run.dir"
    )
