"""What a process of this machine is doing: its state, and its Python stacks if it can write them.

A process that calls `register` writes the stacks of its threads, on a signal, into memory that other
processes of the same user can read. Nothing is left in any folder.
"""

import faulthandler
import os
import signal
import time
from pathlib import Path

SIGNAL = signal.SIGUSR2
"""Free in Ray, torch and vLLM."""
MEMORY_NAME = "raylearner-stacks"
DUMP_TIMEOUT_S = 2.0
"""Maximum wait for the stacks of a process."""
POLL_S = 0.05
MAX_LINES = 40
"""Maximum number of lines of one process's stacks."""

_memory: int | None = None


def register() -> None:
    """Let other processes request the stacks of this one. Safe to call twice."""
    global _memory
    if _memory is None and hasattr(os, "memfd_create"):
        _memory = os.memfd_create(MEMORY_NAME)
        faulthandler.register(SIGNAL, file=_memory, all_threads=True)


def describe(pid: int) -> list[str]:
    """Return the state of a process of this machine, and its stacks where it writes them in time."""
    state = _read(pid, "status").partition("State:")[2].partition("\n")[0].strip()
    if not state:
        return ["it has ended"]
    waits_in = _read(pid, "wchan").strip("0\n ")
    lines = [f"state {state}" + (f", waits in {waits_in}" if waits_in else "")]
    memory = None if state[0] in "TtZX" else _find_memory(pid)
    return lines if memory is None else [*lines, *_dump(pid, memory)]


def _dump(pid: int, memory: Path) -> list[str]:
    """Signal a process that called `register`, and return what it writes."""
    try:
        start = memory.stat().st_size
        os.kill(pid, SIGNAL)
        size, deadline = start, time.monotonic() + DUMP_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            last, size = size, memory.stat().st_size
            if size == last > start:
                break
        text = memory.read_bytes()[start:].decode(errors="replace")
    except OSError as error:
        return [f"no stack: {error}"]
    threads = [thread.splitlines() for thread in text.strip().split("\n\n") if thread]
    # Threads in our code tell most.
    threads.sort(key=lambda thread: not any("/raylearner/" in line for line in thread))
    return [line for thread in threads for line in thread][:MAX_LINES]


def _find_memory(pid: int) -> Path | None:
    """Return the file of a process that called `register`; others would end by the signal."""
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if str(entry.readlink()).startswith(f"/memfd:{MEMORY_NAME}"):
                return entry
    except OSError:
        pass
    return None


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
