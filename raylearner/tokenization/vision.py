"""Conversion of images to a vision-language model's tokens: sizes, grids, placeholders, positions.

Legend: `T` tokens of one sequence, `I` its images. A grid is (1, rows, columns) in patches; its
image takes `rows * columns / merge_size²` placeholders in the learner's form of a sequence, and one
in the engine's, which expands it. Every run of placeholders is one image: the model's tokens for
its start and end stand between any two.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from raylearner.config.actors import ImagesSection
from raylearner.config.model_files import (
    ADVICE,
    FAMILIES,
    SIZES,
    pixel_range,
    processor_errors,
    processor_file,
    read_json,
    vision_config_errors,
)
from raylearner.errors import ConfigError, RenderError
from raylearner.images import fit_image, make_blank_image, read_size, read_upright_size

MAX_KEPT_BYTES = 256 * 1024**2
"""Maximum size of the images that one actor keeps, as received and fitted: the episodes of a group
are shown the same pages."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Image properties of a model's configuration and its image processor. Immutable."""

    image_token_id: int
    video_token_id: int
    start_token_id: int
    end_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    """Range of pixels in which the model's own processor leaves an image of whole patches
    unchanged."""

    @classmethod
    def from_pretrained(cls, path: str) -> Self | None:
        """Read the model in `path` (directory or hub id); return None for a text-only one.

        Raises `ConfigError` for vision models of other families, and for files with missing or
        contradictory values, with each key.
        """
        config = _config(path)
        if "vision_config" not in config:
            return None
        _refuse(path, vision_config_errors(config))
        saved: dict[str, Any] = load_image_processor(path).to_dict()
        values: dict[str, Any] = {key: saved.get(key) for key in (*SIZES, "size")}
        _refuse(path, processor_errors(config, values, file=processor_file(Path(path))))
        family: str = config["model_type"]
        image, video, start, end = (config[key] for key in FAMILIES[family].token_keys)
        least, most = pixel_range(family, values)
        return cls(
            image_token_id=image,
            video_token_id=video,
            start_token_id=start,
            end_token_id=end,
            patch_size=values["patch_size"],
            merge_size=values["merge_size"],
            min_pixels=least,
            max_pixels=most,
        )

    @property
    def unit(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that no policy may sample, since no image would belong to them."""
        return (self.image_token_id, self.video_token_id)

    @property
    def control_token_ids(self) -> tuple[int, ...]:
        """Tokens that the template writes for images, and texts must not."""
        return (*self.banned_token_ids, self.start_token_id, self.end_token_id)

    def grid(self, image: bytes) -> Grid:
        """Return the grid of an image that `ImageFitter` made. Raises `RenderError` for any
        other."""
        height, width = read_size(image)
        unit = self.unit
        if (
            height % unit
            or width % unit
            or not self.min_pixels <= height * width <= self.max_pixels
        ):
            raise RenderError(
                f"image of {width}x{height} is not fitted: sides must be multiples of {unit}, pixels "
                f"between {self.min_pixels} and {self.max_pixels}"
            )
        return 1, height // self.patch_size, width // self.patch_size

    def num_placeholders(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge_size**2

    def block(self, image: bytes) -> list[int]:
        """Return the learner's tokens of one image, its start and end included."""
        pads = [self.image_token_id] * self.num_placeholders(self.grid(image))
        return [self.start_token_id, *pads, self.end_token_id]

    def find_difference(
        self, token_ids: Sequence[int], quote: Callable[[Sequence[int]], str]
    ) -> str | None:
        """Describe how tokens that show one image in the engine's form differ from `block`."""
        count = token_ids.count(self.image_token_id)
        if count != 1:
            return (
                f"{count} placeholders {quote([self.image_token_id])} (image_token_id of config.json)"
                f" for one image: {quote(token_ids)}"
            )
        place = token_ids.index(self.image_token_id)
        written = token_ids[max(0, place - 1) : place + 2]
        expected = [self.start_token_id, self.image_token_id, self.end_token_id]
        if list(written) == expected:
            return None
        return (
            f"an image as {quote(written)}, and the start and end tokens of config.json make it"
            f" {quote(expected)}"
        )

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Convert the engine's form to the learner's. Raises `RenderError` when counts differ."""
        num_places = sum(token == self.image_token_id for token in token_ids)
        if num_places != len(images):
            raise RenderError(f"{num_places} placeholders for {len(images)} images")
        remaining = iter(images)
        expanded: list[int] = []
        for token in token_ids:
            count = 1
            if token == self.image_token_id:
                count = self.num_placeholders(self.grid(next(remaining)))
            expanded += [token] * count
        return expanded

    def collapse(self, token_ids: Sequence[int]) -> list[int]:
        """Convert the learner's form to the engine's: the first placeholder of each run."""
        ids = np.asarray(token_ids, np.int64)
        is_place = ids == self.image_token_id
        is_place[1:] &= is_place[:-1].copy()
        is_place[:1] = False
        return ids[~is_place].tolist()

    def image_ends(self, token_ids: Sequence[int]) -> list[int]:
        """Return the places behind each image's end token, where a reply may be cut."""
        is_place = np.asarray(token_ids, np.int64) == self.image_token_id
        ends = np.flatnonzero(is_place[:-1] & ~is_place[1:])
        return (ends + 2).tolist()

    def positions(self, token_ids: NDArray[np.int32], grids: Sequence[Grid]) -> NDArray[np.int64]:
        """Return m-rope positions `[3, T]` in time, row and column; those of text are equal on all
        three.

        Raises `RenderError` with both numbers when placeholders and grids differ.
        """
        is_place = token_ids == self.image_token_id
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_place, [False]])))
        runs = edges.reshape(-1, 2)
        if len(runs) != len(grids):
            raise RenderError(f"{len(runs)} runs of placeholders for {len(grids)} images")
        parts: list[NDArray[np.int64]] = []
        place = position = 0
        for (start, end), grid in zip(runs.tolist(), grids, strict=True):
            if end - start != self.num_placeholders(grid):
                raise RenderError(
                    f"{end - start} placeholders for {self.num_placeholders(grid)} image features"
                )
            parts.append(np.tile(np.arange(start - place) + position, (3, 1)))
            position += start - place
            rows, columns = grid[1] // self.merge_size, grid[2] // self.merge_size
            parts.append(np.indices((1, rows, columns)).reshape(3, -1) + position)
            position += max(rows, columns)
            place = end
        parts.append(np.tile(np.arange(len(token_ids) - place) + position, (3, 1)))
        return np.concatenate(parts, 1)


