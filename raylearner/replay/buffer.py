"""Finished episodes between rollout and learner: put, completion of groups, take, commit.

Consumes episodes; produces complete groups, oldest first. Never blocks: `take` returns None when it
cannot be served yet, and `describe` reports what is missing. Not thread-safe.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.codec import EpisodeBatch
from raylearner.config.schema import ReplaySection
from raylearner.errors import ReplayError, TooManyFailures
from raylearner.replay.closing import GroupCloser, PendingGroupScores, ScoreRequest
from raylearner.replay.groups import GroupRecord, SampleState
from raylearner.replay.ledger import Ledger
from raylearner.replay.sampler import Sampler
from raylearner.replay.staleness import (
    StalenessDecision,
    WaitRule,
    decide_staleness,
    staleness_histogram,
    trained_versions,
)
from raylearner.replay.stats import ReplayCounters, buffer_metrics, describe, take_metrics
from raylearner.replay.store import EpisodeStore
from raylearner.replay.validation import episode_error
from raylearner.types import (
    ClaimReply,
    EpisodeScore,
    PolicyVersion,
    Prompt,
    Trajectory,
    TrajectoryGroup,
)

logger = logging.getLogger(__name__)

MAX_NAMED_ROWS = 10
"""Maximum number of changed rows that a resume names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """The groups that one learner step trains on, leased until `commit`."""

    groups: list[TrajectoryGroup]
    metrics: dict[str, float]
    staleness_histogram: list[int]
    """Trained tokens by staleness in versions."""
    failures: list[str] = field(default_factory=list[str])
    """The first failed episode of each kind since the last take, with its cause."""

    def __reduce__(self) -> tuple[Any, ...]:
        groups = [replace(group, trajectories=()) for group in self.groups]
        trajectories = EpisodeBatch(list(group.trajectories) for group in self.groups)
        rest = (self.metrics, self.staleness_histogram, self.failures)
        return _unpack_take, (groups, trajectories, *rest)


def _unpack_take(
    groups: list[TrajectoryGroup], trajectories: list[list[Trajectory]], *rest: Any
) -> Take:
    pairs = zip(groups, trajectories, strict=True)
    metrics, histogram, failures = rest
    return Take(
        groups=[replace(group, trajectories=tuple(segments)) for group, segments in pairs],
        metrics=metrics,
        staleness_histogram=histogram,
        failures=failures,
    )


