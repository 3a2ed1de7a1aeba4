"""The host of user code: async functions run on one event loop, sync ones in worker threads.

Consumes calls from an actor's own loop; produces their values, or errors that name the function. A
call waits for its function, unblocked by its end, by its time limit, or by its cancellation. A
function that does not end at its time limit is abandoned and its caller continues: its thread is
interrupted, and replaced if it blocked the loop. All async code of a process shares one loop, so
that clients kept between calls stay on the loop that they were created on.
"""

import asyncio
import contextvars
import faulthandler
import inspect
import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from raylearner.errors import UserCodeStuck
from raylearner.user_code.frames import describe, indented, of_coroutine
from raylearner.user_code.threads import LoopThread, UserThread, Worker

logger = logging.getLogger(__name__)

MAX_STUCK = 64
"""Maximum number of abandoned calls that may still run in one process; with more, its actor ends.
"""
GRACE_S = 1.0
"""Maximum time for a cancelled call to clean up before its caller continues without it."""
LINGER_S = 5.0
"""Time that a sync call may run beyond its limit before its thread is interrupted."""
TICK_S = 0.25
BLOCKED_S = 1.0
"""A loop without a heartbeat for this long is blocked."""
WARN_S = 5.0
"""Time after which a warning is logged for a blocked loop or interpreter.
"""
DUMP_S = 20.0
"""Stacks are written to stderr when the interpreter is blocked for this long.
"""


class CallTimeout(Exception):
    """A call took longer than its limit; the message names the line where it was."""


class CallFailed(Exception):
    """A call ended in something that is not an `Exception`, such as `SystemExit`, or was lost with the
    loop that it waited for; the message is complete."""


