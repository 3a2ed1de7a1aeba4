"""Pixel values of images, made in worker threads ahead of the micro-batch that needs them.

Consumes encoded images; produces `[P, D]` pixel values of each. Waits for: its own threads.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

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


def _num_bytes(future: Future[Tensor]) -> int:
    """0 until it is done, or where it failed."""
    if not future.done() or future.exception() is not None:
        return 0
    return future.result().nbytes