class ReplayBuffer:
    """Owns the ledger and every finished episode that has not trained.

    Guarantees: an episode is stored with all its segments or not at all; a group trains once; no
    trained token of a take is beyond `max_staleness`, unless `on_stale` is `train`; every group
    that does not train is counted by its reason.
    """

    def __init__(
        self,
        config: ReplaySection,
        prompts: Sequence[Prompt],
        seed: int,
        *,
        sampler: Sampler | None = None,
        should_score_groups: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `should_score_groups`, a complete group waits for `put_scores` before it may train."""
        self.config = config
        self.ledger = Ledger(config, prompts, seed, sampler=sampler)
        self.counters = ReplayCounters(
            error_window=config.error_window,
            max_error_fraction=config.max_error_fraction,
            max_tool_failure_fraction=config.max_tool_failure_fraction,
            max_filtered_groups=config.max_filtered_groups,
        )
        self.store = EpisodeStore()
        self.num_changes = 0
        """Number of claims, puts, takes and commits: the watchdog's measure of progress."""
        self._clock = clock
        self._last_take = take_metrics([], [], 0)
        self._wanted: tuple[int, PolicyVersion] | None = None
        self._engine_versions: dict[str, PolicyVersion] = {}
        self._wait = WaitRule(config)
        self._closer = GroupCloser(
            config,
            ledger=self.ledger,
            store=self.store,
            counters=self.counters,
            pending=PendingGroupScores() if should_score_groups else None,
        )

    @property
    def policy_version(self) -> PolicyVersion:
        return self.ledger.policy_version

    def claim(self, actor_id: str, engine_version: PolicyVersion, max_claims: int) -> ClaimReply:
        """Return samples to play and claims to stop; with `max_claims` 0 only the latter."""
        self.close_expired()
        self._engine_versions[actor_id] = engine_version
        claims = self.ledger.claim(actor_id, engine_version, max_claims, now_s=self._clock())
        self.num_changes += len(claims)
        return ClaimReply(
            claims=claims,
            cancelled=self.ledger.pop_cancelled(actor_id),
            policy_version=self.policy_version,
        )

    def put(self, episode: Sequence[Trajectory]) -> str:
        """Store one episode, all segments or none, and return the outcome.

        `accepted`; `duplicate` of an accepted one; `late`: its group is complete, its sample was
        claimed again, or a restore discarded its claim; `refused: <rule>`: its sample is played again. Arrays are copied.
        """
        self.close_expired()
        self.num_changes += 1
        if not episode:
            return self._refuse(None, "an episode must have at least one segment")
        first = episode[0]
        group_id, index, attempt = first.episode_key
        group = self.ledger.find(group_id)
        if group is None or not 0 <= index < len(group.samples):
            was_issued = 0 <= group_id < self.ledger.next_group_id
            if group is None and (was_issued or 0 <= attempt < self.ledger.first_attempt):
                return self._count_late(episode)
            return self._refuse(None, f"the claim {first.episode_key} was never issued")
        sample = group.samples[index]
        if sample.attempt == attempt and index in self.store.groups.get(group_id, {}):
            self.counters.duplicate += 1
            return "duplicate"
        if sample.state is not SampleState.RUNNING or sample.attempt != attempt:
            if sample.state is SampleState.PENDING and attempt >= sample.attempt:
                return self._refuse(None, f"the claim {first.episode_key} was never issued")
            return self._count_late(episode)
        error = episode_error(
            episode,
            prompt_id=self.ledger.prompt_of(group).prompt_id,
            policy_version=self.policy_version,
        )
        if error is not None:
            return self._refuse((group, index), error)
        self._store(group, index, episode)
        self._closer.settle(group)
        return "accepted"

    def take(self, num_groups: int, policy_version: PolicyVersion) -> Take | None:
        """Lease and return the oldest `num_groups` complete groups; None while there are fewer.

        Raises `TooManyFailures` once too many episodes failed or too many groups were filtered.
        """
        if num_groups > self.ledger.capacity:
            raise ReplayError(
                f"take of {num_groups} groups can never be served: the capacity is "
                f"{self.ledger.capacity}, (max_staleness + 1) * groups_per_step"
            )
        self.ledger.advance(policy_version)
        self.close_expired()
        self._wanted = (num_groups, policy_version)
        if self.counters.failure is not None:
            raise TooManyFailures(self.counters.failure)
        decisions = self._decide(num_groups)
        if self.counters.failure is not None:
            raise TooManyFailures(self.counters.failure)
        if len(decisions) < num_groups or self._wait.holds_back(
            self.ledger.running.values(), policy_version, next_group_id=self.ledger.next_group_id
        ):
            return None
        groups = [decision.group for decision in decisions if decision.group is not None]
        for group in groups:
            self.ledger.lease(self.ledger.held[group.group_id])
        self.counters.count_leased()
        self._wanted = None
        self._wait.reset()
        self.num_changes += 1
        trajectories = [t for group in groups for t in group.trajectories]
        versions = [trained_versions(t) for t in trajectories]
        self._last_take = take_metrics(
            trajectories,
            versions,
            policy_version,
            num_masked_tokens=sum(d.num_masked_tokens for d in decisions),
            num_over_stale_tokens=sum(d.num_over_stale_tokens for d in decisions),
        )
        return Take(
            groups=groups,
            metrics=self.metrics(),
            staleness_histogram=staleness_histogram(versions, policy_version),
            failures=self.counters.drain_failures(),
        )

    def commit(self, group_ids: Sequence[int], policy_version: PolicyVersion) -> None:
        """Count leased groups as trained. A skipped step leaves the version unchanged."""
        missing = [group_id for group_id in group_ids if group_id not in self.ledger.leased]
        if missing or len(set(group_ids)) != len(group_ids):
            raise ReplayError(f"commit of groups that are not leased, or given twice: {missing}")
        self.ledger.advance(policy_version)
        leased = [self.ledger.leased[group_id] for group_id in group_ids]
        self.ledger.observe([self._closer.observed(record, is_trained=True) for record in leased])
        for group_id in group_ids:
            greedy_index = self.ledger.train(group_id).greedy_index
            for episode in self.store.pop_group(group_id):
                if episode[0].sample_index != greedy_index:
                    self.counters.count_finished(episode, is_trained=True)
        self.ledger.counts.steps += 1
        self.num_changes += 1

    def release(self) -> None:
        """Return leased groups to the complete ones, after the learner was lost."""
        self.ledger.release()

    def fail_actor(self, actor_id: str, *, is_failure: bool = True) -> int:
        """Return the running samples of an actor that is gone to pending; return their number."""
        touched = self.ledger.fail_actor(actor_id, is_failure=is_failure)
        self._engine_versions.pop(actor_id, None)
        for group in {group.group_id: group for group in touched}.values():
            self._closer.settle(group)
        return len(touched)

    def score_requests(self) -> list[ScoreRequest]:
        """Return groups that became complete since the last call and await `put_scores`."""
        return self._closer.score_requests()

    def put_scores(self, request: ScoreRequest, scores: Mapping[int, EpisodeScore]) -> None:
        """Store the final rewards of a group by sample index; ignored where they are not awaited any more."""
        self.num_changes += self._closer.put_scores(request, scores)

    def close_expired(self) -> None:
        """Close groups at their time limit: complete or dropped, by `partial_groups`."""
        for group in self.ledger.expired(self._clock()):
            self._closer.close_incomplete(group)

    def next_deadline_s(self) -> float | None:
        """Return the time of the clock at which the next group reaches its time limit."""
        return self.ledger.next_deadline_s()

    def metrics(self) -> dict[str, float]:
        """Return totals of the run, and `buffer/staleness/*` and the like of the last take."""
        return {
            "buffer/size": self.store.num_trajectories,
            "buffer/images": len(self.store.images),
            **buffer_metrics(self.ledger, now_s=self._clock()),
            **self.counters.metrics(),
            **self._last_take,
        }

    def describe(self) -> list[str]:
        """Return lines on running episodes by actor, and on what claims and `take` wait for."""
        return describe(
            self.ledger,
            now_s=self._clock(),
            engine_versions=self._engine_versions,
            wanted=self._wanted,
        )

    def restore(
        self,
        ledger: dict[str, Any],
        counters: dict[str, Any],
        prompt_order: NDArray[np.int64],
        trajectories: Sequence[Trajectory],
        *,
        num_lost: int = 0,
    ) -> None:
        """Replace the state by a saved one; see `Ledger.restore` for running and leased groups, and for
        `num_lost`.

        Episodes stored after the save are dropped and counted; their samples are played again.
        Groups of prompts whose rows changed since are dropped with their episodes.
        """
        lost = self.store.episode_keys() - {t.episode_key for t in trajectories}
        changed = self.ledger.restore(ledger, prompt_order, now_s=self._clock(), num_lost=num_lost)
        self.counters.restore(counters)
        self.counters.rolled_back += len(lost)
        self.store.restore([self._with_current_row(t) for t in trajectories])
        if changed:
            self._drop_changed(changed)
        self._last_take = take_metrics([], [], 0)
        self._wanted = None
        self._wait.reset()
        for group in list(self.ledger.running.values()):  # group_size may differ from the saved one
            self._closer.settle(group)
        self._closer.request_again()

    def _with_current_row(self, trajectory: Trajectory) -> Trajectory:
        """Update ids and sources that hold a path; rows are matched by their content."""
        group = self.ledger.find(trajectory.group_id)
        if group is None:
            return trajectory
        prompt = self.ledger.prompt_of(group)
        return replace(trajectory, prompt_id=prompt.prompt_id, source=prompt.source)

    def _drop_changed(self, changed: Collection[int]) -> None:
        ledger = self.ledger
        groups = [*ledger.running.values(), *ledger.held.values()]
        dropped = [group for group in groups if group.prompt_index in changed]
        for group in dropped:
            self._closer.drop(group, "changed_row")
        names = [ledger.prompt(index).prompt_id for index in sorted(changed)[:MAX_NAMED_ROWS]]
        logger.warning(
            "%d rows of data.train changed since the checkpoint: %s%s; %d unfinished groups of them"
            " are dropped, and the rows are played as they are now",
            len(changed),
            ", ".join(names),
            ", ..." if len(changed) > len(names) else "",
            len(dropped),
        )

    def _refuse(self, sample: tuple[GroupRecord, int] | None, rule: str) -> str:
        self.counters.count_refused(rule)
        if sample is not None:
            group, index = sample
            self.ledger.give_back(group, index)
            self._closer.settle(group)
        return f"refused: {rule}"

    def _count_late(self, episode: Sequence[Trajectory]) -> str:
        self.counters.late += 1
        self.counters.count_finished(episode, is_trained=False)
        return "late"

    def _store(self, group: GroupRecord, index: int, episode: Sequence[Trajectory]) -> None:
        owned = self.store.add(episode)
        trained = [trained_versions(segment) for segment in owned]
        version = min((int(versions.min()) for versions in trained if len(versions)), default=None)
        self.ledger.finish(group, index, version)
        self.counters.count_accepted(owned)

    def _decide(self, num_groups: int) -> list[StalenessDecision]:
        """Choose the oldest groups that may train, at most `num_groups`; drop those that may not."""
        decisions: list[StalenessDecision] = []
        if len(self.ledger.held) < num_groups or self.ledger.num_ready < num_groups:
            return decisions
        for record in self.ledger.held_oldest_first():
            if record.awaits_scores:
                continue
            decision = self._decide_one(record)
            if decision.group is None:
                self._closer.drop(record, "stale")
            else:
                decisions.append(decision)
                if len(decisions) == num_groups:
                    break
        return decisions

    def _decide_one(self, record: GroupRecord) -> StalenessDecision:
        group, oldest_allowed = (
            self._closer.group(record),
            self.policy_version - self.config.max_staleness,
        )
        if min(record.versions, default=oldest_allowed) >= oldest_allowed:
            return StalenessDecision(group=group)  # without reading its tokens
        return decide_staleness(
            group,
            self.policy_version,
            max_staleness=self.config.max_staleness,
            on_stale=self.config.on_stale,
        )
