"""Images of trajectories as what the model's vision tower reads, made on the rank that needs them.

Legend: `T` packed tokens, `P` patches of the distinct images, `D` numbers of a patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raylearner.tokenization.vision import Vision, load_image_processor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """The images of packed sequences, each distinct one once."""

    pixels: Tensor  # [P, D]
    grids: Tensor  # [distinct images, 3] int64: time, rows, columns in patches
    order: tuple[int, ...]
    """Which distinct image each run of placeholders shows. Empty for sequences of text alone: then one
    dummy image stands by, so that every rank runs the tower."""


class ImageReader:
    """A model's image processor and its way to number positions; immutable."""

    def __init__(self, vision: Vision, processor: Any) -> None:
        self._vision = vision
        self._processor = processor

    @classmethod
    def from_pretrained(cls, path: str) -> Self | None:
        """Of the model in that directory; None for one that reads text alone.

        Raises `ConfigError` for a vision model that is not supported.
        """
        vision = Vision.from_pretrained(path)
        return None if vision is None else cls(vision, load_image_processor(path))

    def positions(self, token_ids: np.ndarray, images: Sequence[bytes]) -> Tensor:  # [3, T]
        """Raises `RenderError` when placeholders and images differ, with both numbers."""
        grids = [self._vision.grid(image) for image in images]
        return torch.from_numpy(self._vision.positions(token_ids, grids))

    def pack(self, images: Sequence[bytes], *, device: torch.device | str = "cpu") -> PackedImages:
        """Decodes each distinct image once."""
        distinct = list(dict.fromkeys(images))
        index = {image: number for number, image in enumerate(distinct)}
        shown = [_opened(image) for image in distinct] or [self._dummy()]
        inputs = self._processor(images=shown, return_tensors="pt")
        return PackedImages(
            pixels=inputs["pixel_values"].to(device),
            grids=inputs["image_grid_thw"].to(device),
            order=tuple(index[image] for image in images),
        )

    def _dummy(self) -> Image.Image:
        """The smallest image that the processor takes."""
        unit = self._vision.patch_size * self._vision.merge_size
        return Image.new("RGB", (unit, unit))


def _opened(encoded: bytes) -> Image.Image:
    with Image.open(BytesIO(encoded)) as image:
        return image.convert("RGB")
