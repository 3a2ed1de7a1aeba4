"""Finished episodes between rollout and learner: put, completion of groups, take, commit.

Consumes episodes; produces complete groups, oldest first. Waits for nothing itself: `take` answers
None when it cannot serve yet, and `describe` says what it lacks. Not thread-safe.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.config.schema import ReplaySection
from raylearner.errors import ReplayError, TooManyFailures
from raylearner.replay.closing import GroupCloser
from raylearner.replay.ledger import Ledger
from raylearner.replay.record import GroupRecord, SampleState
from raylearner.replay.report import buffer_metrics, describe, take_metrics
from raylearner.replay.rule import broken_rule
from raylearner.replay.sampler import Sampler
from raylearner.replay.scoring import ScoreDesk, ScoreRequest
from raylearner.replay.staleness import (
    Ruling,
    rule_on_stale,
    staleness_histogram,
    trained_versions,
)
from raylearner.replay.store import EpisodeStore
from raylearner.replay.take import Take
from raylearner.replay.tally import Tally
from raylearner.replay.wait import WaitRule
from raylearner.types import (
    ClaimReply,
    EpisodeScore,
    PolicyVersion,
    Prompt,
    Trajectory,
)

logger = logging.getLogger(__name__)

MAX_NAMED_ROWS = 10
"""Changed rows that a resume names."""


class ReplayBuffer:
    """Owns the ledger and every finished episode that has not trained.

    Promises: an episode is stored whole or not at all; a group trains once; no trained token of a
    take is staler than the bound, unless `on_stale` is `train`; everything that does not train is
    counted by its reason.
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
        self.tally = Tally(
            error_window=config.error_window,
            max_error_fraction=config.max_error_fraction,
            max_tool_failure_fraction=config.max_tool_failure_fraction,
            max_filtered_groups=config.max_filtered_groups,
        )
        self.store = EpisodeStore()
        self.num_changes = 0
        """Rises with every claim, put, take and commit."""
        self._clock = clock
        self._last_take = take_metrics([], [], 0)
        self._wanted: tuple[int, PolicyVersion] | None = None
        self._engine_versions: dict[str, PolicyVersion] = {}
        self._wait = WaitRule(config)
        self._closer = GroupCloser(
            config,
            ledger=self.ledger,
            store=self.store,
            tally=self.tally,
            desk=ScoreDesk() if should_score_groups else None,
        )

    @property
    def policy_version(self) -> PolicyVersion:
        return self.ledger.policy_version

    def claim(self, actor_id: str, engine_version: PolicyVersion, max_claims: int) -> ClaimReply:
        """Samples to play and claims to stop; `max_claims` 0 only asks for the latter."""
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
        """Stores one episode, all segments or none; says what became of it.

        `accepted`; `duplicate` of one accepted; `late`: its group is complete, or its attempt was
        given to another; `refused: <rule>`: its sample is played again. Arrays are copied.
        """
        self.close_expired()
        self.num_changes += 1
        if not episode:
            return self._refuse(None, "an episode has at least one segment")
        first = episode[0]
        group_id, index, attempt = first.episode_key
        group = self.ledger.find(group_id)
        if group is None or not 0 <= index < len(group.samples):
            if group is None and 0 <= group_id < self.ledger.next_group_id:
                return self._count_late(episode)
            return self._refuse(None, f"the claim {first.episode_key} was never given")
        sample = group.samples[index]
        if sample.attempt == attempt and index in self.store.groups.get(group_id, {}):
            self.tally.duplicate += 1
            return "duplicate"
        if sample.state is not SampleState.RUNNING or sample.attempt != attempt:
            if sample.state is SampleState.PENDING and attempt >= sample.attempt:
                return self._refuse(None, f"the claim {first.episode_key} was never given")
            return self._count_late(episode)
        rule = broken_rule(
            episode,
            prompt_id=self.ledger.prompt_of(group).prompt_id,
            policy_version=self.policy_version,
        )
        if rule is not None:
            return self._refuse((group, index), rule)
        self._store(group, index, episode)
        self._closer.settle(group)
        return "accepted"

    def take(self, num_groups: int, policy_version: PolicyVersion) -> Take | None:
        """The oldest `num_groups` complete groups, leased; None while there are not so many.

        Raises `TooManyFailures` once too many episodes failed or too many groups were filtered.
        """
        if num_groups > self.ledger.capacity:
            raise ReplayError(
                f"take of {num_groups} groups can never be served: the capacity is "
                f"{self.ledger.capacity}, (max_staleness + 1) * groups_per_step"
            )
        self._advance(policy_version)
        self.close_expired()
        self._wanted = (num_groups, policy_version)
        if self.tally.failure is not None:
            raise TooManyFailures(self.tally.failure)
        rulings = self._ruled(num_groups)
        if self.tally.failure is not None:
            raise TooManyFailures(self.tally.failure)
        if len(rulings) < num_groups or self._wait.holds_back(self.ledger):
            return None
        groups = [ruling.group for ruling in rulings if ruling.group is not None]
        for group in groups:
            self.ledger.lease(self.ledger.held[group.group_id])
        self.tally.count_leased()
        self._wanted = None
        self._wait.end()
        self.num_changes += 1
        trajectories = [t for group in groups for t in group.trajectories]
        versions = [trained_versions(t) for t in trajectories]
        self._last_take = take_metrics(
            trajectories,
            versions,
            policy_version,
            num_masked_tokens=sum(ruling.num_masked_tokens for ruling in rulings),
            num_over_stale_tokens=sum(ruling.num_over_stale_tokens for ruling in rulings),
        )
        return Take(
            groups=groups,
            metrics=self.metrics(),
            staleness_histogram=staleness_histogram(versions, policy_version),
            failures=self.tally.drain_failures(),
        )

    def commit(self, group_ids: Sequence[int], policy_version: PolicyVersion) -> None:
        """Leased groups are trained. A skipped step leaves the version as it was."""
        missing = [group_id for group_id in group_ids if group_id not in self.ledger.leased]
        if missing or len(set(group_ids)) != len(group_ids):
            raise ReplayError(f"commit of groups that are not leased, or twice: {missing}")
        self._advance(policy_version)
        leased = [self.ledger.leased[group_id] for group_id in group_ids]
        self.ledger.observe([self._closer.seen(record, is_trained=True) for record in leased])
        for group_id in group_ids:
            greedy_index = self.ledger.train(group_id).greedy_index
            for episode in self.store.pop_group(group_id):
                if episode[0].sample_index != greedy_index:
                    self.tally.count_trained(episode)
        self.ledger.count_step()
        self.num_changes += 1

    def release(self) -> None:
        """What is leased is complete again: its learner is lost."""
        self.ledger.release()

    def fail_actor(self, actor_id: str) -> int:
        """The running samples of a dead actor are pending again; returns how many there were."""
        touched = self.ledger.fail_actor(actor_id)
        self._engine_versions.pop(actor_id, None)
        for group in {group.group_id: group for group in touched}.values():
            self._closer.settle(group)
        return len(touched)

    def score_requests(self) -> list[ScoreRequest]:
        """Groups that became complete since the last call and await `put_scores`."""
        return self._closer.score_requests()

    def put_scores(self, request: ScoreRequest, scores: Mapping[int, EpisodeScore]) -> None:
        """The final rewards of a group by sample index; nothing where nobody awaits them any more."""
        self.num_changes += self._closer.put_scores(request, scores)

    def close_expired(self) -> None:
        """Groups at their time limit are complete or dropped, by `partial_groups`."""
        for group in self.ledger.expired(self._clock()):
            self._closer.close_incomplete(group)

    def next_deadline_s(self) -> float | None:
        """When, by the clock, time alone changes something."""
        return self.ledger.next_deadline_s()

    def metrics(self) -> dict[str, float]:
        """Counters are totals of the run; `buffer/staleness/*` and the like are the last take's."""
        return {
            "buffer/size": self.store.num_trajectories,
            "buffer/images": len(self.store.images),
            **buffer_metrics(self.ledger, now_s=self._clock()),
            **self.tally.metrics(),
            **self._last_take,
        }

    def describe(self) -> list[str]:
        """Who plays what since when, and what claims and `take` wait for: one line each."""
        return describe(
            self.ledger,
            now_s=self._clock(),
            engine_versions=self._engine_versions,
            wanted=self._wanted,
        )

    def restore(
        self,
        ledger: dict[str, Any],
        tally: dict[str, Any],
        prompt_order: NDArray[np.int64],
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Takes over a dump; see `Ledger.restore` for what ran or was leased.

        Of what was here, episodes that are not in the dump are dropped and counted: they were stored
        after it, and a run that goes back to it plays their samples again. Groups of prompts whose rows
        changed since are dropped: their episodes answer another question.
        """
        lost = self.store.episode_keys() - {t.episode_key for t in trajectories}
        changed = self.ledger.restore(ledger, prompt_order, now_s=self._clock())
        self.tally.restore(tally)
        self.tally.rolled_back += len(lost)
        self.store.restore([self._with_present_row(t) for t in trajectories])
        if changed:
            self._drop_changed(changed)
        self._last_take = take_metrics([], [], 0)
        self._wanted = None
        self._wait.end()
        for group in list(self.ledger.running.values()):  # group_size may differ from the dump's
            self._closer.settle(group)
        self._closer.ask_again()

    def _advance(self, policy_version: PolicyVersion) -> None:
        if policy_version < self.policy_version:
            raise ReplayError(
                f"the learner is at policy version {policy_version}, the replay at "
                f"{self.policy_version}: load the replay's part of the learner's checkpoint first"
            )
        self.ledger.policy_version = policy_version

    def _with_present_row(self, trajectory: Trajectory) -> Trajectory:
        """Rows are found by their content, so ids and sources that hold a path may have changed."""
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

    def _refuse(self, where: tuple[GroupRecord, int] | None, rule: str) -> str:
        self.tally.count_refused(rule)
        if where is not None:
            group, index = where
            self.ledger.give_back(group, index)
            self._closer.settle(group)
        return f"refused: {rule}"

    def _count_late(self, episode: Sequence[Trajectory]) -> str:
        self.tally.late += 1
        self.tally.count_finished(episode)
        return "late"

    def _store(self, group: GroupRecord, index: int, episode: Sequence[Trajectory]) -> None:
        owned = self.store.add(episode)
        trained = [trained_versions(segment) for segment in owned]
        version = min((int(versions.min()) for versions in trained if len(versions)), default=None)
        self.ledger.finish(group, index, version)
        self.tally.count_finished(owned)
        self.tally.count_accepted(owned)

    def _ruled(self, num_groups: int) -> list[Ruling]:
        """Rulings on the oldest groups that may train, at most `num_groups`; drops what may not."""
        rulings: list[Ruling] = []
        if self.ledger.num_ready < num_groups:
            return rulings
        for record in self.ledger.held_oldest_first():
            if record.awaits_scores:
                continue
            ruling = self._rule(record)
            if ruling.group is None:
                self._closer.drop(record, "stale")
            else:
                rulings.append(ruling)
                if len(rulings) == num_groups:
                    break
        return rulings

    def _rule(self, record: GroupRecord) -> Ruling:
        group, oldest_allowed = (
            self._closer.group(record),
            self.policy_version - self.config.max_staleness,
        )
        if min(record.versions, default=oldest_allowed) >= oldest_allowed:
            return Ruling(group=group)
        return rule_on_stale(
            group,
            self.policy_version,
            max_staleness=self.config.max_staleness,
            on_stale=self.config.on_stale,
        )
