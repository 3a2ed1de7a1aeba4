"""The one packed form of trajectories outside a process: a few arrays, and plain values.

Ray calls between actors, replay and learner pickle it, and the replay's snapshot writes it to disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.types import CompletionStop, StopReason, Trajectory, Turn

Arrays = dict[str, NDArray[Any]]

ARRAY_TYPES: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "train_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}
"""The arrays of a trajectory, each packed as the concatenation over all trajectories."""

_PLAIN_FIELDS = tuple(f.name for f in fields(Trajectory) if f.name not in {*ARRAY_TYPES, "turns"})
_TURN_FIELDS = tuple(f.name for f in fields(Turn))
_plain_values = attrgetter(*_PLAIN_FIELDS)
_turn_values = attrgetter(*_TURN_FIELDS)


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[dict[str, Any]], Arrays]:
    """Return the plain values of each trajectory, and the arrays with the `lengths` to cut them by.

    Apart from the bytes of images, the plain values can be written as JSON.
    """
    arrays: Arrays = {"lengths": np.array([t.num_tokens for t in trajectories], np.int64)}
    for name, dtype in ARRAY_TYPES.items():
        parts = [getattr(t, name) for t in trajectories]
        arrays[name] = np.concatenate(parts) if parts else np.empty(0, dtype)
    return [_pack_values(t) for t in trajectories], arrays


def unpack(values: Sequence[Mapping[str, Any]], arrays: Arrays) -> list[Trajectory]:
    """Invert `pack`, also after a round trip through JSON. Arrays are views of the packed ones."""
    ends = list(accumulate(arrays["lengths"].tolist()))
    starts = [0, *ends]
    return [
        Trajectory(
            **{
                **plain,
                **{name: arrays[name][start:end] for name in ARRAY_TYPES},
                "stop_reason": StopReason(plain["stop_reason"]),
                "turns": tuple([_unpack_turn(turn) for turn in plain["turns"]]),
                "images": tuple(plain["images"]),
                "shown": tuple(plain["shown"]),
            }
        )
        for plain, start, end in zip(values, starts[:-1], ends, strict=True)
    ]


class EpisodeBatch(list[list[Trajectory]]):
    """Episodes, each a list of segments, that pickle packed: many small buffers are slow on Ray.

    Arrives as a plain list. Trajectories with wrong dtypes or lengths travel unpacked, so that the
    replay can reject them with the reason.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        trajectories = [trajectory for episode in self for trajectory in episode]
        if not all(_is_packable(trajectory) for trajectory in trajectories):
            return list, (list(self),)
        return _unpack_episodes, ([len(episode) for episode in self], *pack(trajectories))


def _unpack_episodes(
    num_segments: list[int], values: list[dict[str, Any]], arrays: Arrays
) -> list[list[Trajectory]]:
    trajectories = iter(unpack(values, arrays))
    return [[next(trajectories) for _ in range(count)] for count in num_segments]


def _pack_values(trajectory: Trajectory) -> dict[str, Any]:
    values = dict(zip(_PLAIN_FIELDS, _plain_values(trajectory), strict=True))
    for name in ("rewards", "metrics", "columns", "tool_errors"):
        values[name] = dict(values[name])
    values["turns"] = [_turn_values(turn) for turn in trajectory.turns]
    return values


def _unpack_turn(values: Sequence[Any]) -> Turn:
    turn: dict[str, Any] = dict(zip(_TURN_FIELDS, values, strict=True))
    turn["stop_reason"] = CompletionStop(turn["stop_reason"])
    turn["thoughts"] = tuple([(start, end) for start, end in turn["thoughts"]])
    return Turn(**turn)


def _is_packable(trajectory: Trajectory) -> bool:
    shape = (trajectory.num_tokens,)
    arrays = [(getattr(trajectory, name), dtype) for name, dtype in ARRAY_TYPES.items()]
    return all(array.dtype == dtype and array.shape == shape for array, dtype in arrays)
