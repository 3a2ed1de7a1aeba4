"""When a group is complete, and whether it may train: the rules at the end of its playing."""

from collections.abc import Mapping

from raylearner.config.schema import ReplaySection
from raylearner.replay.ledger import Ledger
from raylearner.replay.record import OPEN_STATES, GroupRecord, SampleState
from raylearner.replay.sampler import SeenGroup
from raylearner.replay.scoring import ScoreDesk, ScoreRequest
from raylearner.replay.store import EpisodeStore
from raylearner.replay.tally import Tally
from raylearner.types import EpisodeScore, StopReason, TrajectoryGroup

MIN_PARTIAL_EPISODES = 2
"""Scored episodes that a group needs at its time limit to train: fewer give no baseline."""


class GroupCloser:
    """Moves groups of the ledger from running to held, or drops them with their episodes.

    With a desk, a complete group is held until `put_scores` brings its final rewards, and judged
    then.
    """

    def __init__(
        self,
        config: ReplaySection,
        *,
        ledger: Ledger,
        store: EpisodeStore,
        tally: Tally,
        desk: ScoreDesk | None,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._store = store
        self._tally = tally
        self._desk = desk

    def score_requests(self) -> list[ScoreRequest]:
        """Groups that became complete since the last call and await `put_scores`."""
        return [] if self._desk is None else self._desk.pop_new()

    def put_scores(self, request: ScoreRequest, scores: Mapping[int, EpisodeScore]) -> bool:
        """The final rewards of a group; False where nobody awaits them any more."""
        if self._desk is None or not self._desk.is_wanted(request):
            return False
        self._desk.forget(request.group_id)
        self._store.rescore(request.group_id, scores)
        self._tally.count_scores(scores.values())
        self._judge(self._ledger.held[request.group_id])
        return True

    def ask_again(self) -> None:
        """Everything that awaited scores when a dump was written; earlier requests are void."""
        if self._desk is not None:
            self._desk.clear()
        for group in self._ledger.held_oldest_first():
            if group.awaits_scores:
                self._close(group)

    def settle(self, group: GroupRecord) -> None:
        """Closes a running group that is complete, or that nothing can complete any more."""
        if group.is_playing_greedy:
            return
        if group.num_in(SampleState.DONE) >= self._config.group_size:
            self._close(group)
        elif group.num_in(*OPEN_STATES) == 0:
            self.close_incomplete(group)

    def close_incomplete(self, group: GroupRecord) -> None:
        num_usable = len(self._scored_rewards(group) if self._desk is None else self._played(group))
        if self._config.partial_groups == "train" and num_usable >= MIN_PARTIAL_EPISODES:
            self._close(group)
        else:
            self.drop(group, "time_limit")

    def _close(self, group: GroupRecord) -> None:
        """A complete group is judged, where functions see groups after these gave their scores."""
        if self._desk is None or not self._played(group):
            self._judge(group)
            return
        if not group.awaits_scores:
            self._ledger.hold(group, is_partial=self._is_partial(group), awaits_scores=True)
        self._desk.ask(
            group.group_id,
            self._ledger.prompt_of(group),
            [t for t in self.group(group).trajectories if t.stop_reason is not StopReason.ERROR],
        )

    def _judge(self, group: GroupRecord) -> None:
        """Keeps a group whose rewards are final, or drops it."""
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
            self._tally.count_usable()

    def _is_partial(self, group: GroupRecord) -> bool:
        num_episodes = len(self._store.groups[group.group_id]) - (group.greedy_index is not None)
        return num_episodes < self._config.group_size

    def _played(self, group: GroupRecord) -> list[int]:
        """Members that ended without an error."""
        return [
            index
            for index, episode in self._store.groups.get(group.group_id, {}).items()
            if index != group.greedy_index and episode[0].stop_reason is not StopReason.ERROR
        ]

    def _scored_rewards(self, group: GroupRecord) -> list[float]:
        """One per member that has a reward."""
        indices = (i for i, sample in enumerate(group.samples) if not sample.is_greedy)
        rewards = (self._store.reward(group.group_id, index) for index in indices)
        return [reward for reward in rewards if reward is not None]

    def _greedy_reward(self, group: GroupRecord) -> float | None:
        index = group.greedy_index
        return None if index is None else self._store.reward(group.group_id, index)

    def drop(self, group: GroupRecord, why: str) -> None:
        if why == "zero_variance":
            self._ledger.observe([self.seen(group, is_trained=False)])
        if self._desk is not None:
            self._desk.forget(group.group_id)
        self._ledger.drop(group, why)
        self._store.pop_group(group.group_id)
        if why == "stale":
            self._tally.count_stale()
        elif why != "changed_row":
            self._tally.count_filtered(why)

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

    def seen(self, record: GroupRecord, *, is_trained: bool) -> SeenGroup:
        group = self.group(record)
        return SeenGroup(index=record.prompt_index, group=group, is_trained=is_trained)
