"""The threads of user code: one with an event loop, and workers for sync functions.

All are daemons: a thread that never returns does not keep its process alive.
"""

import asyncio
import contextlib
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable

from raylearner.user_code.frames import of_frame

DRAIN_S = 1.0
"""Time for the tasks of an abandoned loop to end."""


class Abandoned(BaseException):
    """Raised inside an abandoned thread, so that it ends where it runs Python code."""


class UserThread:
    """A thread whose stack can be read, and that can be interrupted once it is abandoned."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stack(self) -> list[str]:
        """Return the user's frames that it is in."""
        return of_frame(sys._current_frames().get(self._thread.ident or 0))

    def interrupt(self) -> None:
        """Raise `Abandoned` in the thread at its next Python instruction; a call into C ends first."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(Abandoned)
        )

    def _guarded(self) -> None:
        with contextlib.suppress(Abandoned):
            self._body()

    def _body(self) -> None:
        raise NotImplementedError


class LoopThread(UserThread):
    """An event loop in its own thread, with a heartbeat that shows whether it is blocked."""

    def __init__(self) -> None:
        super().__init__("user code loop")
        self.loop = asyncio.new_event_loop()
        self._asked_at: float | None = None
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since a heartbeat was requested that has not come; 0 without one."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def ask_for_beat(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self.loop.call_soon_threadsafe(self._beat)

    def close(self) -> None:
        """End the loop as soon as it runs again, with all tasks that are left on it."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _beat(self) -> None:
        self._asked_at = None

    def _body(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=DRAIN_S))
        self.loop.close()


class Worker(UserThread):
    """Runs one sync call after another; `on_idle` is called in its thread after each."""

    def __init__(self, on_idle: "Callable[[Worker], None]") -> None:
        super().__init__("user code")
        self._on_idle = on_idle
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.is_abandoned = False
        self._thread.start()

    def start(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _body(self) -> None:
        while not self.is_abandoned:
            self._jobs.get()()
            self._on_idle(self)
