"""Images from outside: decoded once to see that they are whole, still and of a sensible size."""

import asyncio
import base64
import binascii
import io
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from PIL import Image

from raylearner.config.environment import ImageSection

FORMATS = ("PNG", "JPEG", "WEBP")
SEVERAL = "MPO"
"""What Pillow calls a JPEG with further pictures behind the first, as phones make them."""
MAX_ASPECT_RATIO = 200
"""Vision models refuse longer strips."""


ImageCheck: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Raises `RenderError` for an image that does not fit the model, which no tool knows."""


class BadImage(ValueError):
    """An image that no model should see; the message says why."""


async def image_from_text(contents: str, section: ImageSection) -> bytes:
    """The bytes behind url-safe base64, checked in a thread. Raises `BadImage`."""
    if len(contents) > section.max_bytes * 4 // 3 + 4:
        raise BadImage(f"image longer than {section.max_bytes} bytes")
    try:
        encoded = base64.b64decode(contents.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise BadImage("image is not whole url-safe base64") from error
    await asyncio.to_thread(check_image, encoded, section)
    return encoded


def check_image(encoded: bytes, section: ImageSection) -> None:
    """Raises `BadImage` unless the image decodes; its size is checked before that costs memory."""
    if len(encoded) > section.max_bytes:
        raise BadImage(f"image longer than {section.max_bytes} bytes")
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            width, height = image.size
            _check_size(width, height, section)
            if image.format != SEVERAL and getattr(image, "n_frames", 1) != 1:
                raise BadImage(f"image of {width}x{height} is animated")
            image.load()
    except BadImage:
        raise
    except Exception as error:  # codecs raise whatever they like on hostile bytes
        raise BadImage(f"image does not decode as {', '.join(FORMATS)}") from error


def _check_size(width: int, height: int, section: ImageSection) -> None:
    if width * height > section.max_pixels:
        raise BadImage(f"image of {width}x{height} has more than {section.max_pixels} pixels")
    if min(width, height) < section.min_side:
        raise BadImage(f"image of {width}x{height} is smaller than {section.min_side} pixels")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadImage(f"image of {width}x{height} is longer than {MAX_ASPECT_RATIO} to 1")
