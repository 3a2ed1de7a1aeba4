"""Encoded images made fit for a model: upright, opaque, RGB, of whole patches, as PNG."""

import io
from collections.abc import Callable

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from raylearner.errors import RenderError

FORMATS = ("PNG", "JPEG", "WEBP")
SEVERAL = "MPO"
"""What Pillow calls a JPEG with further pictures behind the first, as phones make them; the first is
shown."""
MAX_DECODED_PIXELS = 80_000_000
"""Larger images are refused before they are decoded: 240 MB as RGB."""
COMPRESSION = 1
"""PNG's least: pages compress well anyway, and episodes wait for it."""

TURNED = (5, 6, 7, 8)
"""Orientations of EXIF in which width and height change places."""

TargetSize = Callable[[int, int], tuple[int, int]]
"""From height and width to those that the model is shown."""


def fit_image(encoded: bytes, target_size: TargetSize) -> bytes:
    """The image as the model sees it, encoded as PNG; the same bytes always give the same.

    Raises `RenderError` for what does not decode, moves, or is too large.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as source:
            width, height = source.size
            if width * height > MAX_DECODED_PIXELS:
                raise RenderError(
                    f"image of {width}x{height} has more than {MAX_DECODED_PIXELS} pixels"
                )
            if source.format != SEVERAL and getattr(source, "n_frames", 1) != 1:
                raise RenderError(f"image of {width}x{height} is animated")
            image = _rgb(ImageOps.exif_transpose(source))
    except RenderError:
        raise
    except UnidentifiedImageError as error:  # its own text names an object in memory
        raise RenderError(
            f"{_undecoded(encoded)}: it is no such file, or the first bytes of one"
        ) from error
    except Exception as error:  # codecs raise whatever they like on hostile bytes
        raise RenderError(f"{_undecoded(encoded)}: {error}") from error
    height, width = target_size(image.height, image.width)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=COMPRESSION)
    return buffer.getvalue()


def opened(encoded: bytes) -> Image.Image:
    """What `fit_image` made, as RGB. Raises what Pillow raises where it does not decode."""
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")


def image_size(encoded: bytes) -> tuple[int, int]:
    """Height and width, from the header alone."""
    with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
        return image.height, image.width


def upright_size(encoded: bytes) -> tuple[int, int]:
    """Height and width as shown, from the header alone. Raises `RenderError` for no image."""
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            width, height = image.size
            is_turned = image.getexif().get(ExifTags.Base.Orientation) in TURNED
    except Exception as error:  # codecs raise whatever they like on hostile bytes
        raise RenderError(f"{_undecoded(encoded)}: {error}") from error
    return (width, height) if is_turned else (height, width)


def blank_image(height: int, width: int) -> bytes:
    """A PNG of one colour."""
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG", compress_level=COMPRESSION)
    return buffer.getvalue()


def _undecoded(encoded: bytes) -> str:
    return f"image of {len(encoded)} bytes does not decode as {', '.join(FORMATS)}"


def _rgb(image: Image.Image) -> Image.Image:
    """On white where it is transparent; 16 bits a channel become 8."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.float64) / 257.0
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba)
    return image.convert("RGB")
