"""Encoded images, kept once however many trajectories show them."""

import hashlib


class ImageStore:
    """Owns the bytes of every image that a stored trajectory shows, counted by its references."""

    def __init__(self) -> None:
        self._images: dict[str, bytes] = {}
        self._num_references: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._images.values()))

    def add(self, images: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The same images, as the one copy of each that is kept."""
        kept: list[bytes] = []
        for image in images:
            name = image_name(image)
            kept.append(self._images.setdefault(name, image))
            self._num_references[name] = self._num_references.get(name, 0) + 1
        return tuple(kept)

    def remove(self, images: tuple[bytes, ...]) -> None:
        for image in images:
            name = image_name(image)
            self._num_references[name] -= 1
            if self._num_references[name] == 0:
                del self._num_references[name], self._images[name]


def image_name(image: bytes) -> str:
    """The SHA-256 of the encoded bytes."""
    return hashlib.sha256(image).hexdigest()
