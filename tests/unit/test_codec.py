"""Trajectories cross processes and JSON unchanged."""

import json
import pickle
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from episodes import assert_same, make_trajectory, make_turn

from raylearner.codec import ARRAY_TYPES, EpisodeBatch, pack, unpack
from raylearner.replay.validation import trajectory_error
from raylearner.types import CompletionStop, Trajectory


def make_segment(group_id: int, size: int = 2, **values) -> Trajectory:
    versions = [-1] + [3] * (size - 1)
    return make_trajectory(versions, group_id=group_id, claim_policy_version=3, **values)


@pytest.fixture
def batch() -> EpisodeBatch:
    turn = make_turn("<think>4</think>4", stop_reason=CompletionStop.LENGTH, thoughts=((0, 16),))
    long = make_segment(
        1, 10, turns=(turn, turn), images=(b"png",), rewards={"format": None}, shown=("a", "b")
    )
    failed = make_segment(2, error="tool: down")
    return EpisodeBatch([[make_segment(0)], [long, replace(long, segment=1)], [failed]])


def test_a_batch_pickles_as_few_buffers(batch: EpisodeBatch) -> None:
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == len(ARRAY_TYPES) + 1
    arrived = pickle.loads(content, buffers=buffers)
    assert [len(episode) for episode in arrived] == [1, 2, 1]
    for left, right in zip(chain(*batch), chain(*arrived), strict=True):
        assert_same(left, right)
    assert pickle.loads(pickle.dumps(EpisodeBatch())) == []


def test_plain_values_survive_json(batch: EpisodeBatch) -> None:
    trajectories = [replace(t, images=()) for t in chain(*batch)]
    values, arrays = pack(trajectories)
    for left, right in zip(
        trajectories, unpack(json.loads(json.dumps(values)), arrays), strict=True
    ):
        assert_same(left, right)


def test_invalid_arrays_travel_unchanged_to_be_refused(batch: EpisodeBatch) -> None:
    batch[0] = [replace(batch[0][0], train_mask=np.zeros(9, np.int64))]
    [[broken], _, _] = pickle.loads(pickle.dumps(batch))
    assert (broken.train_mask.dtype, len(broken.train_mask)) == (np.int64, 9)
    assert trajectory_error(broken) is not None
