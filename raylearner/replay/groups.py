"""The records of the ledger: one per admitted group, one per sample of it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any

from raylearner.types import PolicyVersion


class SampleState(StrEnum):
    """State of one sample of a group."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


ATTEMPTS_PER_LEDGER = 1 << 20
"""More attempts of a sample than a ledger issues between two checkpoints."""
OPEN_STATES = (SampleState.PENDING, SampleState.RUNNING)


@dataclass(slots=True, kw_only=True)
class SampleRecord:
    """One sample: its state, its current attempt, and the actor that plays it."""

    attempt: int
    state: SampleState = SampleState.PENDING
    num_failures: int = 0
    """Number of starts without a result; restores are not counted."""
    claimant: str | None = None
    started_at_s: float = 0.0
    version: PolicyVersion | None = None
    """Oldest version that its trained tokens can have: the engine's at the claim, later their own."""
    is_failed: bool = False
    """Done without an episode, after `max_attempts` starts without a result."""
    is_greedy: bool = False
    """Played for the group's baseline; it is not a member of the group."""


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """One admitted prompt and its `group_size + extra` samples, a greedy one after them if wanted."""

    group_id: int
    prompt_index: int
    policy_version: PolicyVersion
    admitted_at_s: float
    samples: list[SampleRecord]
    is_partial: bool = False
    awaits_scores: bool = False
    """Complete except for the rewards of group reward functions."""

    def num_in(self, *states: SampleState) -> int:
        """Return the number of members in one of these states."""
        return sum(s.state in states for s in self.samples if not s.is_greedy)

    @property
    def greedy_index(self) -> int | None:
        """Sample index of the greedy sample, if there is one."""
        return len(self.samples) - 1 if self.samples[-1].is_greedy else None

    @property
    def is_playing_greedy(self) -> bool:
        return any(s.is_greedy and s.state in OPEN_STATES for s in self.samples)

    @property
    def versions(self) -> list[PolicyVersion]:
        """Oldest version of each member, running or done."""
        return [s.version for s in self.samples if s.version is not None and not s.is_greedy]


class PendingSamples:
    """The samples to play, oldest groups first. Those that are no longer pending are skipped."""

    def __init__(self, groups: Iterable[GroupRecord] = ()) -> None:
        self._heap: list[tuple[int, int]] = []
        for group in groups:
            self.add(group)

    def add(self, group: GroupRecord) -> None:
        """Add every pending sample of a group."""
        for index, sample in enumerate(group.samples):
            if sample.state is SampleState.PENDING:
                self.push(group.group_id, index)

    def push(self, group_id: int, index: int) -> None:
        heappush(self._heap, (group_id, index))

    def is_empty(self, running: Mapping[int, GroupRecord]) -> bool:
        """Return whether no sample is pending."""
        while self._heap:
            group_id, index = self._heap[0]
            group = running.get(group_id)
            if group is not None and group.samples[index].state is SampleState.PENDING:
                return False
            heappop(self._heap)
        return True

    def pop(
        self, running: Mapping[int, GroupRecord], is_held_back: Callable[[SampleRecord], bool]
    ) -> tuple[GroupRecord, int] | None:
        """Remove and return the first sample that is not held back."""
        held_back: list[tuple[int, int]] = []
        found = None
        while self._heap and found is None:
            place = heappop(self._heap)
            group = running.get(place[0])
            if group is None or group.samples[place[1]].state is not SampleState.PENDING:
                continue
            if is_held_back(group.samples[place[1]]):
                held_back.append(place)
            else:
                found = group, place[1]
        for place in held_back:
            self.push(*place)
        return found


@dataclass(slots=True, kw_only=True)
class LedgerCounts:
    """Totals over the whole run, restores included."""

    admitted: int = 0
    claimed: int = 0
    reissued: int = 0
    trained: int = 0
    steps: int = 0
    """Learner steps committed, each of one take."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Groups that never trained, by reason."""

    def state(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": dict(self.dropped)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "LedgerCounts":
        values: dict[str, Any] = {**state, "dropped": Counter(state["dropped"])}
        return cls(**values)


def group_state(group: GroupRecord) -> dict[str, Any]:
    """Return values for JSON; times are left out, since another process has another clock."""
    state = asdict(group)
    del state["admitted_at_s"]
    for sample in state["samples"]:
        del sample["started_at_s"]
    return state


def groups_from(states: list[dict[str, Any]], now_s: float) -> dict[int, GroupRecord]:
    """Invert `group_state`; return groups by id. Time limits start at `now_s`."""
    return {state["group_id"]: _group_from(state, now_s) for state in states}


def _group_from(state: dict[str, Any], now_s: float) -> GroupRecord:
    samples = [_sample_from(sample) for sample in state["samples"]]
    values: dict[str, Any] = {**state, "samples": samples, "admitted_at_s": now_s}
    return GroupRecord(**values)


def _sample_from(state: dict[str, Any]) -> SampleRecord:
    values: dict[str, Any] = {**state, "state": SampleState(state["state"])}
    return SampleRecord(**values)


def episode_seed(run_seed: int, group_id: int, sample_index: int, num_failures: int) -> int:
    """Return the seed of one start, below 2**63.

    A start after a failure gets another seed; one that a restore interrupted repeats its seed, so that
    a resumed run plays the same episodes as an uninterrupted one.
    """
    text = f"{run_seed}/{group_id}/{sample_index}/{num_failures}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
