"""Prompts from tables: JSONL, Parquet, datasets of the Hugging Face hub."""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

from raylearner.config.data import FileData, HubData
from raylearner.data.cells import read_answers, scalar_text
from raylearner.data.dialogue import read_dialogue
from raylearner.data.images import check_images, read_images, with_images
from raylearner.errors import ConfigError, DialogueError
from raylearner.types import Message, Prompt

Table = FileData | HubData

_MESSAGES = re.compile(
    r"\s*(?:\[\s*\{|\{)\s*(['\"])(?:role\1\s*:[\s\S]*\bcontent\b|from\1\s*:\s*['\"](?:human|system)['\"])"
)
"""The beginning of messages in JSON, in Python's notation, and in ShareGPT's form."""
_OPTIONAL = ("answer_column", "doc_id_column", "prompt_id_column")


def table_prompts(source: Table, *, max_images: int | None = None) -> list[Prompt]:
    """Read one prompt a row. Raises `ConfigError` with the first bad row, or the reason why nothing
    can be read.

    Rows with more than `max_images` images are refused.
    """
    rows = islice(_rows(source), source.max_prompts)
    placed = [(_read(source, row, where), where) for row, where in rows]
    check_images(placed, max_images=max_images)
    return [prompt for prompt, _ in placed]


