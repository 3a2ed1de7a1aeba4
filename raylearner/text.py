"""Text and JSON from outside: made encodable on entry, strict on exit, and safe to print.

Models, datasets, services and user code produce strings that UTF-8 cannot encode, numbers that are
not finite, and control characters. All other modules rely on this one.
"""

import base64
import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from functools import cache
from operator import is_
from typing import Any, NoReturn, TypeAlias, cast

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Controls of C0 and C1 but for tab and newline, separators and directions of Unicode, surrogates."""

_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

_WITHOUT_TEXT = frozenset((bool, int, float, bytes, type(None)))
"""Types of most values, passed over first."""

Metrics: TypeAlias = dict[str, float]


def encodable(text: str) -> str:
    """Replace every unpaired surrogate by U+FFFD, and join pairs."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encodable_values(value: Any) -> Any:
    """Return `value` with every text in it encodable: mappings, their keys, lists and tuples.

    Values that need no change are returned unchanged. Raises `RecursionError` for values nested too
    deeply.
    """
    if type(value) in _WITHOUT_TEXT:
        return value
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list | tuple):
        old = cast(list[Any] | tuple[Any, ...], value)
        new = [encodable_values(item) for item in old]
        if all(map(is_, old, new)):
            return cast(Any, value)
        return new if isinstance(value, list) else tuple(new)
    if isinstance(value, Mapping):
        items = list(cast(Mapping[Any, Any], value).items())
        cleaned = [(encodable_values(key), encodable_values(item)) for key, item in items]
        pairs = zip(items, cleaned, strict=True)
        is_same = all(old[0] is new[0] and old[1] is new[1] for old, new in pairs)
        return cast(Any, value) if is_same else dict(cleaned)
    return value


def encodable_json(content: bytes) -> bytes:
    """Rewrite JSON for strict readers if it contains an unpaired surrogate.

    Content that is not JSON is returned unchanged.
    """
    if not _SURROGATE_BYTES.search(content):
        return content
    try:
        return json.dumps(encodable_values(json.loads(content))).encode()
    except (ValueError, RecursionError):
        return content


def make_encodable(record: Any) -> None:
    """Make the text of a frozen dataclass encodable, as its `__post_init__`."""
    for name in _field_names(type(record)):
        value = getattr(record, name)
        if type(value) in _WITHOUT_TEXT:
            continue
        cleaned = encodable_values(value)
        if cleaned is not value:
            object.__setattr__(record, name, cleaned)


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def visible(text: str) -> str:
    r"""Escape control characters, as `\x1b` and `\u202e`; newlines and tabs stay.

    A terminal then does not interpret them, and a line stays a line.
    """
    return _CONTROLS.sub(lambda found: _escape(ord(found.group())), text)


def finite_or_nan(value: object) -> float:
    """Return a number as a finite float; NaN for any other value that user code reports."""
    try:
        number = float(cast(Any, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        return math.nan
    return number if math.isfinite(number) else math.nan


def as_metrics(values: Mapping[Any, object]) -> Metrics:
    """Return metrics of users' code by encodable names; values that are not finite numbers are
    NaN."""
    return {encodable(str(name)): finite_or_nan(value) for name, value in values.items()}


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def outside(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return the characters of `text` outside of `spans`, which are in order."""
    parts: list[str] = []
    position = 0
    for start, end in spans:
        parts.append(text[position:start])
        position = end
    return "".join((*parts, text[position:]))


def pairs(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each content between `opening` and the next `closing`, in linear time."""
    position = 0
    while (start := text.find(opening, position)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            return
        yield start, end
        position = end + len(closing)


Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def to_json_types(value: object) -> Json:
    """Convert `value` to JSON's own types.

    | value | JSON |
    |---|---|
    | NaN and infinities | null |
    | scalars of numpy and torch | the plain value |
    | arrays, tuples, sets | lists |
    | dates and times | text in ISO 8601 |
    | durations | seconds |
    | decimals | text, every digit kept |
    | bytes | text in base64 |
    | keys of mappings | text |
    | any other value | `str` of it |
    """
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)  # the plain text of an enumeration's
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            items = cast(Mapping[object, object], value).items()
            return {str(key): to_json_types(item) for key, item in items}
        case list() | tuple():
            return [to_json_types(item) for item in cast(list[object], value)]
        case set() | frozenset():
            return [to_json_types(item) for item in sorted(cast(set[object], value), key=repr)]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
        case Decimal():
            return str(value) if value.is_finite() else None
        case _:
            return _other(value)


def dump_json(value: object, *, indent: int | None = None) -> str:
    """Return strict JSON, in ASCII, of encodable text."""
    return json.dumps(encodable_values(to_json_types(value)), allow_nan=False, indent=indent)


def load_json(text: str | bytes) -> Any:
    """Parse strict JSON. Raises `ValueError` for anything else, bare NaN and infinities
    included."""
    return json.loads(text, parse_constant=_refuse)


def _other(value: Any) -> Json:
    """Convert arrays and their scalars, which have a `tolist`; return any other value as text."""
    as_list = getattr(value, "tolist", None)
    if callable(as_list):
        listed = as_list()
        if type(listed) is not type(value):
            return to_json_types(listed)
    return str(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON; write null")
