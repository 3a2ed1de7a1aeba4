"""Images of trajectories as input of the vision tower, decoded by threads ahead of their micro-batch.

Waits for: its own threads.

Legend: `T` packed tokens, `P` patches of the distinct images, `D` numbers of a patch.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from raylearner.errors import LearnerError
from raylearner.images import decode_fitted
from raylearner.tokenization.vision import Vision, load_image_processor

PROBE_SHAPE = (2, 3)
"""Rows and columns of tokens of the least image of a probe."""

NUM_WORKERS = 2
"""Threads of a rank; decoding and resizing leave the interpreter to others."""
MAX_KEPT_BYTES = 512 * 1024**2
"""Pixel values that stay for later, since groups are shown the same pages; what two micro-batches need
always does."""


class PixelLoader:
    """Owns pixel values of the images asked for now and next, and of as many others as have room.

    One thread asks. An image is loaded once for as long as its pixel values are kept.
    """

    def __init__(
        self,
        load: Callable[[bytes], Tensor],
        *,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        num_workers: int = NUM_WORKERS,
    ) -> None:
        """`load` makes pixel values of one image, in several threads at once."""
        self._load = load
        self._max_kept_bytes = max_kept_bytes
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="pixels")
        self._futures: dict[bytes, Future[Tensor]] = {}  # least lately asked for first
        self._line: list[Sequence[bytes]] = []
        self._waited_s = 0.0

    def expect(self, line: Iterable[Sequence[bytes]]) -> None:
        """What is asked for from now on: each in turn, again from the start. Begins the first."""
        self._line = list(line)
        if self._line:
            self._begin(self._line[0])

    def pixels(self, images: Sequence[bytes]) -> list[Future[Tensor]]:
        """Of each image, all done: `result()` raises what its loading raised. Begins those expected next."""
        started = time.monotonic()
        futures = self._begin(images)
        following = self._following(images)
        self._begin(following)
        for future in futures:
            future.exception()
        self._waited_s += time.monotonic() - started
        self._trim({*images, *following})
        return futures

    def drain_waited_s(self) -> float:
        """Time that `pixels` took since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @property
    def kept_bytes(self) -> int:
        return sum(_num_bytes(future) for future in self._futures.values())

    def _following(self, images: Sequence[bytes]) -> Sequence[bytes]:
        for place, expected in enumerate(self._line):
            if expected is images:
                return self._line[(place + 1) % len(self._line)]
        return ()

    def _begin(self, images: Sequence[bytes]) -> list[Future[Tensor]]:
        futures: list[Future[Tensor]] = []
        for image in images:
            future = self._futures.pop(image, None) or self._workers.submit(self._load, image)
            self._futures[image] = future
            futures.append(future)
        return futures

    def _trim(self, needed: set[bytes]) -> None:
        excess = self.kept_bytes - self._max_kept_bytes
        for image in [image for image in self._futures if image not in needed]:
            if excess <= 0:
                break
            excess -= _num_bytes(self._futures[image])
            self._futures.pop(image).cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """The images of packed sequences, each distinct one once."""

    encoded: tuple[bytes, ...]
    """The distinct images. Sequences of text alone have a dummy here, so that every rank runs the tower."""
    names: tuple[str, ...]
    """Of each, which trajectory shows it first."""
    grids: Tensor  # [distinct images, 3] int64: time, rows, columns in patches
    order: tuple[int, ...]
    """Which distinct image each run of placeholders shows; empty for sequences of text alone."""
    loader: PixelLoader

    def pixels(self) -> Tensor:  # [P, D]
        """Raises `LearnerError` naming the trajectory of an image that does not decode."""
        parts: list[Tensor] = []
        for name, future in zip(self.names, self.loader.pixels(self.encoded), strict=True):
            try:
                parts.append(future.result())
            except Exception as error:  # codecs raise whatever they like
                raise LearnerError(
                    f"{name}: an image does not decode: {type(error).__name__}: {error}"
                ) from error
        return torch.cat(parts).to(self.grids.device)


def vision_tower(causal_lm: PreTrainedModel) -> nn.Module | None:
    """Return the module that turns images into tokens, projector included; None if text-only."""
    return getattr(causal_lm.base_model, "visual", None)


class ImageReader:
    """A model's image processor, and its way to number positions."""

    def __init__(self, vision: Vision, processor: Any) -> None:
        self._vision = vision
        self._loader = PixelLoader(partial(_pixels, processor))
        side = vision.unit * math.ceil(math.sqrt(vision.min_pixels) / vision.unit)
        self._dummy = _encoded(Image.new("RGB", (side, side)))

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

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """What engines must not sample."""
        return self._vision.banned_token_ids

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> np.ndarray:  # [T] int64
        """From the engine's form of a sequence. Raises `RenderError` when counts differ."""
        return np.asarray(self._vision.expand(token_ids, images), np.int64)

    def behind_images(self, token_ids: np.ndarray) -> int:
        """The first place behind all images, in the learner's form; 1 without any."""
        return max([1, *self._vision.image_ends(token_ids.tolist())])

    def probe(self, seed: Sequence[int]) -> tuple[bytes, list[int]]:
        """A small image of noise, and the tokens that show it, as engines take them.

        It has rows and columns of tokens, and not as many of either, so that it tells the two apart.
        """
        height, width = (side * self._vision.unit for side in PROBE_SHAPE)
        scale = math.ceil(math.sqrt(self._vision.min_pixels / (height * width)))
        size = (scale * height, scale * width, 3)
        noise = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        image = _encoded(Image.fromarray(noise))
        return image, self._vision.collapse(self._vision.block(image))

    def pack(
        self,
        images: Sequence[bytes],
        *,
        names: Sequence[str],
        device: torch.device | str = "cpu",
    ) -> PackedImages:
        """`names` are those of the trajectories that show the images, for errors."""
        first_name: dict[bytes, str] = {}
        for image, name in zip(images, names, strict=True):
            first_name.setdefault(image, name)
        index = {image: number for number, image in enumerate(first_name)}
        encoded = tuple(first_name) or (self._dummy,)
        return PackedImages(
            encoded=encoded,
            names=tuple(first_name.values()) or ("a dummy",),
            grids=torch.tensor([self._vision.grid(image) for image in encoded], device=device),
            order=tuple(index[image] for image in images),
            loader=self._loader,
        )

    def expect(self, line: Iterable[PackedImages]) -> None:
        """The images of micro-batches in the order in which they will be run, again and again."""
        self._loader.expect([images.encoded for images in line])

    def drain_waited_s(self) -> float:
        """How long the model waited for pixel values since the last call."""
        return self._loader.drain_waited_s()


def _pixels(processor: Any, encoded: bytes) -> Tensor:  # [P, D] of one image
    return processor(images=[decode_fitted(encoded)], return_tensors="pt")["pixel_values"]


def _encoded(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _num_bytes(future: Future[Tensor]) -> int:
    """0 until it is done, or where it failed."""
    if not future.done() or future.exception() is not None:
        return 0
    return future.result().nbytes