def _rows(source: Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each row and a description of its place."""
    if isinstance(source, HubData):
        return _hub(source)
    if source.kind == "jsonl":
        return _jsonl(_existing(source.path, "JSONL"))
    return _parquet(_existing(source.path, "Parquet"))


def _existing(path: str, form: str) -> Path:
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigError(f"data: {path} does not exist; give the path of a {form} file")
    return found


def _jsonl(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{where}: not JSON ({error.msg} at column {error.colno})"
                ) from error
            except RecursionError as error:
                raise ConfigError(f"{where}: nested too deeply; flatten it") from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 text ({error.reason})") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: a row must be an object, got {type(row).__name__}")
            yield cast(dict[str, Any], row), where


def _parquet(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"data: {path} needs the package pyarrow ({error}); install it from requirements.txt"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path} row {number}"
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"data: {path} is not a readable Parquet file: {reason}") from error


def _hub(source: HubData) -> Iterator[tuple[dict[str, Any], str]]:
    named = f"{source.path!r}" + (f", configuration {source.config!r}" if source.config else "")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data: {named} needs the package datasets ({error}); install it from requirements.txt"
        ) from error
    try:
        rows: Any = datasets.load_dataset(
            source.path, source.config, split=source.split, revision=source.revision
        )
    except Exception as error:  # of many libraries: hub, files, builders
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"data: split {source.split!r} of {named} cannot be loaded: {reason}; without a network,"
            " give a directory that holds it, or fill the hub's cache (HF_HOME) beforehand"
        ) from error
    rows = _with_encoded_images(rows, source.image_column)
    for number, row in enumerate(rows, 1):
        yield dict(row), f"{source.path} [{source.split}] row {number}"


def _with_encoded_images(rows: Any, column: str | None) -> Any:
    """Keep images of the column encoded, which `datasets` would decode."""
    import datasets

    feature = rows.features.get(column)
    if isinstance(feature, datasets.Image):
        return rows.cast_column(column, datasets.Image(decode=False))
    if isinstance(getattr(feature, "feature", None), datasets.Image):
        return rows.cast_column(column, type(feature)(datasets.Image(decode=False)))
    return rows


def _read(source: Table, row: dict[str, Any], where: str) -> Prompt:
    try:
        return _prompt(source, row, where)
    except RecursionError as error:
        raise ConfigError(f"{where}: a column is nested too deeply; flatten it") from error


def _cell(row: dict[str, Any], column: str) -> Any:
    """Return the value of a column, or of a field inside one, such as `reward_model.ground_truth`."""
    if column in row or "." not in column:
        return row.get(column)
    value: Any = row
    for part in column.split("."):
        value = cast(dict[str, Any], value).get(part) if isinstance(value, dict) else None
    return value


def _prompt(source: Table, row: dict[str, Any], where: str) -> Prompt:
    raw = _cell(row, source.prompt_column)
    if raw is None:
        raise ConfigError(
            f"{where}: no prompt in column {source.prompt_column!r}; the row has: {_listed(row)}"
        )
    known = {source.prompt_column}
    for key in _OPTIONAL:
        column = getattr(source, key)
        if column == type(source).model_fields[key].default:
            known.add(column)
        elif column not in row and _cell(row, column) is None:
            raise ConfigError(f"{where}: no column {column!r} ({key}); the row has: {_listed(row)}")
    messages = _messages(source, raw, where)
    if source.image_column is not None:
        known.add(source.image_column)
        messages = _shown(source, source.image_column, row, messages, where)
    answers = read_answers(_cell(row, source.answer_column), where, source.answer_column)
    doc_id = _id(row, source.doc_id_column, where)
    prompt_id = _id(row, source.prompt_id_column, where)
    return Prompt(
        prompt_id=where if prompt_id is None else prompt_id,
        messages=messages,
        answer=answers[0] if answers else None,
        other_answers=answers[1:],
        doc_id=doc_id,
        source=source.source_name,
        columns={str(name): value for name, value in row.items() if name not in known},
        is_conversational=not isinstance(raw, str) or _is_dialogue(raw),
        prefill=source.prefill,
        place=where,
    )


def _shown(
    source: Table, column: str, row: dict[str, Any], messages: tuple[Message, ...], where: str
) -> tuple[Message, ...]:
    if column not in row:
        raise ConfigError(
            f"{where}: no column {column!r} (image_column); the row has: {_listed(row)}"
        )
    is_file = isinstance(source, FileData)
    path = Path(source.path).expanduser()
    folders = [path.parent] if is_file else [path, *_hub_caches()]
    images = read_images(row[column], folders=folders, where=where)
    return with_images(messages, images, mark=source.image_mark, where=where)


@lru_cache(maxsize=1)
def _hub_caches() -> tuple[Path, ...]:
    """Return the folders to which files of the hub are downloaded."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub import constants

    return (Path(HF_DATASETS_CACHE), Path(constants.HF_HUB_CACHE))


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "nothing"


def _id(row: dict[str, Any], column: str, where: str) -> str | None:
    value = row.get(column)
    if value is None:
        return None
    try:
        return scalar_text(value)
    except ValueError as error:
        raise ConfigError(f"{where}: column {column!r} {error}") from error


def _messages(source: Table, raw: object, where: str) -> tuple[Message, ...]:
    if isinstance(raw, str) and not _is_dialogue(raw):
        if not raw.strip():
            raise ConfigError(f"{where}: the prompt is empty")
        return (Message(role="user", content=raw),)
    if not isinstance(raw, str | list) or not raw:
        raise ConfigError(
            f"{where}: a prompt is text or a list of messages, got {type(raw).__name__}"
        )
    try:
        return read_dialogue(
            raw,
            image_mark=None if source.image_column is None else source.image_mark,
            drops_nulls=source.kind != "jsonl",
            prefill=source.prefill,
        )
    except DialogueError as error:
        cure = (
            "; set `prefill: true` in the source to let the policy continue it"
            if error.is_last
            else ""
        )
        raise ConfigError(f"{where}: column {source.prompt_column!r}: {error}{cure}") from error


def _is_dialogue(text: str) -> bool:
    """Return whether a text is a JSON list of messages: it has one with a role, or begins like one.

    Text that is JSON in part, or lacks its list, is refused where messages are read.
    """
    if not text.lstrip().startswith(("[", "{")):
        return False
    if _MESSAGES.match(text):
        return True
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    entries = cast(list[Any], value) if isinstance(value, list) else [value]
    return any(isinstance(e, dict) and "role" in e and "content" in e for e in entries)
