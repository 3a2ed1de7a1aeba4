"""Images of rows: read from a table's cells, checked, and put into the prompt's messages."""

import base64
import binascii
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from raylearner.errors import ConfigError
from raylearner.images import MAX_BYTES, BadImage, check_image, describe_cause
from raylearner.types import IMAGE_MARK, Message, Prompt

SHOWN_CHARACTERS = 200
"""Characters of a path that an error quotes."""
_FORMS = "encoded bytes, a path, a data URL, or a list of these"


def read_images(value: object, *, folders: Sequence[Path], where: str) -> tuple[bytes, ...]:
    """Read the encoded images of one cell. Raises `ConfigError`.

    The first of `folders` is the base of paths, and all of them may hold images: the
    author of a row cannot have other files of this machine read.
    """
    if value is None or value == "":
        return ()
    values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
    return tuple(_read(one, folders, where) for one in values)


def _read(value: object, folders: Sequence[Path], where: str) -> bytes:
    """Read an image; `{"bytes", "path"}` is the form of `datasets` and its Parquet files."""
    if isinstance(value, dict):
        held = cast(dict[str, Any], value)
        value = held.get("bytes") if held.get("bytes") is not None else held.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: an image is {_FORMS}; got {type(value).__name__}")
    if value.startswith("data:"):
        return _from_data_url(value, where)
    which = f"{where}: image {value[:SHOWN_CHARACTERS]!r}"
    path = os.path.abspath(folders[0] / value)
    if not any(Path(path).is_relative_to(os.path.abspath(folder)) for folder in folders):
        raise ConfigError(
            f"{which} is outside of {str(folders[0])!r}; put images below it, or a link to their folder"
        )
    return _from_file(Path(path), which)


def _from_file(path: Path, which: str) -> bytes:
    """Read a regular file; a device or a pipe might never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{which} is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ConfigError(f"{which} is longer than {MAX_BYTES} bytes")
        return path.read_bytes()
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{which} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{which} cannot be read: {error}") from error


def _from_data_url(url: str, where: str) -> bytes:
    head, comma, content = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it is not in base64")
        return base64.b64decode(content, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"{where}: data URL {head[:40]!r}: {error}") from error


def with_images(
    messages: Sequence[Message], images: tuple[bytes, ...], *, mark: str, where: str
) -> tuple[Message, ...]:
    """Return the messages with each image at its mark, or all before the first message of the user.

    Raises `ConfigError` when the numbers of marks and images differ.
    """
    placed = [m.content.replace(IMAGE_MARK, "").replace(mark, IMAGE_MARK) for m in messages]
    counts = [content.count(IMAGE_MARK) for content in placed]
    if images and not any(counts):
        first = next((i for i, m in enumerate(messages) if m.role == "user"), 0)
        placed[first] = IMAGE_MARK * len(images) + placed[first]
        counts[first] = len(images)
    if sum(counts) != len(images):
        raise ConfigError(
            f"{where}: the prompt has {sum(counts)} marks {mark!r} for {len(images)} images"
        )
    remaining = iter(images)
    return tuple(
        replace(m, content=content, images=tuple(next(remaining) for _ in range(count)))
        for m, content, count in zip(messages, placed, counts, strict=True)
    )


def check_images(prompts: Sequence[tuple[Prompt, str]], *, max_images: int | None) -> None:
    """Decode every image once. Raises `ConfigError` with the place of the first bad row."""
    shown = [(p, where) for p, where in prompts if any(m.images for m in p.messages)]
    with ThreadPoolExecutor() as pool:
        for problem in pool.map(lambda pair: _problem(pair[0], pair[1], max_images), shown):
            if problem is not None:
                pool.shutdown(cancel_futures=True)
                raise ConfigError(problem)


def _problem(prompt: Prompt, where: str, max_images: int | None) -> str | None:
    images = [image for message in prompt.messages for image in message.images]
    if max_images is not None and len(images) > max_images:
        return f"{where}: {len(images)} images, renderer.images.max_images is {max_images}"
    for number, image in enumerate(images, 1):
        try:
            check_image(image)
        except BadImage as error:
            return f"{where}: image {number} of {len(images)}: {error}{describe_cause(error)}"
    return None
