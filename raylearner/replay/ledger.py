"""States of groups and samples: admission, claims, and the prompts of episodes.

Consumes claims and reports of finished or failed samples, without tokens. Not thread-safe; the
caller passes the time.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.config.schema import ReplaySection
from raylearner.errors import ReplayError
from raylearner.replay.groups import (
    ATTEMPTS_PER_LEDGER,
    OPEN_STATES,
    GroupRecord,
    LedgerCounts,
    PendingSamples,
    SampleRecord,
    SampleState,
    episode_seed,
    group_state,
    groups_from,
)
from raylearner.replay.sampler import PromptSource, Sampler, SeenGroup
from raylearner.types import Claim, PolicyVersion, Prompt

Key = tuple[int, int, int]
"""(group_id, sample_index, attempt)."""


class Ledger:
    """Owns every sample's state, the position in the prompts, and the replay's copy of the policy version.

    Guarantees: `admitted == running + held + leased + trained + dropped`; at most one claim of a
    sample is alive; a group is trained at most once; a claim key is never issued twice, not even
    after an earlier state was restored into this ledger.
    """

    def __init__(
        self,
        config: ReplaySection,
        prompts: Sequence[Prompt],
        seed: int,
        *,
        sampler: Sampler | None = None,
    ) -> None:
        """Without a sampler, every epoch shuffles the prompts again."""
        self.config = config
        self.policy_version: PolicyVersion = 0  # the learner's, as of the last take or commit
        self.running: dict[int, GroupRecord] = {}  # in order of their time limits
        self.held: dict[int, GroupRecord] = {}
        self.leased: dict[int, GroupRecord] = {}
        self.counts = LedgerCounts()
        self.next_group_id = 0
        self._prompts = PromptSource(prompts, seed, sampler=sampler)
        self._seed = seed
        self.first_attempt = 0  # lower ones were issued under discarded states
        self._last_attempt = -1  # the highest attempt ever issued
        self._pending = PendingSamples()
        self._held_order: list[int] = []
        self._cancelled: dict[str, list[Key]] = {}

    def advance(self, policy_version: PolicyVersion) -> None:
        """Set the learner's version, an argument of every take and commit."""
        if policy_version < self.policy_version:
            raise ReplayError(
                f"the learner is at policy version {policy_version}, the replay at "
                f"{self.policy_version}: load the replay's part of the learner's checkpoint first"
            )
        self.policy_version = policy_version

    @property
    def capacity(self) -> int:
        return (self.config.max_staleness + 1) * self.config.groups_per_step

    @property
    def num_steps(self) -> int:
        """Number of committed learner steps, whatever the size of their takes."""
        return self.counts.steps

    @property
    def size(self) -> int:
        """Number of groups that occupy capacity."""
        return len(self.running) + len(self.held) + len(self.leased)

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index]

    def prompt_of(self, group: GroupRecord) -> Prompt:
        return self._prompts[group.prompt_index]

    def observe(self, groups: Sequence[SeenGroup]) -> None:
        """Pass groups that trained, or gave no learning signal, to the sampler."""
        self._prompts.observe(groups)

    def find(self, group_id: int) -> GroupRecord | None:
        return self.running.get(group_id) or self.held.get(group_id) or self.leased.get(group_id)

    def held_oldest_first(self) -> list[GroupRecord]:
        return [self.held[group_id] for group_id in self._held_order]

    @property
    def num_ready(self) -> int:
        """Number of held groups whose rewards are all final."""
        return sum(not group.awaits_scores for group in self.held.values())

    def why_unfit(self, engine_version: PolicyVersion) -> str | None:
        """Return why an engine at `engine_version` gets no claim; None where it may claim.

        An engine ahead of the learner holds weights that a rollback discarded.
        """
        lag = self.policy_version - engine_version
        if 0 <= lag <= self.config.max_staleness:
            return None
        where = f"{lag} behind" if lag > 0 else "ahead of"
        return (
            f"its engine is at version {engine_version}, {where} the learner's "
            f"{self.policy_version}; max_staleness is {self.config.max_staleness}"
        )

    def why_full(self) -> str | None:
        """Return why no further group is admitted; None where one may be."""
        if self.size >= self.capacity:
            return (
                f"{len(self.running)} running + {len(self.held)} held + {len(self.leased)} leased "
                f"groups take up the capacity of {self.capacity}"
            )
        cap = self.config.max_concurrent_groups
        if cap is not None and len(self.running) >= cap:
            return f"{len(self.running)} groups run, max_concurrent_groups is {cap}"
        return None

    def claim(
        self, actor_id: str, engine_version: PolicyVersion, max_claims: int, *, now_s: float
    ) -> list[Claim]:
        """Claim up to `max_claims` samples: those of admitted groups first, oldest first, then new ones.

        An actor plays one sample at a time whose next failure is the last, so that an engine's death
        ends no other with it.
        """
        claims: list[Claim] = []
        if max_claims == 0 or self.why_unfit(engine_version) is not None:
            return claims

        def is_held_back(sample: SampleRecord) -> bool:
            return self._is_last(sample) and any(
                self._is_last(other) for _, _, other in self._samples_of(actor_id)
            )

        while len(claims) < max_claims:
            found = self._pending.pop(self.running, is_held_back)
            if found is not None:
                group, index = found
                claims.append(self.start(group, index, actor_id, engine_version, now_s))
            elif self.why_full() is None:
                self._admit(now_s)
            else:
                break
        return claims

    def has_samples(self) -> bool:
        """Return whether a claim could be given a sample: one is pending, or a group may be admitted."""
        return self.why_full() is None or not self._pending.is_empty(self.running)

    def cancelled_actors(self) -> list[str]:
        """Return the actors with claims to stop that they have not received."""
        return list(self._cancelled)

    def pop_cancelled(self, actor_id: str) -> list[Key]:
        """Return claims of `actor_id` to stop; each is returned once."""
        return self._cancelled.pop(actor_id, [])

    def finish(self, group: GroupRecord, index: int, version: PolicyVersion | None) -> None:
        """Mark a running sample as done; `version` is the oldest one that it trains on."""
        sample = group.samples[index]
        assert sample.state is SampleState.RUNNING, sample
        sample.state, sample.version = SampleState.DONE, version

    def give_back(self, group: GroupRecord, index: int) -> None:
        """Return a running sample without a result to pending, or mark it as failed after `max_attempts`."""
        sample = group.samples[index]
        assert sample.state is SampleState.RUNNING, sample
        sample.num_failures += 1
        if sample.num_failures >= self.config.max_attempts:
            sample.state, sample.version, sample.is_failed = SampleState.DONE, None, True
        else:
            self._reissue(group, index)

    def fail_actor(self, actor_id: str, *, is_failure: bool = True) -> list[GroupRecord]:
        """Give back all running samples of `actor_id`; return the group of each.

        One of them may have caused the death, and the others did not: only those with the most
        failures so far get another. On its last attempt a sample is alone with such (see `claim`).
        """
        self._cancelled.pop(actor_id, None)
        found = self._samples_of(actor_id)
        most = max((sample.num_failures for _, _, sample in found), default=0)
        for group, index, sample in found:
            if is_failure and sample.num_failures == most:
                self.give_back(group, index)
            else:
                self._reissue(group, index)
        return [group for group, _, _ in found]

    def running_samples(self) -> Iterator[tuple[GroupRecord, int, SampleRecord]]:
        for group in self.running.values():
            for index, sample in enumerate(group.samples):
                if sample.state is SampleState.RUNNING:
                    yield group, index, sample

    def expired(self, now_s: float) -> list[GroupRecord]:
        """Return running groups at their time limit."""
        limit_s = self.config.group_time_limit_s
        groups: list[GroupRecord] = []
        for group in self.running.values():
            if now_s - group.admitted_at_s < limit_s:
                break
            groups.append(group)
        return groups

    def next_deadline_s(self) -> float | None:
        """Return the time at which the next running group reaches its time limit."""
        group = next(iter(self.running.values()), None)
        return None if group is None else group.admitted_at_s + self.config.group_time_limit_s

    def hold(self, group: GroupRecord, *, is_partial: bool, awaits_scores: bool = False) -> None:
        """Mark a running group as complete, and cancel its open samples."""
        self._cancel_open(group)
        group.is_partial, group.awaits_scores = is_partial, awaits_scores
        del self.running[group.group_id]
        self.held[group.group_id] = group
        insort(self._held_order, group.group_id)

    def drop(self, group: GroupRecord, why: str) -> None:
        """Drop a running or held group, which frees its slot."""
        self._cancel_open(group)
        if self.running.pop(group.group_id, None) is None:
            del self.held[group.group_id]
            self._held_order.remove(group.group_id)
        self._end(group, SampleState.DROPPED)
        self.counts.dropped[why] += 1

    def lease(self, group: GroupRecord) -> None:
        del self.held[group.group_id]
        self._held_order.remove(group.group_id)
        self.leased[group.group_id] = group
        self._move(group, SampleState.DONE, SampleState.LEASED)

    def release(self) -> None:
        """Mark everything leased as done again, after the learner was lost."""
        for group in self.leased.values():
            self._move(group, SampleState.LEASED, SampleState.DONE)
            self.held[group.group_id] = group
            insort(self._held_order, group.group_id)
        self.leased.clear()

    def train(self, group_id: int) -> GroupRecord:
        group = self.leased.pop(group_id)
        self._end(group, SampleState.TRAINED)
        self.counts.trained += 1
        return group

    def state(self) -> tuple[dict[str, Any], NDArray[np.int64]]:
        """Return metadata for JSON, and the order of prompts in this epoch."""
        prompts, order = self._prompts.state()
        metadata = {
            "policy_version": self.policy_version,
            "next_group_id": self.next_group_id,
            "first_attempt": self.first_attempt,
            "last_attempt": self._last_attempt,
            "seed": self._seed,
            "prompts": prompts,
            "counts": self.counts.state(),
            "running": [group_state(group) for group in self.running.values()],
            "held": [group_state(group) for group in self.held_oldest_first()],
            "leased": [group_state(group) for group in self.leased.values()],
        }
        return metadata, order

    def restore(
        self, metadata: dict[str, Any], order: NDArray[np.int64], *, now_s: float, num_lost: int = 0
    ) -> frozenset[int]:
        """Replace the state by a saved one: running samples become pending, leased groups done.

        Returns the indices of prompts whose content changed since the save. Time limits start again.
        Claims issued under the discarded state are cancelled, and their episodes will be late, since
        their attempts are never issued again. Nor are those of `num_lost` ledgers that died.
        """
        changed = self._prompts.restore(metadata["prompts"], order)
        for group, index, sample in self.running_samples():
            self._cancel(group, index, sample)
        self.policy_version = metadata["policy_version"]
        self.next_group_id = metadata["next_group_id"]
        self._seed = metadata["seed"]
        self.counts = LedgerCounts.from_state(metadata["counts"])
        self.running = groups_from(metadata["running"], now_s)
        self.held = groups_from(metadata["held"], now_s)
        self.leased = groups_from(metadata["leased"], now_s)
        self._held_order = list(self.held)
        self.release()
        self._pending = PendingSamples(self.running.values())
        has_history = self._last_attempt >= 0 or num_lost > 0
        self.first_attempt = metadata["first_attempt"]
        last_attempt = metadata["last_attempt"] + num_lost * ATTEMPTS_PER_LEDGER
        self._last_attempt = max(self._last_attempt, last_attempt)
        if has_history:
            self._renumber()
        else:
            self._reissue_running()
        return changed

    def _samples_of(self, actor_id: str) -> list[tuple[GroupRecord, int, SampleRecord]]:
        return [found for found in self.running_samples() if found[2].claimant == actor_id]

    def _is_last(self, sample: SampleRecord) -> bool:
        """Whether a sample that failed before is not played again if it fails once more."""
        return 0 < sample.num_failures == self.config.max_attempts - 1

    def _admit(self, now_s: float) -> None:
        size = self.config.group_size + self.config.extra
        group = GroupRecord(
            group_id=self.next_group_id,
            prompt_index=self._prompts.next_index(),
            policy_version=self.policy_version,
            admitted_at_s=now_s,
            samples=[
                SampleRecord(attempt=self.first_attempt, is_greedy=index >= size)
                for index in range(size + self.config.play_greedy)
            ],
        )
        self.next_group_id += 1
        self.counts.admitted += 1
        self.running[group.group_id] = group
        self._pending.add(group)

    def start(
        self, group: GroupRecord, index: int, actor_id: str, engine_version: int, now_s: float
    ) -> Claim:
        """Claim one pending sample."""
        sample = group.samples[index]
        sample.state, sample.claimant = SampleState.RUNNING, actor_id
        sample.started_at_s, sample.version = now_s, engine_version
        self._last_attempt = max(self._last_attempt, sample.attempt)
        self.counts.claimed += 1
        return Claim(
            group_id=group.group_id,
            sample_index=index,
            attempt=sample.attempt,
            prompt=self.prompt_of(group),
            policy_version=engine_version,
            seed=episode_seed(self._seed, group.group_id, index, sample.num_failures),
            step=self.num_steps,
            is_greedy=sample.is_greedy,
        )

    def _reissue(self, group: GroupRecord, index: int) -> None:
        sample = group.samples[index]
        sample.state, sample.claimant, sample.version = SampleState.PENDING, None, None
        sample.attempt = max(sample.attempt + 1, self.first_attempt)
        self.counts.reissued += 1
        self._pending.push(group.group_id, index)

    def _reissue_running(self) -> None:
        for group, index, _ in self.running_samples():
            self._reissue(group, index)

    def _renumber(self) -> None:
        """Continue with attempts that were never issued under any state."""
        self.first_attempt = self._last_attempt + 1
        self._reissue_running()
        for group in self.running.values():
            for sample in group.samples:
                if sample.state is SampleState.PENDING:
                    sample.attempt = max(sample.attempt, self.first_attempt)

    def _cancel(self, group: GroupRecord, index: int, sample: SampleRecord) -> None:
        assert sample.claimant is not None
        key = (group.group_id, index, sample.attempt)
        self._cancelled.setdefault(sample.claimant, []).append(key)

    def _cancel_open(self, group: GroupRecord) -> None:
        for index, sample in enumerate(group.samples):
            if sample.state is SampleState.RUNNING:
                self._cancel(group, index, sample)
            if sample.state in OPEN_STATES:
                sample.state, sample.version = SampleState.DROPPED, None

    def _move(self, group: GroupRecord, before: SampleState, after: SampleState) -> None:
        for sample in group.samples:
            if sample.state is before:
                sample.state = after

    def _end(self, group: GroupRecord, state: SampleState) -> None:
        for sample in group.samples:
            if sample.state is not SampleState.DROPPED:
                sample.state = state
