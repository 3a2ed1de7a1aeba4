"""A process that checks answers, one after the other; it is killed when a check hangs.

Reads requests from standard input, each eight bytes of length and a pickled (name, arguments);
writes one JSON object per line, `{"value": ...}` or `{"error": ...}`. Ends with its parent.

Libraries evaluate some answers as Python, reasoning-gym's among them. So the process has no credentials,
and the kernel refuses to let it start others, connect to anything or change a file.
"""

import ctypes
import importlib
import io
import json
import logging
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

from raylearner.sandbox import seccomp

MEMORY_BYTES = 4 << 30
"""Address space of the process: answers such as 9**9**9**9 end there."""
LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1
_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}\b")


def import_library(name: str) -> None:
    """Import a library before the first check needs it."""
    importlib.import_module(name)


def check_math(answers: tuple[str, ...], given: str) -> float | None:
    """Return 1 when `given` equals one of `answers` by math-verify; None where none can be parsed."""
    verify: Any = importlib.import_module("math_verify").verify
    golds = [gold for gold in (_parse_gold(answer) for answer in answers) if gold]
    if not golds:
        return None
    found = _parse(given)
    return float(any(verify(gold, found, timeout_seconds=None) for gold in golds))


@lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> Any:
    return _parse(answer)


def _parse(text: str) -> Any:
    """Return math-verify's reading of a text, with dollars around a formula without words.

    Without them math-verify would only find a number in `1+x^2`.
    """
    parse: Any = importlib.import_module("math_verify").parse
    if any(mark in text for mark in _DELIMITERS):
        return parse(text, parsing_timeout=None)
    has_words = _WORD.search(text) is not None
    forms = [text, f"${text}$"] if has_words else [f"${text}$", text]
    found: Any = None
    for form in forms:
        found = found or parse(form, parsing_timeout=None)
    return found


def check_reasoning(
    task: str, parameters: dict[str, Any], entry: dict[str, Any], given: str
) -> float:
    """Return a reasoning-gym task's score of an answer, from 0 to 1."""
    return float(_task(task, json.dumps(parameters, sort_keys=True)).score_answer(given, entry))


@lru_cache(maxsize=256)
def _task(name: str, parameters: str) -> Any:
    make: Any = importlib.import_module("reasoning_gym").create_dataset
    return make(name, size=1, seed=0, **json.loads(parameters))


CHECKS: dict[str, Callable[..., float | None]] = {
    "import": import_library,
    "math": check_math,
    "reasoning": check_reasoning,
}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Reply to requests until the input ends."""
    while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        name, arguments = pickle.loads(requests.read(int.from_bytes(head)))
        try:
            reply: dict[str, Any] = {"value": CHECKS[name](*arguments)}
        except Exception as error:  # a library's exception is this request's reply
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def main() -> None:
    """Serve on the standard streams; libraries' prints go to standard error."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    seccomp.confine()
    logging.disable(logging.WARNING)
    replies = io.FileIO(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, io.BufferedWriter(replies))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
