"""Encoded images: validated when they come from outside, and fitted to a model's limits."""

import base64
import binascii
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from raylearner.errors import RenderError

FORMATS = ("PNG", "JPEG", "WEBP")
MULTI_PICTURE = "MPO"
"""Pillow's name for a JPEG with several pictures, as some phones write; the first is shown.
"""
MIN_SIDE, MAX_PIXELS, MAX_BYTES = 8, 1 << 24, 8 << 20
"""Limits of images from outside: the shorter side, width times height, and the encoded size."""
MAX_ASPECT_RATIO = 200
"""Vision models refuse longer strips."""
MAX_DECODED_PIXELS = 80_000_000
"""Larger images are refused before they are decoded: 240 MB as RGB."""
COMPRESSION = 1
"""PNG's lowest level: pages compress well anyway, and episodes wait for it."""
TURNED = (5, 6, 7, 8)
"""Orientations of EXIF in which width and height change places."""

TargetSize = Callable[[int, int], tuple[int, int]]
"""Function from height and width to those that the model is shown."""


class BadImage(ValueError):
    """An image that no model should be shown; the message gives the reason."""


def decode_base64(contents: str) -> bytes:
    """Return the checked image of a text in url-safe base64. Raises `BadImage`."""
    if len(contents) > MAX_BYTES * 4 // 3 + 4:
        raise BadImage(f"image longer than {MAX_BYTES} bytes")
    try:
        encoded = base64.b64decode(contents.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise BadImage("image is not valid url-safe base64") from error
    check_image(encoded)
    return encoded


def check_image(encoded: bytes) -> None:
    """Raises `BadImage` unless the image decodes; its size is checked before that costs memory."""
    if len(encoded) > MAX_BYTES:
        raise BadImage(f"image longer than {MAX_BYTES} bytes")
    with _open_still(encoded, max_pixels=MAX_PIXELS) as image:
        width, height = image.size
        if min(width, height) < MIN_SIDE:
            raise BadImage(f"image of {width}x{height} is smaller than {MIN_SIDE} pixels")
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise BadImage(f"image of {width}x{height} is longer than {MAX_ASPECT_RATIO} to 1")
        image.load()


def fit_image(encoded: bytes, target_size: TargetSize) -> bytes:
    """Return the image as the model is shown it: upright, opaque, RGB, of whole patches, as PNG.

    The same bytes always give the same. Raises `RenderError` for an image that does not decode, is
    animated or too large.
    """
    try:
        with _open_still(encoded, max_pixels=MAX_DECODED_PIXELS) as source:
            image = _to_rgb(ImageOps.exif_transpose(source))
    except BadImage as error:
        raise RenderError(f"{error}{describe_cause(error)}") from error
    height, width = target_size(image.height, image.width)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return encode_png(image)


def decode_fitted(encoded: bytes) -> Image.Image:
    """Return an image from `fit_image` as RGB. Raises Pillow's errors where it does not decode."""
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        return image.convert("RGB")


def read_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width, from the header alone."""
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        return image.height, image.width


def read_upright_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width as shown, from the header alone. Raises `RenderError`."""
    try:
        with _open(encoded) as image:
            width, height = image.size
            is_turned = image.getexif().get(ExifTags.Base.Orientation) in TURNED
    except BadImage as error:
        raise RenderError(f"{error}{describe_cause(error)}") from error
    return (width, height) if is_turned else (height, width)


def make_blank_image(height: int, width: int) -> bytes:
    """Return a PNG of one colour."""
    return encode_png(Image.new("1", (width, height)))


def encode_png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=COMPRESSION)
    return buffer.getvalue()


def describe_cause(error: BadImage) -> str:
    """Return the codec's reason behind a colon; empty for bytes in none of the formats, where it only
    names an object in memory."""
    cause = error.__cause__
    return "" if cause is None or isinstance(cause, UnidentifiedImageError) else f": {cause}"


@contextmanager
def _open_still(encoded: bytes, *, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image of one picture and bounded size. Raises `BadImage`, also for what the block raises."""
    with _open(encoded) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadImage(f"image of {width}x{height} has more than {max_pixels} pixels")
        if image.format != MULTI_PICTURE and getattr(image, "n_frames", 1) != 1:
            raise BadImage(f"image of {width}x{height} is animated")
        yield image


@contextmanager
def _open(encoded: bytes) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            yield image
    except BadImage:
        raise
    except Exception as error:  # codecs raise any exception on hostile bytes
        reason = f"image of {len(encoded)} bytes does not decode as {', '.join(FORMATS)}"
        raise BadImage(reason) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Put transparent images on white, and reduce 16 bits per channel to 8."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.float64) / 257.0
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return image.convert("RGB")
