"""Number of rows of data files, which turns epochs into steps."""

from pathlib import Path
from typing import Any

from raylearner.convert.files import is_file


def count_rows(sources: list[dict[str, Any]]) -> int | None:
    """Return the number of rows of local files, or None if one is not here or cannot be read."""
    counts = [_count(_path(source), source["kind"]) for source in sources]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def has_text(source: dict[str, Any], column: str) -> bool:
    """Return whether the first row of a local Parquet file has text or a number in a field of a column."""
    path = _path(source)
    if source["kind"] != "parquet" or not is_file(path):
        return False
    try:
        import pyarrow.parquet as parquet

        name, *rest = column.split(".")
        with parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=1, columns=[name]), None)
        value: Any = batch.to_pylist()[0][name] if batch is not None else None
        for part in rest:
            value = value[part]
    except (ImportError, OSError, ValueError, KeyError, TypeError, IndexError):
        return False
    return isinstance(value, str | int | float)


def _path(source: dict[str, Any]) -> Path:
    path = Path(source["path"])
    return path.expanduser() if is_file(path) else path


def _count(path: Path, kind: str) -> int | None:
    if not is_file(path):
        return None
    try:
        if kind == "jsonl":
            with path.open("rb") as lines:
                return sum(bool(line.strip()) for line in lines)
        import pyarrow.parquet as parquet

        return int(parquet.read_metadata(path).num_rows)
    except (ImportError, OSError, ValueError):
        return None
