"""Failed episodes on record in a run directory."""

import json
from pathlib import Path
from typing import Any, cast

from raylearner.errors import ConfigError
from raylearner.observability.jsonl import read_lines
from raylearner.observability.run_directory import FAILURES_FILE


def read_failures(run_dir: Path) -> list[dict[str, Any]]:
    """Return the recorded failed episodes, the first of each kind, without damaged lines."""
    path = run_dir / FAILURES_FILE
    found: list[dict[str, Any]] = []
    for line in read_text_lines(path) if path.is_file() else ():
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(cast(dict[str, Any], record).get("error"), str):
            found.append(cast(dict[str, Any], record))
    return found


def read_text_lines(path: Path) -> list[str]:
    """Return the complete lines of a file. Raises `ConfigError` if it cannot be read as text."""
    try:
        return read_lines(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}; choose another step") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
