"""The replay on disk: a consistent snapshot of ledger and buffer, saved and restored.

A folder holds `ledger.json`, `buffer.npz` (flat arrays, no pickle) and `images/<sha256>`. The same
state always gives the same bytes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from raylearner.codec import Arrays, pack, unpack
from raylearner.errors import CheckpointError
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.sampler import refuse_other_rows
from raylearner.replay.store import image_name
from raylearner.types import Prompt, Trajectory

FORMAT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of one moment. It never changes, so that a thread may write it."""

    metadata: dict[str, Any]
    prompt_order: NDArray[np.int64]
    trajectories: list[Trajectory]

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return metadata for JSON, with images by name, and the arrays."""
        values, arrays = pack(self.trajectories)
        for plain in values:
            plain["images"] = [image_name(image) for image in plain["images"]]
        metadata = self.metadata | {"format": FORMAT, "trajectories": values}
        return metadata, {"prompt_order": self.prompt_order, **arrays}

    def images(self) -> dict[str, bytes]:
        return {image_name(image): image for t in self.trajectories for image in t.images}

    def save(self, folder: Path) -> None:
        """Write into `folder`, flushed to disk; `ledger.json` comes last."""
        metadata, arrays = self.state()
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for name, image in self.images().items():
            _write(folder / "images" / name, image)
        with (folder / "buffer.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        text = json.dumps(metadata, sort_keys=True, default=_to_float)
        _write(folder / "ledger.json", text.encode())


def take_snapshot(buffer: ReplayBuffer) -> Snapshot:
    """Return the state of this moment. Trajectories are shared, not copied: they never change."""
    ledger, prompt_order = buffer.ledger.state()
    return Snapshot(
        metadata={"ledger": ledger, "tally": buffer.counters.state()},
        prompt_order=prompt_order,
        trajectories=[
            trajectory
            for group_id in sorted(buffer.store.groups)
            for trajectory in buffer.store.trajectories(group_id)
        ],
    )


def restore(
    buffer: ReplayBuffer,
    metadata: dict[str, Any],
    arrays: Arrays,
    images: Mapping[str, bytes],
    *,
    num_lost: int = 0,
) -> None:
    """Replace the state of `buffer` by a saved one. See `Ledger.restore`."""
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"the replay was saved in format {metadata.get('format')!r}, expected {FORMAT}"
        )
    restored = trajectories(metadata["trajectories"], arrays, images)
    buffer.restore(
        metadata["ledger"], metadata["tally"], arrays["prompt_order"], restored, num_lost=num_lost
    )


def read(folder: Path) -> tuple[dict[str, Any], Arrays, dict[str, bytes]]:
    """Read what `Snapshot.save` wrote: metadata, arrays and images by name."""
    try:
        metadata = _read_metadata(folder)
        with np.load(folder / "buffer.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        images = {path.name: path.read_bytes() for path in (folder / "images").iterdir()}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: not a complete replay state: {error}") from error
    return metadata, arrays, images


def trajectories(
    values: Sequence[Mapping[str, Any]], arrays: Arrays, images: Mapping[str, bytes]
) -> list[Trajectory]:
    """Return the trajectories of a saved state, from the parts that `read` returns."""
    shown = [{**plain, "images": [images[name] for name in plain["images"]]} for plain in values]
    return unpack(shown, arrays)


def refuse_other_data(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Raise `CheckpointError` where `prompts` do not fit the saved state; see `PromptSource.restore`."""
    metadata = _read_metadata(folder)
    if metadata.get("format") == FORMAT:
        refuse_other_rows(metadata["ledger"]["prompts"], prompts)


def load(buffer: ReplayBuffer, folder: Path) -> None:
    restore(buffer, *read(folder))


def _read_metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ledger.json").read_bytes())


def _to_float(value: object) -> float:
    """Convert NumPy scalars, which rewards and metrics may hold."""
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"{value!r} cannot be saved")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
