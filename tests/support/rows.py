"""Files of rows for prompts."""

import json
from pathlib import Path
from typing import Any

from raylearner.config.data import FileData


def write_jsonl(path: Path, *rows: object, **keys: Any) -> FileData:
    """Write rows as JSON, and text and bytes as they are, one a line; return their source."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return FileData(kind="jsonl", path=str(path), **keys)
