"""Spans of time, collected in every process and written as a Chrome trace for Perfetto.

Actors keep a bounded number in memory until the controller drains them; only the recorder writes.
"""

import asyncio
import itertools
import json
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from raylearner.errors import naming

Argument: TypeAlias = str | int | float | bool

MAX_TRACE_EVENTS = 500_000
"""Maximum number of events in a trace file (about 80 MB); later ones are counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of one track from `start_s` (seconds since the epoch) for `duration_s`."""

    track: str
    name: str
    start_s: float
    duration_s: float
    context: int = 0
    """Thread or asyncio task; spans of one nest, spans of several overlap."""
    arguments: Mapping[str, Argument] = field(default_factory=dict[str, Argument])

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(slots=True)
class OpenSpan:
    """The name and arguments of a running span, which the block may change."""

    name: str
    arguments: dict[str, Argument]


class Tracer:
    """Collects the spans of one track, such as an actor, from any thread or task.

    Keeps the newest `max_spans` and counts those it dropped.
    """

    def __init__(self, track: str, *, max_spans: int = 50_000, is_enabled: bool = True) -> None:
        self.track = track
        self.is_enabled = is_enabled
        self.num_forgotten = 0
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **arguments: Argument) -> Iterator[OpenSpan]:
        """Record the block as a span, with the name of an error that it raises."""
        span = OpenSpan(name, arguments)
        if not self.is_enabled:
            yield span
            return
        start_s, tick = time.time(), time.perf_counter()
        try:
            yield span
        except BaseException as error:
            span.arguments["error"] = type(error).__name__
            raise
        finally:
            duration_s = time.perf_counter() - tick
            self.add(Span(self.track, span.name, start_s, duration_s, _context(), span.arguments))

    def since(self, name: str, started_s: float, **arguments: Argument) -> None:
        """Record a span from `started_s` (seconds since the epoch) until now."""
        if self.is_enabled:
            duration_s = max(0.0, time.time() - started_s)
            self.add(Span(self.track, name, started_s, duration_s, _context(), arguments))

    def add(self, span: Span) -> None:
        with self._lock:
            self.num_forgotten += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """Return the spans since the last drain, in the order in which they ended."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
        return spans


def _context() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else id(task)


class TraceFile:
    """A Chrome trace in JSON array form, appended to as spans arrive.

    After a crash the array lacks its closing bracket, which trace viewers accept; `close` writes
    it, and an existing file is continued after its last complete line.
    """

    def __init__(self, path: Path, *, max_events: int = MAX_TRACE_EVENTS) -> None:
        self.num_dropped = 0
        self._path = path
        self._max_events = max_events
        self._num_events = 0
        self._tracks: dict[str, _Lanes] = {}
        self._file = path.open("ab+")
        self._continue()

    def write(self, spans: Iterable[Span]) -> None:
        with naming(self._path):
            self._write(spans)

    def _write(self, spans: Iterable[Span]) -> None:
        ordered = sorted(spans, key=lambda span: (span.track, span.start_s, -span.duration_s))
        for track, group in itertools.groupby(ordered, key=lambda span: span.track):
            process = zlib.crc32(track.encode()) & 0x7FFFFFFF
            if track not in self._tracks:
                self._tracks[track] = _Lanes()
                named = {"name": "process_name", "ph": "M", "pid": process, "tid": 0}
                self._append(named | {"args": {"name": track}})
            for span in group:
                if self._num_events >= self._max_events:
                    self.num_dropped += 1
                    continue
                self._append(
                    {
                        "name": span.name,
                        "ph": "X",
                        "ts": round(span.start_s * 1e6),
                        "dur": round(span.duration_s * 1e6),
                        "pid": process,
                        "tid": self._tracks[track].place(span),
                        "args": dict(span.arguments),
                    }
                )
        self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        count = {"count": self.num_dropped}
        dropped = {"name": "dropped", "ph": "M", "pid": 0, "tid": 0, "args": count}
        with naming(self._path):
            try:
                self._append(dropped, end="\n]\n")
            finally:
                self._file.close()

    def _append(self, event: Mapping[str, object], *, end: str = ",\n") -> None:
        self._num_events += 1
        self._file.write((json.dumps(event) + end).encode())

    def _continue(self) -> None:
        """Remove an incomplete last line or the closing bracket, so that events can follow."""
        self._file.seek(0)
        content = self._file.read()
        if not content.startswith(b"["):
            self._file.truncate(0)
            self._file.write(b"[\n")
            return
        lines = content.splitlines(keepends=True)[1:]
        kept = [line for line in lines if line.endswith(b"},\n")]
        self._num_events = len(kept)
        self._file.truncate(0)
        self._file.seek(0, os.SEEK_END)
        self._file.write(b"[\n" + b"".join(kept))


class _Lanes:
    """Rows of one track: spans share a row if they follow each other, or nest in one context."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def place(self, span: Span) -> int:
        for index, row in enumerate(self._rows):
            if row.takes(span):
                row.add(span)
                return index
        self._rows.append(_Row())
        self._rows[-1].add(span)
        return len(self._rows) - 1


class _Row:
    def __init__(self) -> None:
        self._open: list[Span] = []
        self._last_start_s = 0.0
        self._last_end_s = 0.0

    def takes(self, span: Span) -> bool:
        if span.start_s >= self._last_end_s:
            return True
        if span.start_s < self._last_start_s:
            return False
        parents = [parent for parent in self._open if parent.end_s > span.start_s]
        return all(p.context == span.context and p.end_s >= span.end_s for p in parents)

    def add(self, span: Span) -> None:
        self._open = [parent for parent in self._open if parent.end_s > span.start_s]
        self._open.append(span)
        self._last_start_s = span.start_s
        self._last_end_s = max(self._last_end_s, span.end_s)
