"""Logging setup: the console, a run's log.txt, and levels of libraries."""

import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import TextIO

from raylearner.credentials import mask
from raylearner.observability.lines import STAMP_WIDTH, WIDTH
from raylearner.text import visible

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
CONSOLE_FORMAT = "%(asctime)s %(message)s"
TIME_FORMAT = "%H:%M:%S"

IN_PANEL = "is_in_panel"
"""Attribute of records that a terminal does not get, since its live panel shows them."""

NOISY = ("ray", "vllm", "transformers", "torch", "filelock", "urllib3", "httpx", "asyncio")
"""Libraries whose messages below a warning are dropped."""


class VisibleFormatter(logging.Formatter):
    """Escapes control characters, so that texts of models and services cannot control a terminal, and
    masks credentials, which errors of clients may quote."""

    def format(self, record: logging.LogRecord) -> str:
        return mask(visible(super().format(record)))


class ConsoleFormatter(VisibleFormatter):
    """Marks warnings, which look like other lines on the console."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.WARNING:
            record.message = f"warning: {record.message}"
        return super().formatMessage(record)


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live display replaces; on a terminal, long lines are
    folded between words."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(ConsoleFormatter(CONSOLE_FORMAT, TIME_FORMAT))

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_repeated = hasattr(record, IN_PANEL) and _terminal_width(self.stream) is not None
        return False if is_repeated else super().filter(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        width = _terminal_width(self.stream)
        return text if width is None else fold(text, width)


def _terminal_width(stream: TextIO) -> int | None:
    """Return the width of a terminal; None for a file or a pipe."""
    try:
        if not stream.isatty():
            return None
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (AttributeError, OSError, ValueError):  # a stream without a descriptor, or a closed one
        return None


def fold(text: str, width: int) -> str:
    """Fold lines longer than `width` between words, indented below their message.

    Indented lines stay, such as tracebacks and commands to copy.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith((" ", "\t")):
            lines.append(line)
        else:
            lines += textwrap.wrap(
                line,
                width,
                subsequent_indent=" " * STAMP_WIDTH,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


class LogFile(logging.FileHandler):
    """A log file whose first write error is reported on the console and otherwise ignored."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        error = sys.exception()
        cause = error.strerror if isinstance(error, OSError) else repr(error)
        sys.stderr.write(f"{self.baseFilename}: the log cannot be written: {cause}\n")


def set_up(level: int = logging.INFO) -> None:
    """Log this package to the console, and only warnings of libraries. Safe to call twice.

    Called by the command line and by every actor process.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, ConsoleHandler) for handler in root.handlers):
        root.addHandler(ConsoleHandler())
    logging.getLogger("raylearner").setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def add_file(path: Path) -> logging.Handler:
    """Append the log to `path` as well; pass the handler to `remove` at the end."""
    handler = LogFile(path)
    handler.setFormatter(VisibleFormatter(FORMAT))
    logging.getLogger().addHandler(handler)
    return handler


def remove(handler: logging.Handler) -> None:
    logging.getLogger().removeHandler(handler)
    handler.close()
