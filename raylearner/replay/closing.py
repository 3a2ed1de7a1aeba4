"""Rules that close a group: when it is complete, and whether it may train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raylearner.config.schema import ReplaySection
from raylearner.replay.groups import OPEN_STATES, GroupRecord, SampleState
from raylearner.replay.ledger import Ledger
from raylearner.replay.sampler import SeenGroup
from raylearner.replay.stats import ReplayCounters
from raylearner.replay.store import EpisodeStore
from raylearner.types import EpisodeScore, Prompt, StopReason, Trajectory, TrajectoryGroup

MIN_PARTIAL_EPISODES = 2
"""Minimum number of scored episodes that a group needs at its time limit: fewer give no baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One complete group to be scored, with a unique `number`."""

    number: int
    group_id: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


class PendingGroupScores:
    """Owns the requests for rewards of whole groups: unsent ones, and those that are still valid."""

    def __init__(self) -> None:
        self._next_number = 0
        self._new: list[ScoreRequest] = []
        self._latest: dict[int, int] = {}  # number of the latest request, by group_id

    def request(self, group_id: int, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Add a request, which replaces an earlier one for the same group."""
        request = ScoreRequest(
            number=self._next_number,
            group_id=group_id,
            prompt=prompt,
            trajectories=tuple(trajectories),
        )
        self._next_number += 1
        self._latest[group_id] = request.number
        self._new.append(request)

    def pop_new(self) -> list[ScoreRequest]:
        """Return valid requests since the last call."""
        new = [request for request in self._new if self.is_valid(request)]
        self._new.clear()
        return new

    def is_valid(self, request: ScoreRequest) -> bool:
        return self._latest.get(request.group_id) == request.number

    def forget(self, group_id: int) -> None:
        """Invalidate the request of a group that was scored or dropped."""
        self._latest.pop(group_id, None)

    def clear(self) -> None:
        self._new.clear()
        self._latest.clear()


class GroupCloser:
    """Moves groups of the ledger from running to held, or drops them with their episodes.

    With group reward functions (`pending` is given), a complete group is held until `put_scores`
    brings its final rewards, and filtered then.
    """

    def __init__(
        self,
        config: ReplaySection,
        *,
        ledger: Ledger,
        store: EpisodeStore,
        counters: ReplayCounters,
        pending: PendingGroupScores | None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._store = store
        self._counters = counters
        self._pending = pending

    def score_requests(self) -> list[ScoreRequest]:
        """Return groups that became complete since the last call and await `put_scores`."""
        return [] if self._pending is None else self._pending.pop_new()

    def put_scores(self, request: ScoreRequest, scores: Mapping[int, EpisodeScore]) -> bool:
        """Store the final rewards of a group; return False where they are not awaited any more."""
        if self._pending is None or not self._pending.is_valid(request):
            return False
        self._pending.forget(request.group_id)
        self._store.rescore(request.group_id, scores)
        self._counters.count_scores(scores.values())
        self._filter(self._ledger.held[request.group_id])
        return True

    def request_again(self) -> None:
        """Request the scores of every group that awaited them at a save; earlier requests are void."""
        if self._pending is not None:
            self._pending.clear()
        for group in self._ledger.held_oldest_first():
            if group.awaits_scores:
                self._close(group)

    def settle(self, group: GroupRecord) -> None:
        """Close a running group that is complete, or that cannot become complete any more."""
        if group.is_playing_greedy:
            return
        if group.num_in(SampleState.DONE) >= self._config.group_size:
            self._close(group)
        elif group.num_in(*OPEN_STATES) == 0:
            self.close_incomplete(group)

    def close_incomplete(self, group: GroupRecord) -> None:
        num_usable = len(
            self._scored_rewards(group) if self._pending is None else self._played(group)
        )
        if self._config.partial_groups == "train" and num_usable >= MIN_PARTIAL_EPISODES:
            self._close(group)
        else:
            self.drop(group, "time_limit")

    def _close(self, group: GroupRecord) -> None:
        """Filter a complete group after the group reward functions scored it."""
        if self._pending is None or not self._played(group):
            self._filter(group)
            return
        if not group.awaits_scores:
            self._ledger.hold(group, is_partial=self._is_partial(group), awaits_scores=True)
        self._pending.request(
            group.group_id,
            self._ledger.prompt_of(group),
            [t for t in self.group(group).trajectories if t.stop_reason is not StopReason.ERROR],
        )

    def _filter(self, group: GroupRecord) -> None:
        """Keep a group whose rewards are final, or drop it."""
        scored = self._scored_rewards(group)
        if not scored:
            self.drop(group, "all_failed")
        elif group.greedy_index is not None and self._greedy_reward(group) is None:
            self.drop(group, "no_baseline")
        elif self._config.drop_zero_variance and min(scored) == max(scored):
            self.drop(group, "zero_variance")
        else:
            if group.group_id in self._ledger.running:
                self._ledger.hold(group, is_partial=self._is_partial(group))
            group.awaits_scores = False
            self._counters.count_usable()

    def _is_partial(self, group: GroupRecord) -> bool:
        num_episodes = len(self._store.groups[group.group_id]) - (group.greedy_index is not None)
        return num_episodes < self._config.group_size

    def _played(self, group: GroupRecord) -> list[int]:
        """Return the members that ended without an error."""
        return [
            index
            for index, episode in self._store.groups.get(group.group_id, {}).items()
            if index != group.greedy_index and episode[0].stop_reason is not StopReason.ERROR
        ]

    def _scored_rewards(self, group: GroupRecord) -> list[float]:
        """Return the reward of each member that has one."""
        indices = (i for i, sample in enumerate(group.samples) if not sample.is_greedy)
        rewards = (self._store.reward(group.group_id, index) for index in indices)
        return [reward for reward in rewards if reward is not None]

    def _greedy_reward(self, group: GroupRecord) -> float | None:
        index = group.greedy_index
        return None if index is None else self._store.reward(group.group_id, index)

    def drop(self, group: GroupRecord, why: str) -> None:
        if why == "zero_variance":
            self._ledger.observe([self.observed(group, is_trained=False)])
        if self._pending is not None:
            self._pending.forget(group.group_id)
        self._ledger.drop(group, why)
        for episode in self._store.pop_group(group.group_id):
            if episode[0].sample_index != group.greedy_index:
                self._counters.count_finished(episode, is_trained=False)
        if why == "stale":
            self._counters.count_stale()
        elif why != "changed_row":
            self._counters.count_filtered(why)

    def group(self, record: GroupRecord) -> TrajectoryGroup:
        return TrajectoryGroup(
            group_id=record.group_id,
            prompt_id=self._ledger.prompt_of(record).prompt_id,
            policy_version=record.policy_version,
            trajectories=tuple(
                t
                for t in self._store.trajectories(record.group_id)
                if t.sample_index != record.greedy_index
            ),
            is_partial=record.is_partial,
            greedy_reward=self._greedy_reward(record),
        )

    def observed(self, record: GroupRecord, *, is_trained: bool) -> SeenGroup:
        group = self.group(record)
        return SeenGroup(index=record.prompt_index, group=group, is_trained=is_trained)
