"""Stacks of user code, where it failed or is now: without our own frames and without libraries
below it, as text for error messages.
"""

import linecache
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from raylearner.errors import RaylearnerError

MAX_FRAMES = 6
MAX_CHARACTERS = 2000
"""Maximum length of an exception's text, which may quote megabytes."""

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {
        str(Path(path).resolve())
        for path in map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))
    }
)
_MACHINERY = ("asyncio", "concurrent", "threading.py", "contextlib.py", "contextvars.py")


def describe(error: BaseException) -> str:
    """Return `raised KeyError: 'gold'`, and below it the user's frames, innermost last.

    Errors of raylearner that users' code raises on purpose keep their text, without the type.
    """
    text = _shortened(str(error))
    name = type(error).__name__
    if isinstance(error, RaylearnerError):
        message = f"failed: {text}"
    else:
        message = f"raised {name}: {text}" if text else f"raised {name}"
    return f"{message}{indented(of_error(error))}"


def of_error(error: BaseException) -> list[str]:
    """Return the user's frames in the traceback of an exception, or else of its cause."""
    seen: BaseException | None = error
    while seen is not None:
        entries = traceback.extract_tb(seen.__traceback__, limit=-200)
        if lines := _shown(entries):
            return lines
        seen = seen.__cause__ or seen.__context__
    return []


def of_frame(frame: FrameType | None) -> list[str]:
    """Return the user's frames on the stack that ends in `frame`."""
    return [] if frame is None else _shown(traceback.extract_stack(frame))


def of_coroutine(coroutine: Any) -> list[str]:
    """Return the user's frames in which a suspended coroutine waits."""
    entries: list[traceback.FrameSummary] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        code = frame.f_code
        entries.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        coroutine = coroutine.cr_await
    return _shown(entries)


def indented(lines: Iterable[str]) -> str:
    """Return the lines as shown below a message; empty for none."""
    return "".join(f"\n  {line}" for line in lines)


def _shown(entries: Iterable[traceback.FrameSummary]) -> list[str]:
    foreign = [entry for entry in entries if not _is_machinery(entry.filename)]
    own = [entry for entry in foreign if not _is_library(entry.filename)]
    lines: list[str] = []
    for entry in (own or foreign)[-MAX_FRAMES:]:
        lines.append(f'File "{entry.filename}", line {entry.lineno}, in {entry.name}')
        if code := linecache.getline(entry.filename, entry.lineno or 0).strip():
            lines.append(f"  {code}")
    return lines


def _is_machinery(filename: str) -> bool:
    """Return whether a frame is raylearner's own, or of a library between ours and the user's."""
    if filename.startswith(_PACKAGE):
        return True
    for library in _LIBRARIES:
        if filename.startswith(library):
            return filename[len(library) + 1 :].startswith(_MACHINERY)
    return filename.startswith("<frozen")


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ...[cut]"
