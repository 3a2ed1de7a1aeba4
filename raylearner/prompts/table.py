"""Prompts from tables: JSONL, Parquet, datasets of the Hugging Face hub."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from raylearner.config.data import HubData, JsonlData, ParquetData
from raylearner.errors import ConfigError
from raylearner.types import Message, Prompt, Role

Table = JsonlData | ParquetData | HubData

_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
_OPTIONAL = ("answer_column", "doc_id_column", "prompt_id_column")


def table_prompts(source: Table) -> list[Prompt]:
    """One prompt a row. Raises `ConfigError` with the first bad row, or why nothing can be read."""
    rows = islice(_rows(source), source.max_prompts)
    return [_prompt(source, row, where) for row, where in rows]


def _rows(source: Table) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row and its place in words."""
    match source:
        case JsonlData():
            return _jsonl(_existing(source.path, "JSONL"))
        case ParquetData():
            return _parquet(_existing(source.path, "Parquet"))
        case HubData():
            return _hub(source)


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
        said = str(error).splitlines()[0]
        raise ConfigError(f"data: {path} is no Parquet file that can be read: {said}") from error


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
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"data: split {source.split!r} of {named} cannot be loaded: {said}; without a network,"
            " give a directory that holds it, or fill the hub's cache (HF_HOME) beforehand"
        ) from error
    for number, row in enumerate(rows, 1):
        yield dict(row), f"{source.path} [{source.split}] row {number}"


def _prompt(source: Table, row: dict[str, Any], where: str) -> Prompt:
    raw = row.get(source.prompt_column)
    if raw is None:
        raise ConfigError(
            f"{where}: no prompt in column {source.prompt_column!r}; the row has: {_listed(row)}"
        )
    known = {source.prompt_column}
    for key in _OPTIONAL:
        column = getattr(source, key)
        if column == type(source).model_fields[key].default:
            known.add(column)
        elif column not in row:
            raise ConfigError(f"{where}: no column {column!r} ({key}); the row has: {_listed(row)}")
    answers = _answers(row.get(source.answer_column))
    doc_id, prompt_id = row.get(source.doc_id_column), row.get(source.prompt_id_column)
    return Prompt(
        prompt_id=where if prompt_id is None else str(prompt_id),
        messages=_messages(raw, where),
        answer=answers[0] if answers else None,
        other_answers=answers[1:],
        doc_id=None if doc_id is None else str(doc_id),
        source=source.source_name,
        columns={str(name): value for name, value in row.items() if name not in known},
        is_conversational=not isinstance(raw, str),
    )


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "nothing"


def _answers(raw: object) -> tuple[str, ...]:
    if raw is None:
        return ()
    values = cast(list[object], raw) if isinstance(raw, list | tuple) else [raw]
    return tuple(str(value) for value in values)


def _messages(raw: object, where: str) -> tuple[Message, ...]:
    if isinstance(raw, str):
        if not raw.strip():
            raise ConfigError(f"{where}: the prompt is empty")
        return (Message(role="user", content=raw),)
    if not isinstance(raw, list) or not raw:
        raise ConfigError(
            f"{where}: a prompt is text or a list of messages, got {type(raw).__name__}"
        )
    return tuple(_message(message, where) for message in cast(list[Any], raw))


def _message(message: Any, where: str) -> Message:
    is_message = isinstance(message, dict) and isinstance(message.get("content"), str)  # pyright: ignore[reportUnknownMemberType]
    if not is_message or message.get("role") not in _ROLES:
        raise ConfigError(
            f"{where}: a message needs a role ({', '.join(_ROLES)}) and text content,"
            f" got {message!r}"
        )
    return Message(role=message["role"], content=message["content"])
