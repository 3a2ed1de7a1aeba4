"""Images that a policy is shown."""

from typing import Self

from pydantic import model_validator

from raylearner.config.section import PositiveInt, Section


class ImagesSection(Section):
    """How large and how many images of prompts and observations may be; for vision models only."""

    min_pixels: PositiveInt = 262_144
    """Smaller images are enlarged to so many pixels."""
    max_pixels: PositiveInt = 4_194_304
    """Larger images are shrunk to so many pixels."""
    max_images: PositiveInt = 16
    """Most images of one trajectory; an observation that exceeds them ends it as truncated."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self
