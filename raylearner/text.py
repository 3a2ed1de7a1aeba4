"""Text from outside: made encodable where it enters, and made visible where a person reads it.

Models, datasets, services and users' code produce strings that UTF-8 cannot encode, numbers that are
not finite, and characters that a terminal obeys. Everything further in relies on what is done here.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias, cast

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Controls of C0 and C1 but for tab and newline, separators and directions of Unicode, surrogates."""

_SURROGATE_BYTES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

Metrics: TypeAlias = dict[str, float]


def encodable(text: str) -> str:
    """The same text with U+FFFD for every half of a surrogate pair, and whole pairs joined."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encodable_values(value: Any) -> Any:
    """`value` with every text in it encodable, however deep: mappings, their keys, lists and tuples.

    What needs no change is returned as it is. Raises `RecursionError` for values nested too deeply.
    """
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        items = list(cast(Mapping[Any, Any], value).items())
        cleaned = [(encodable_values(key), encodable_values(item)) for key, item in items]
        pairs = zip(items, cleaned, strict=True)
        is_same = all(old[0] is new[0] and old[1] is new[1] for old, new in pairs)
        return cast(Any, value) if is_same else dict(cleaned)
    if isinstance(value, list | tuple):
        old = cast(list[Any] | tuple[Any, ...], value)
        new = [encodable_values(item) for item in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return cast(Any, value)
        return new if isinstance(value, list) else tuple(new)
    return value


def encodable_json(content: bytes) -> bytes:
    """JSON as strict readers take it: rewritten where it holds half a surrogate pair.

    What is not JSON is returned as it is.
    """
    if not _SURROGATE_BYTES.search(content):
        return content
    try:
        return json.dumps(encodable_values(json.loads(content))).encode()
    except (ValueError, RecursionError):
        return content


def make_encodable(record: Any) -> None:
    """The `__post_init__` of frozen dataclasses that hold text from outside."""
    for field in fields(record):
        value = getattr(record, field.name)
        cleaned = encodable_values(value)
        if cleaned is not value:
            object.__setattr__(record, field.name, cleaned)


def visible(text: str) -> str:
    r"""The text with control characters written out, `\x1b` and `\u202e`, newlines and tabs kept.

    So no terminal obeys it, and a line stays a line.
    """
    return _CONTROLS.sub(lambda found: _escape(ord(found.group())), text)


def finite_or_nan(value: object) -> float:
    """A number as a finite float; NaN for whatever else a user's code reports as one."""
    try:
        number = float(cast(Any, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        return math.nan
    return number if math.isfinite(number) else math.nan


def as_metrics(values: Mapping[Any, object]) -> Metrics:
    """Metrics of a user's code by encodable names; what is not a finite number is NaN, to be counted."""
    return {encodable(str(name)): finite_or_nan(value) for name, value in values.items()}


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def outside(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The characters of `text` that lie in none of `spans`, which are in order."""
    parts: list[str] = []
    position = 0
    for start, end in spans:
        parts.append(text[position:start])
        position = end
    return "".join((*parts, text[position:]))