@dataclass(eq=False, slots=True)
class _Call:
    name: str
    caller: asyncio.AbstractEventLoop
    outcome: "asyncio.Future[Any]"
    context: contextvars.Context
    thread: UserThread | None = None
    task: "asyncio.Task[None] | None" = None
    abandoned_at: float | None = None
    is_stuck: bool = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Set the outcome, from any thread; the first call counts."""
        try:
            self.caller.call_soon_threadsafe(self._settle, value, error)
        except RuntimeError:  # the caller's loop is closed: nothing waits any more
            return

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(value)
        else:
            self.outcome.set_exception(error)
            self.outcome.exception()  # its caller may have left


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("user code call", default=None)
"""The call that the running code or task belongs to."""


class UserCode:
    """The threads of one process that run user code, and a monitor that watches them.

    `failure` is set when too many calls never ended, and names them: the process should then end.
    """

    def __init__(
        self, *, max_stuck: int = MAX_STUCK, grace_s: float = GRACE_S, linger_s: float = LINGER_S
    ) -> None:
        self._max_stuck = max_stuck
        self._grace_s = grace_s
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._has_calls = threading.Event()
        self._monitor: threading.Thread | None = None
        self._calls: set[_Call] = set()
        self._idle: list[Worker] = []
        self._loop: LoopThread | None = None
        self._owners: WeakKeyDictionary[asyncio.Task[Any], _Call] = WeakKeyDictionary()
        self._lost: dict[LoopThread, str] = {}
        """Loops that were replaced, with the name of the call that blocked each."""
        self._warned: set[str] = set()
        self.failure: str | None = None

    async def call(
        self, function: Callable[[], Any], *, name: str, timeout_s: float | None, limit: str = ""
    ) -> Any:
        """Return the value of `function`; an awaitable value is awaited on the event loop of user
        code.

        `name` stands for the function in errors and logs, `limit` for the key that sets
        `timeout_s`. Raises the function's errors, `CallTimeout` and `CallFailed`. When the caller
        is cancelled, so is an async function, which gets a moment to clean up.
        """
        if self.failure is not None:
            raise CallFailed(self.failure)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        limit_text = "" if timeout_s is None else f"{timeout_s:g} s{f' ({limit})' if limit else ''}"
        call = self._start(function, name, on_loop=is_async(function))
        value = await self._outcome(call, deadline, limit_text)
        if inspect.isawaitable(value):
            awaitable: Awaitable[Any] = value

            async def rest() -> Any:
                return await awaitable

            value = await self._outcome(self._start(rest, name, on_loop=True), deadline, limit_text)
        return value

    def check(self) -> None:
        """Raises `UserCodeStuck` once too many calls never ended."""
        if self.failure is not None:
            raise UserCodeStuck(self.failure)

    # -- the caller's side ---------------------------------------------------------------------

    async def _outcome(self, call: _Call, deadline: float | None, limit: str) -> Any:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            done, _ = await asyncio.wait([call.outcome], timeout=left_s)
        except asyncio.CancelledError:
            await self._give_up(call)
            raise
        if done:
            return call.outcome.result()
        where = self._whereabouts(call)
        await self._give_up(call)
        raise CallTimeout(f"took longer than {limit}{where}")

    async def _give_up(self, call: _Call) -> None:
        """Cancel the call, and wait a moment for its end."""
        with self._lock:
            if call not in self._calls:
                return
            call.abandoned_at = time.monotonic()
            thread, task = call.thread, call.task
        if isinstance(thread, LoopThread):
            if task is not None:
                thread.loop.call_soon_threadsafe(task.cancel)
            await asyncio.wait([call.outcome], timeout=self._grace_s)

    def _whereabouts(self, call: _Call) -> str:
        """Describe the line where the call is, or the call that blocks the loop that it waits
        for."""
        thread, task = call.thread, call.task
        if not isinstance(thread, LoopThread):
            return "" if thread is None else indented(thread.stack())
        holder = self._holder(thread)
        if holder is None:
            return "" if task is None else indented(of_coroutine(task.get_coro()))
        stack = indented(thread.stack())
        if holder.name == call.name:
            return stack
        return f"; the event loop of user code is blocked by {holder.name}{stack}"

    # -- starting and ending -------------------------------------------------------------------

    def _start(self, function: Callable[[], Any], name: str, *, on_loop: bool) -> _Call:
        caller = asyncio.get_running_loop()
        call = _Call(name, caller, caller.create_future(), contextvars.copy_context())
        call.context.run(_CALL.set, call)
        with self._lock:
            self._calls.add(call)
            self._has_calls.set()
            if self._monitor is None:
                self._monitor = threading.Thread(
                    target=self._watch, name="user code monitor", daemon=True
                )
                self._monitor.start()
            if on_loop:
                if self._loop is None:
                    self._loop = LoopThread()
                    self._loop.loop.set_task_factory(self._make_task)
                call.thread = self._loop
                self._loop.loop.call_soon_threadsafe(self._begin, call, function)
            else:
                worker = call.thread = self._idle.pop() if self._idle else Worker(self._keep)
                worker.start(lambda: self._run(call, function))
        return call

    def _make_task(self, loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        context: contextvars.Context | None = options.get("context")
        owner = _CALL.get() if context is None else context.get(_CALL)
        if owner is not None:
            self._owners[task] = owner
        return task

    def _begin(self, call: _Call, function: Callable[[], Any]) -> None:
        """Begin a call, on the event loop of user code."""
        assert isinstance(call.thread, LoopThread), "only async functions begin there"
        with self._lock:
            is_abandoned = call.abandoned_at is not None
        if is_abandoned:
            self._finish(call, None, CallFailed("was cancelled before it began"))
            return
        call.task = call.thread.loop.create_task(
            self._run_async(call, function), context=call.context
        )

    async def _run_async(self, call: _Call, function: Callable[[], Any]) -> None:
        value, failure = None, None
        try:
            value = await function()
        except BaseException as error:
            failure = error
        self._finish(call, value, failure)

    def _run(self, call: _Call, function: Callable[[], Any]) -> None:
        value, failure = None, None
        try:
            value = call.context.run(function)
        except BaseException as error:
            failure = error
        self._finish(call, value, failure)

    def _finish(self, call: _Call, value: Any, failure: BaseException | None) -> None:
        if failure is not None and not isinstance(failure, Exception):
            cause, failure = failure, CallFailed(describe(failure))
            failure.__cause__ = cause
        self._end(call)
        call.settle(value, failure)

    def _end(self, call: _Call) -> None:
        with self._lock:
            self._calls.discard(call)
            if not self._calls:
                self._has_calls.clear()

    def _keep(self, worker: Worker) -> None:
        with self._lock:
            if not worker.is_abandoned:
                self._idle.append(worker)

    # -- the monitor ---------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            self._has_calls.wait()
            with self._lock:
                loop, names = self._loop, {call.name for call in self._calls}
            if loop is not None:
                loop.ask_for_beat()
            lost_s = _doze()
            if lost_s > WARN_S and names:
                logger.warning(
                    "the Python interpreter was blocked for %.0f s, and weights could not be "
                    "received: a call into C held the GIL; running calls: %s",
                    lost_s,
                    ", ".join(sorted(names)),
                )
            if loop is not None and loop.silent_s > min(BLOCKED_S, self._grace_s):
                self._look_at_blocked(loop)
            with self._lock:
                late = [call for call in self._calls if call.abandoned_at is not None]
            for call in late:
                self._look_at_late(call)
            self._count()

    def _look_at_blocked(self, loop: LoopThread) -> None:
        """Warn of the call that blocks the loop; replace the loop if the call exceeds its limit."""
        holder, now = self._holder(loop), time.monotonic()
        name = "a task that user code left behind" if holder is None else holder.name
        with self._lock:
            is_late = any(
                call.thread is loop
                and call.abandoned_at is not None
                and now - call.abandoned_at > self._grace_s
                for call in self._calls
            )
        if is_late and (holder is None or holder.abandoned_at is not None):
            self._replace(loop, name)
        elif loop.silent_s > WARN_S:
            self._warn(
                name,
                f"has blocked the event loop of user code for {loop.silent_s:.0f} s, and other "
                "async functions are waiting: await slow operations, or make it a plain "
                "function, which runs in a thread",
                loop,
            )

    def _replace(self, loop: LoopThread, name: str) -> None:
        """Start a new loop for further calls; those on the blocked one fail."""
        self._warn(
            name, "did not end at its time limit and blocks the event loop of user code", loop
        )
        with self._lock:
            self._loop = None if self._loop is loop else self._loop
            self._lost[loop] = name
            behind = [call for call in self._calls if call.thread is loop]
        error = f"was lost: {name} blocked the event loop of user code and did not end"
        failure = f"{error}{indented(loop.stack())}"
        for call in behind:
            self._finish(call, None, CallFailed(failure))
        loop.close()
        loop.interrupt()

    def _look_at_late(self, call: _Call) -> None:
        """Interrupt sync calls beyond their limits, and name every such call."""
        thread = call.thread
        assert call.abandoned_at is not None, "only abandoned calls are late"
        if thread is None or not thread.is_alive:
            self._end(call)
            return
        late_s = time.monotonic() - call.abandoned_at
        if isinstance(thread, LoopThread):
            call.is_stuck = late_s > self._grace_s and thread.silent_s < BLOCKED_S
        elif isinstance(thread, Worker) and late_s > self._linger_s:
            with self._lock:
                if call not in self._calls:
                    return
                call.is_stuck = thread.is_abandoned = True
                thread.interrupt()
        if call.is_stuck:
            self._warn(call.name, "is still running after its time limit", thread)

    def _count(self) -> None:
        for loop in list(self._lost):
            if loop.is_alive:
                loop.interrupt()
            else:
                del self._lost[loop]
        with self._lock:
            names = [call.name for call in self._calls if call.is_stuck]
        names += self._lost.values()
        if len(names) > self._max_stuck and self.failure is None:
            self.failure = (
                f"{len(names)} calls of user code never ended and cannot be stopped: "
                f"{', '.join(sorted(set(names)))}"
            )
            logger.error("%s", self.failure)

    def _warn(self, name: str, text: str, thread: UserThread) -> None:
        """Log a warning, once for each function."""
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("%s %s%s", name, text, indented(thread.stack()))

    def _holder(self, loop: LoopThread) -> _Call | None:
        """Return the call that the running task is a part of; None without one."""
        task = asyncio.current_task(loop.loop)
        return None if task is None else self._owners.get(task)


def _doze() -> float:
    """Sleep one tick; return the seconds beyond it that this thread did not get to run.

    If the interpreter is blocked for `DUMP_S`, a thread outside of it writes all stacks to stderr.
    """
    started = time.monotonic()
    stderr = sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(DUMP_S, file=stderr)
    time.sleep(TICK_S)
    if stderr is not None:
        faulthandler.cancel_dump_traceback_later()
    return time.monotonic() - started - TICK_S


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it makes a coroutine."""
    inner = getattr(function, "func", function)  # of a partial
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
        getattr(inner, "__call__", None)  # noqa: B004 - the method, not whether it is there
    )


@lru_cache(maxsize=1)
def shared() -> UserCode:
    """Return the instance of this process."""
    return UserCode()
