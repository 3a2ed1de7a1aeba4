"""`python -m benchmarks.faults.dies SPAN COUNT DELAY_S train ..` is the command line with an end of its own.

The driver kills itself with SIGKILL, `DELAY_S` seconds after the span whose name begins with `SPAN`
was entered for the `COUNT`-th time. The spans are those of the run's trace.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from raylearner import cli
from raylearner.observability.spans import Tracer


def die_in(prefix: str, *, count: int, delay_s: float) -> None:
    """Arm the kill for this process."""
    original: Callable[..., AbstractContextManager[Any]] = Tracer.span
    seen = 0

    def span(self: Tracer, name: str, **arguments: Any) -> AbstractContextManager[Any]:
        nonlocal seen
        seen += name.startswith(prefix)
        if seen == count and name.startswith(prefix):
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        return original(self, name, **arguments)

    Tracer.span = span  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    prefix, count, delay_s = sys.argv[1:4]
    die_in(prefix, count=int(count), delay_s=float(delay_s))
    sys.argv[1:] = sys.argv[4:]
    cli.main()
