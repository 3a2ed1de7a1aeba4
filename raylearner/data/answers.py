"""Accepted answers of rows, as text that rewards compare with."""

from typing import cast

from raylearner.data.cells import scalar_text
from raylearner.errors import ConfigError


def read_answers(value: object, where: str, column: str) -> tuple[str, ...]:
    """All accepted answers of one cell: text, numbers, truth values, or a list of these.

    Null and blank text are not answers; a row that has no others has none. `true` is accepted in
    both spellings, `true` and `True`. Raises `ConfigError` for anything else, with the row.
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
