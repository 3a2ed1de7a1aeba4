"""The wire form of episodes between actors, replay and learner."""

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.types import Trajectory, Turn


class Shipment(list[list[Trajectory]]):
    """Episodes, each a list of segments, that pickle as few buffers: many small ones are slow on Ray.

    Arrives as a plain list; its arrays are views of one array per field. What breaks the contract on
    dtypes or lengths travels unpacked, to be refused by name.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        trajectories = [trajectory for episode in self for trajectory in episode]
        if not trajectories or not all(_is_packable(trajectory) for trajectory in trajectories):
            return list, (list(self),)
        return _unpacked, (
            [len(episode) for episode in self],
            [trajectory.num_tokens for trajectory in trajectories],
            [np.concatenate([getattr(t, name) for t in trajectories]) for name in _ARRAY_TYPES],
            [_plain_values(trajectory) for trajectory in trajectories],
            [[_turn_values(turn) for turn in trajectory.turns] for trajectory in trajectories],
        )


_ARRAY_TYPES: Mapping[str, np.dtype[Any]] = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "train_mask": np.dtype(np.bool_),
    "behavior_logprobs": np.dtype(np.float32),
    "policy_versions": np.dtype(np.int32),
}
_PLAIN_FIELDS = tuple(f.name for f in fields(Trajectory) if f.name not in {*_ARRAY_TYPES, "turns"})
_TURN_FIELDS = tuple(f.name for f in fields(Turn))
_plain_values = attrgetter(*_PLAIN_FIELDS)
_turn_values = attrgetter(*_TURN_FIELDS)


def _is_packable(trajectory: Trajectory) -> bool:
    shape = (trajectory.num_tokens,)
    arrays = [(getattr(trajectory, name), dtype) for name, dtype in _ARRAY_TYPES.items()]
    return all(array.dtype == dtype and array.shape == shape for array, dtype in arrays)


def _unpacked(
    num_segments: list[int],
    lengths: list[int],
    arrays: list[NDArray[Any]],
    plain: list[tuple[Any, ...]],
    turns: list[list[tuple[Any, ...]]],
) -> list[list[Trajectory]]:
    trajectories: list[Trajectory] = []
    start = 0
    for length, plain_values, turn_values in zip(lengths, plain, turns, strict=True):
        values: dict[str, Any] = dict(zip(_PLAIN_FIELDS, plain_values, strict=True))
        for name, array in zip(_ARRAY_TYPES, arrays, strict=True):
            values[name] = array[start : start + length]
        values["turns"] = tuple(
            [Turn(**dict(zip(_TURN_FIELDS, turn, strict=True))) for turn in turn_values]
        )
        trajectories.append(Trajectory(**values))
        start += length
    rest = iter(trajectories)
    return [[next(rest) for _ in range(count)] for count in num_segments]
