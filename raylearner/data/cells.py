"""Cells of tables: their text, accepted answers, and a hash that identifies a row."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import astuple
from datetime import date, datetime, time
from decimal import Decimal
from math import isfinite
from typing import Any, cast

from raylearner.errors import ConfigError
from raylearner.types import Prompt

HASH_CHARACTERS = 16
"""Hexadecimal digits of a row's hash."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def scalar_text(value: object) -> str:
    """Return one cell as text: whole numbers without a fraction, decimals without an exponent.

    Raises `ValueError` for values without a single spelling: truth values, null, NaN, bytes, lists
    and mappings.
    """
    match value:
        case str():
            return value
        case bool():
            pass
        case int() | date() | datetime() | time():
            return str(value)
        case float() | Decimal() if isfinite(value):
            exact = Decimal(str(value))
            return str(int(exact)) if exact == int(exact) else format(exact, "f")
        case _:
            pass
    raise ValueError(f"must be text or a finite number, got {value!r:.200}")


def content_hash(prompt: Prompt) -> str:
    """Return a hash of a row's content: messages with images, accepted answers, document and
    columns.

    Its file, position, id and source name do not count: the same content from another place is the
    same row.
    """
    digest = hashlib.sha256()
    messages = [
        (
            m.role,
            m.content,
            m.images,
            m.call_id,
            m.name,
            m.reasoning,
            [astuple(call) for call in m.calls],
        )
        for m in prompt.messages
    ]
    content = (messages, prompt.answers, prompt.doc_id, prompt.is_conversational, prompt.columns)
    digest.update(_canonical(content))
    return digest.hexdigest()[:HASH_CHARACTERS]


def _canonical(value: object) -> bytes:
    """Return bytes that are equal for equal values, and unambiguous: every part carries its
    length."""
    match value:
        case Mapping():
            items = cast(Mapping[Any, Any], value).items()
            parts = sorted(_canonical(key) + _canonical(item) for key, item in items)
        case list() | tuple():
            parts = [_canonical(item) for item in cast(list[Any], value)]
        case set() | frozenset():
            parts = sorted(_canonical(item) for item in cast(set[Any], value))
        case bytes():
            parts = [value]
        case str():
            parts = [value.encode("utf-8", "surrogatepass")]
        case _:
            parts = [_ADDRESS.sub("", repr(value)).encode()]
    kind = type(value).__name__ if not isinstance(value, tuple) else "list"
    return b"".join([f"{kind}{len(parts)}:".encode(), *(b"%d:%b" % (len(p), p) for p in parts)])


def read_answers(value: object, where: str, column: str) -> tuple[str, ...]:
    """Return all accepted answers of one cell: text, numbers, truth values, or a list of these.

    Null and blank text are not answers. `true` is accepted in both spellings, `true` and `True`.
    Raises `ConfigError` with the row for anything else.
    """
    values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
    texts = [text for one in values for text in _texts(one, where, column)]
    return tuple(dict.fromkeys(text for text in texts if text.strip()))


def _texts(value: object, where: str, column: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (str(value).lower(), str(value))
    try:
        return (scalar_text(value),)
    except ValueError as error:
        raise ConfigError(
            f"{where}: an answer in column {column!r} {error}; expected text, a number, a truth"
            " value, or a list of these: name such a column as answer_column"
        ) from error
