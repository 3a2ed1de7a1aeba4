"""JSON as every reader takes it, of whatever a row, a model or a user's function holds.

Python's `json` writes NaN and infinities bare, which no other reader takes, and nothing that is not one
of JSON's own types. Here:

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
| all else | `str` of it |
"""

import base64
import datetime
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias, cast

from raylearner.text import encodable_values

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def plain(value: object) -> Json:
    """`value` in JSON's own types, by the table above."""
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
            return {str(key): plain(item) for key, item in items}
        case list() | tuple():
            return [plain(item) for item in cast(list[object], value)]
        case set() | frozenset():
            return [plain(item) for item in sorted(cast(set[object], value), key=repr)]
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


def dumps(value: object, *, indent: int | None = None) -> str:
    """Strict JSON, in ASCII, of text that can be encoded."""
    return json.dumps(encodable_values(plain(value)), allow_nan=False, indent=indent)


def loads(text: str | bytes) -> Any:
    """What strict JSON says. Raises `ValueError` for anything else, bare NaN and infinities included."""
    return json.loads(text, parse_constant=_refuse)


def _other(value: Any) -> Json:
    """Of arrays and their scalars, which have a `tolist`; everything else as text."""
    as_list = getattr(value, "tolist", None)
    if callable(as_list):
        listed = as_list()
        if type(listed) is not type(value):
            return plain(listed)
    return str(value)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON; write null")
