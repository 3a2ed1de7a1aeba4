"""JSON lines on disk: flushed row by row, without NaN, and truncated after a rollback."""

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylearner.errors import naming
from raylearner.text import to_json_types

_UNSAFE = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


class JsonlFile:
    """Appends one object per line. An incomplete last line is removed when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a row. Raises `OSError` with the path, also if the file was removed meanwhile."""
        with naming(self.path):
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise OSError(errno.ENOENT, "removed while the run was writing it")
            self._file.write(dumps(record) + "\n")
            self._file.flush()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path)

    def rewind(self, step: int) -> int:
        """Remove the rows of later steps and return their number."""
        rows = self.rows()
        kept = [row for row in rows if row.get("step", 0) <= step]
        if len(kept) < len(rows):
            draft = self.path.with_suffix(".partial")
            with naming(draft):
                draft.write_text("".join(dumps(row) + "\n" for row in kept), encoding="utf-8")
            self._file.close()
            os.replace(draft, self.path)
            self._file = self.path.open("a", encoding="utf-8")
        return len(rows) - len(kept)

    def close(self) -> None:
        with naming(self.path):
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a file, none if it does not exist."""
    lines = read_lines(path) if path.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


def read_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, without the one being written.

    Only a newline ends a line: `str.splitlines` would also split a model's text at other Unicode
    separators.
    """
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def dumps(record: object) -> str:
    """Return standard JSON on one line, with NaN and infinities as null.

    Unicode separators are escaped, for readers that split lines at them, and so are unpaired surrogates,
    which UTF-8 cannot encode.
    """
    text = json.dumps(to_json_types(record), ensure_ascii=False, allow_nan=False)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
