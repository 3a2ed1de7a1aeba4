"""A replay buffer on a clock of the test, and episodes for its claims."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from episodes import make_trajectory, make_turn

from raylearner.config.schema import ReplaySection
from raylearner.replay import snapshot
from raylearner.replay.buffer import ReplayBuffer, Take
from raylearner.replay.sampler import Sampler
from raylearner.types import Claim, Prompt, Trajectory

PROMPTS = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(4)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_section(**values: Any) -> ReplaySection:
    return ReplaySection(**{"groups_per_step": 2, "group_size": 2, "max_staleness": 1} | values)


def make_buffer(
    clock: Clock | None = None,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    sampler: Sampler | None = None,
    **values: Any,
) -> ReplayBuffer:
    section = make_section(**values)
    return ReplayBuffer(section, prompts, seed=0, clock=clock or Clock(), sampler=sampler)


def resume(buffer: ReplayBuffer, fresh: ReplayBuffer) -> ReplayBuffer:
    """Return the `fresh` buffer with the state of the other, by way of JSON."""
    metadata, arrays = snapshot.take_snapshot(buffer).state()
    snapshot.restore(fresh, json.loads(json.dumps(metadata)), arrays, {})
    return fresh


IMAGE = 99
"""The placeholder of an image."""


def make_episode(
    claim: Claim,
    *,
    reward: float | None = 1.0,
    versions: tuple[int, ...] = (0, 0),
    error: str | None = None,
    images: tuple[bytes, ...] = (),
    num_segments: int = 1,
) -> list[Trajectory]:
    prompt = [0, *[IMAGE, 0] * len(images)]
    start, size = len(prompt), len(prompt) + len(versions)
    turn = make_turn(
        "42",
        start=start,
        end=size,
        min_policy_version=min(versions, default=0),
        max_policy_version=max(versions, default=0),
    )
    segment = make_trajectory(
        [-1] * start + list(versions),
        claim=claim,
        token_ids=np.array([*prompt, *range(1, 1 + len(versions))], np.int32),
        turns=(turn,),
        images=images,
        image_token_id=IMAGE,
        reward=reward,
        rewards={"exact_answer": reward, "format": None},
        error=error,
        metrics={"num_calls": 1.0},
    )
    return [replace(segment, segment=i) for i in range(num_segments)]


def claim(buffer: ReplayBuffer, count: int, *, actor: str = "a") -> list[Claim]:
    return buffer.claim(actor, buffer.policy_version, count).claims


def fill(buffer: ReplayBuffer, num_groups: int, **values: Any) -> list[Claim]:
    """Plays `num_groups` groups with rewards 0, 1, 0, .. in each."""
    claims = claim(buffer, num_groups * buffer.config.group_size)
    for each in claims:
        reward = float(each.sample_index % 2)
        assert buffer.put(make_episode(each, **{"reward": reward} | values)) == "accepted"
    return claims


def taken(take: Take | None) -> list[int]:
    assert take is not None
    return [group.group_id for group in take.groups]
