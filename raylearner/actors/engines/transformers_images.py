"""Images of requests as the transformers engine's model reads them.

Legend: `N` rows of a fill, `L` tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from raylearner.errors import EngineError, RenderError
from raylearner.images import decode_fitted
from raylearner.tokenization.vision import Vision, deal_out, load_image_processor

Row = tuple[tuple[int, ...], tuple[bytes, ...]]
"""Token ids, in the learner's form, and the images that their placeholders show."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A model's image processor and its way to number positions; immutable."""

    vision: Vision
    processor: Any

    @classmethod
    def from_pretrained(cls, path: str) -> Self | None:
        """Of the model in `path`; None for one that reads text alone."""
        vision = Vision.from_pretrained(path)
        return None if vision is None else cls(vision, load_image_processor(path))

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Raises `EngineError` for images that are not fitted, or not as many as placeholders."""
        try:
            return self.vision.expand(token_ids, images)
        except RenderError as error:
            raise EngineError(str(error)) from error

    def offset(self, token_ids: Sequence[int], images: Sequence[bytes]) -> int:
        """What a token after these has to add to its place for its position."""
        return int(self._positions(token_ids, images).max()) + 1 - len(token_ids)

    def inputs(
        self, model: Any, rows: Sequence[Row], longest: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """Positions `[3, N, L]`, and what the trunk's forward takes of the images of all rows."""
        device = model.device
        positions = np.zeros((3, len(rows), longest), np.int64)
        for index, (token_ids, images) in enumerate(rows):
            positions[:, index, : len(token_ids)] = self._positions(token_ids, images)
        shown = [image for _, images in rows for image in images]
        distinct = list(dict.fromkeys(shown))
        pixels = self.processor(images=[decode_fitted(i) for i in distinct], return_tensors="pt")
        features = model.base_model.get_image_features(
            pixels["pixel_values"].to(device),
            pixels["image_grid_thw"].to(device),
            return_dict=True,
        )
        order = [distinct.index(image) for image in shown]
        deal_out(features, order)
        found = torch.from_numpy(positions).to(device)
        return found, {"mm_encoder_outputs": {"image": features}}

    def _positions(self, token_ids: Sequence[int], images: Sequence[bytes]) -> np.ndarray:
        grids = [self.vision.grid(image) for image in images]
        return self.vision.positions(np.asarray(token_ids, np.int32), grids)