class ImageFitter:
    """Fits images to a model and a pixel budget; while it is kept, an image gives the same bytes object.

    Threads may call it.
    """

    def __init__(
        self, vision: Vision, section: ImagesSection, *, max_kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        """Raises `ConfigError` for a budget beyond the range of the model's own processor."""
        if section.min_pixels < vision.min_pixels or section.max_pixels > vision.max_pixels:
            raise ConfigError(
                f"renderer.images: {section.min_pixels} to {section.max_pixels} pixels, but the "
                f"model's image processor takes {vision.min_pixels} to {vision.max_pixels}"
            )
        self.vision = vision
        self._size = partial(_fitted_size, vision.unit, section)
        self._max_kept_bytes = max_kept_bytes
        self._lock = Lock()
        self._fitted: dict[bytes, bytes] = {}  # least recently requested first
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def fit(self, image: bytes) -> bytes:
        """Return the image as the model is shown it, as PNG. Raises `RenderError`."""
        with self._lock:
            if (kept := self._fitted.get(image)) is not None:
                return self._keep(image, kept)
        fitted = fit_image(image, self._size)
        with self._lock:  # another thread may have been faster
            return self._keep(image, self._fitted.get(image, fitted))

    def stand_in(self, image: bytes) -> bytes:
        """Return a blank image of the size that `fit` gives, from the header only. Raises
        `RenderError`."""
        return _blank(*self._size(*read_upright_size(image)))

    def _keep(self, image: bytes, fitted: bytes) -> bytes:
        self._drop(image)
        self._fitted[image] = fitted
        self._kept_bytes += len(image) + len(fitted)
        while self._kept_bytes > self._max_kept_bytes:
            self._drop(next(iter(self._fitted)))
        return fitted

    def _drop(self, image: bytes) -> None:
        if (fitted := self._fitted.pop(image, None)) is not None:
            self._kept_bytes -= len(image) + len(fitted)


@lru_cache(maxsize=256)
def _blank(height: int, width: int) -> bytes:
    return make_blank_image(height, width)


def _fitted_size(unit: int, section: ImagesSection, height: int, width: int) -> tuple[int, int]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        fitted = smart_resize(height, width, unit, section.min_pixels, section.max_pixels)
    except ValueError as error:
        raise RenderError(f"image of {width}x{height}: {error}") from error
    pixels = fitted[0] * fitted[1]
    if not section.min_pixels <= pixels <= section.max_pixels:
        raise RenderError(
            f"image of {width}x{height} does not fit between {section.min_pixels} and "
            f"{section.max_pixels} pixels in units of {unit}"
        )
    return fitted


def deal_out(features: Any, order: Sequence[int]) -> None:
    """Repeat a trunk's features of distinct images for each run of placeholders, in place."""
    features.pooler_output = [features.pooler_output[i] for i in order]
    if getattr(features, "deepstack_features", None) is not None:
        features.deepstack_features = [
            [layer[i] for i in order] for layer in features.deepstack_features
        ]


def load_image_processor(path: str) -> Any:
    """Load the model's image processor, without torchvision, so that it runs wherever transformers
    does."""
    import transformers

    processors: Any = transformers.AutoImageProcessor
    try:
        return processors.from_pretrained(path, backend="pil")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        file = processor_file(Path(path))
        problem = f"{file} gives no image processor that loads: {reason}; {ADVICE}"
        raise ConfigError(f"model.path {path!r}: {problem}") from error


def _refuse(path: str, problems: Iterable[str]) -> None:
    if text := "\n".join(f"model.path {path!r}: {problem}" for problem in problems):
        raise ConfigError(text)


def _config(path: str) -> dict[str, Any]:
    """Return config.json as transformers reads it; empty for a directory with a tokenizer only."""
    if Path(path).is_dir():
        return read_json(Path(path) / "config.json")
    import transformers

    configs: Any = transformers.PretrainedConfig
    config, _ = configs.get_config_dict(path)
    return cast(dict[str, Any], config)
