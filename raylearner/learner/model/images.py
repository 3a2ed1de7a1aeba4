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
"""Minimum rows and columns of tokens of a probe's image."""

NUM_WORKERS = 2
"""Threads of a rank; decoding and resizing release the interpreter lock."""
MAX_KEPT_BYTES = 512 * 1024**2
"""Maximum size of cached pixel values, beyond those that two micro-batches need. Episodes of a group
show the same pages."""


class PixelLoader:
    """Owns pixel values of the images requested now and next, and a bounded cache of others.

    One thread requests. An image is loaded once while its pixel values are cached.
    """

    def __init__(
        self,
        load: Callable[[bytes], Tensor],
        *,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        num_workers: int = NUM_WORKERS,
    ) -> None:
        """`load` computes pixel values of one image; it runs in several threads at once."""
        self._load = load
        self._max_kept_bytes = max_kept_bytes
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="pixels")
        self._futures: dict[bytes, Future[Tensor]] = {}  # least recently requested first
        self._expected: list[Sequence[bytes]] = []
        self._place = -1  # of the last request among those expected
        self._waited_s = 0.0

    def expect(self, requests: Iterable[Sequence[bytes]]) -> None:
        """Announce the requests from now on, in order and repeated; start loading the first."""
        self._expected, self._place = list(requests), -1
        if self._expected:
            self._begin(self._expected[0])

    def pixels(self, images: Sequence[bytes]) -> list[Future[Tensor]]:
        """Return a finished future for each image, and start loading those expected next.

        `result()` raises the error of a failed image.
        """
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
        """Return the time spent in `pixels` since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    @property
    def kept_bytes(self) -> int:
        return sum(_num_bytes(future) for future in self._futures.values())

    def _following(self, images: Sequence[bytes]) -> Sequence[bytes]:
        # Equal rather than the same: FSDP copies containers where it casts a model's inputs.
        number = len(self._expected)
        for place in ((self._place + more) % number for more in range(1, number + 1)):
            if self._expected[place] == images:
                self._place = place
                return self._expected[(place + 1) % number]
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
    """The images of packed sequences, each distinct image once."""

    encoded: tuple[bytes, ...]
    """The distinct images, or a dummy for text-only sequences, so that every rank runs the tower."""
    names: tuple[str, ...]
    """Name of the first trajectory that shows each image."""
    grids: Tensor  # [distinct images, 3] int64: time, rows, columns in patches
    order: tuple[int, ...]
    """Index of the distinct image that each run of placeholders shows; empty for text-only sequences."""
    loader: PixelLoader

    def pixels(self) -> Tensor:  # [P, D]
        """Return all patches. Raises `LearnerError` naming the trajectory of an undecodable image."""
        parts: list[Tensor] = []
        for name, future in zip(self.names, self.loader.pixels(self.encoded), strict=True):
            try:
                parts.append(future.result())
            except Exception as error:  # codecs raise errors of any type
                raise LearnerError(
                    f"{name}: an image does not decode: {type(error).__name__}: {error}"
                ) from error
        return torch.cat(parts).to(self.grids.device)


def vision_tower(causal_lm: PreTrainedModel) -> nn.Module | None:
    """Return the module that turns images into tokens, projector included; None if text-only."""
    return getattr(causal_lm.base_model, "visual", None)


class ImageReader:
    """Converts images and their placeholders into the input of one model."""

    def __init__(self, vision: Vision, processor: Any) -> None:
        self._vision = vision
        self._loader = PixelLoader(partial(_load_pixels, processor))
        side = vision.unit * math.ceil(math.sqrt(vision.min_pixels) / vision.unit)
        self._dummy = _encode(Image.new("RGB", (side, side)))

    @classmethod
    def from_pretrained(cls, path: str) -> Self | None:
        """Return the reader of the model in that directory; None for a text-only model.

        Raises `ConfigError` for a vision model that is not supported.
        """
        vision = Vision.from_pretrained(path)
        return None if vision is None else cls(vision, load_image_processor(path))

    def positions(self, token_ids: np.ndarray, images: Sequence[bytes]) -> Tensor:  # [3, T]
        """Return positions. Raises `RenderError` with both numbers if placeholders and images differ."""
        grids = [self._vision.grid(image) for image in images]
        return torch.from_numpy(self._vision.positions(token_ids, grids))

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that engines must not sample."""
        return self._vision.banned_token_ids

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> np.ndarray:  # [T] int64
        """Convert from the engine's form of a sequence. Raises `RenderError` if counts differ."""
        return np.asarray(self._vision.expand(token_ids, images), np.int64)

    def end_of_images(self, token_ids: np.ndarray) -> int:
        """Return the first position after all images, in the learner's form; 1 without images."""
        return max([1, *self._vision.image_ends(token_ids.tolist())])

    def probe(self, seed: Sequence[int]) -> tuple[bytes, list[int]]:
        """Return a small image of noise, and its tokens in the engines' form.

        It has unequal numbers of token rows and columns, so that swapping them is detected.
        """
        height, width = (side * self._vision.unit for side in PROBE_SHAPE)
        scale = math.ceil(math.sqrt(self._vision.min_pixels / (height * width)))
        size = (scale * height, scale * width, 3)
        noise = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        image = _encode(Image.fromarray(noise))
        return image, self._vision.collapse(self._vision.block(image))

    def pack(
        self,
        images: Sequence[bytes],
        *,
        names: Sequence[str],
        device: torch.device | str = "cpu",
    ) -> PackedImages:
        """Collect the distinct images; `names` are the trajectories that show them, for errors."""
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

    def expect(self, batches: Iterable[PackedImages]) -> None:
        """Announce the images of micro-batches in the order in which they will run, repeated."""
        self._loader.expect([images.encoded for images in batches])

    def drain_waited_s(self) -> float:
        """Return how long the model waited for pixel values since the last call."""
        return self._loader.drain_waited_s()


def _load_pixels(processor: Any, encoded: bytes) -> Tensor:  # [P, D] of one image
    return processor(images=[decode_fitted(encoded)], return_tensors="pt")["pixel_values"]


def _encode(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _num_bytes(future: Future[Tensor]) -> int:
    """Return 0 until it is done, or if it failed."""
    if not future.done() or future.exception() is not None:
        return 0
    return future.result().nbytes
