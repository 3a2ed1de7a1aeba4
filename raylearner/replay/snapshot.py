"""The replay on disk: a consistent cut of ledger and buffer, and its way back.

A folder holds `ledger.json`, `buffer.npz` (flat arrays, no pickle) and `images/<sha256>`. The same
cut always gives the same bytes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from raylearner.errors import CheckpointError
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.prompt_source import refuse_other_rows
from raylearner.replay.store import image_name
from raylearner.types import CompletionStop, Prompt, StopReason, Trajectory, Turn

FORMAT = 5

ARRAYS: Mapping[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "train_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "policy_versions": np.int32,
}
"""The arrays of a trajectory, each stored as the concatenation over all trajectories."""

PLAIN_FIELDS = tuple(
    f.name for f in fields(Trajectory) if f.name not in {*ARRAYS, "turns", "images"}
)
TURN_FIELDS = tuple(f.name for f in fields(Turn))

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One consistent cut. Nothing in it changes later, so a thread may write it."""

    metadata: dict[str, Any]
    prompt_order: NDArray[np.int64]
    trajectories: list[Trajectory]

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """JSON-able metadata, images by name, and the arrays."""
        metadata = self.metadata | {
            "format": FORMAT,
            "trajectories": [_trajectory_state(t) for t in self.trajectories],
        }
        lengths = np.array([t.num_tokens for t in self.trajectories], np.int64)
        arrays: Arrays = {"prompt_order": self.prompt_order, "lengths": lengths}
        for name, dtype in ARRAYS.items():
            parts = [getattr(t, name) for t in self.trajectories]
            arrays[name] = np.concatenate(parts) if parts else np.empty(0, dtype)
        return metadata, arrays

    def images(self) -> dict[str, bytes]:
        return {image_name(image): image for t in self.trajectories for image in t.images}

    def save(self, folder: Path) -> None:
        """Writes into `folder`, flushed to disk; `ledger.json` comes last."""
        metadata, arrays = self.state()
        (folder / "images").mkdir(parents=True, exist_ok=True)
        for name, image in self.images().items():
            _write(folder / "images" / name, image)
        with (folder / "buffer.npz").open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        _write(
            folder / "ledger.json", json.dumps(metadata, sort_keys=True, default=_plain).encode()
        )


def cut(buffer: ReplayBuffer) -> Snapshot:
    """The state at this moment. Trajectories are shared, not copied: they never change."""
    ledger, prompt_order = buffer.ledger.state()
    return Snapshot(
        metadata={"ledger": ledger, "tally": buffer.tally.state()},
        prompt_order=prompt_order,
        trajectories=[
            trajectory
            for group_id in sorted(buffer.store.groups)
            for trajectory in buffer.store.trajectories(group_id)
        ],
    )


def restore(
    buffer: ReplayBuffer, metadata: dict[str, Any], arrays: Arrays, images: Mapping[str, bytes]
) -> None:
    """Puts `buffer` into the state of a cut, whatever it held. See `Ledger.restore`."""
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"the replay was saved in format {metadata.get('format')!r}, expected {FORMAT}"
        )
    restored = trajectories(metadata["trajectories"], arrays, images)
    buffer.restore(metadata["ledger"], metadata["tally"], arrays["prompt_order"], restored)


def read(folder: Path) -> tuple[dict[str, Any], Arrays, dict[str, bytes]]:
    """What `Snapshot.save` wrote."""
    try:
        metadata = _metadata(folder)
        with np.load(folder / "buffer.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        images = {path.name: path.read_bytes() for path in (folder / "images").iterdir()}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: no whole replay state here: {error}") from error
    return metadata, arrays, images


def _metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ledger.json").read_bytes())


def refuse_other_data(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Raises `CheckpointError` where `prompts` cannot be resumed with; see `PromptSource.restore`."""
    metadata = _metadata(folder)
    if metadata.get("format") == FORMAT:
        refuse_other_rows(metadata["ledger"]["prompts"], prompts)


def load(buffer: ReplayBuffer, folder: Path) -> None:
    restore(buffer, *read(folder))


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    state: dict[str, Any] = {name: getattr(trajectory, name) for name in PLAIN_FIELDS}
    state["rewards"] = dict(trajectory.rewards)
    state["metrics"] = dict(trajectory.metrics)
    state["columns"] = dict(trajectory.columns)
    state["turns"] = [[getattr(turn, name) for name in TURN_FIELDS] for turn in trajectory.turns]
    state["images"] = [image_name(image) for image in trajectory.images]
    return state


def trajectories(
    states: list[dict[str, Any]], arrays: Arrays, images: Mapping[str, bytes]
) -> list[Trajectory]:
    """The trajectories of a cut, from what `read` gives."""
    ends = np.cumsum(arrays["lengths"])
    return [
        _trajectory(
            state, {name: arrays[name][end - length : end].copy() for name in ARRAYS}, images
        )
        for state, length, end in zip(states, arrays["lengths"], ends, strict=True)
    ]


def _trajectory(state: dict[str, Any], arrays: Arrays, images: Mapping[str, bytes]) -> Trajectory:
    values: dict[str, Any] = {
        **state,
        **arrays,
        "stop_reason": StopReason(state["stop_reason"]),
        "turns": tuple(_turn(turn) for turn in state["turns"]),
        "images": tuple(images[name] for name in state["images"]),
        "shown": tuple(state["shown"]),
    }
    return Trajectory(**values)


def _turn(values: list[Any]) -> Turn:
    state: dict[str, Any] = dict(zip(TURN_FIELDS, values, strict=True))
    state["stop_reason"] = CompletionStop(state["stop_reason"])
    state["thoughts"] = tuple((start, end) for start, end in state["thoughts"])
    return Turn(**state)


def _plain(value: object) -> float:
    """NumPy scalars that rewards and metrics may carry."""
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"{value!r} cannot be saved")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
