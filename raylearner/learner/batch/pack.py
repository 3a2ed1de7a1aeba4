"""Pack trajectories into the learner's batches: unpadded micro-batches of similar cost on every rank.

Packing is deterministic: the same groups give the same layout on every machine.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raylearner.learner.batch.balance import RowSize, divide
from raylearner.learner.batch.prefixes import SharedPrefix, find_prefixes, saved_prefixes
from raylearner.types import PolicyVersion, StopReason, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One packed sequence of a micro-batch."""

    episode: int
    trajectory: Trajectory
    turns: NDArray[np.int32]  # [T] number of the token's turn, -1 before the first
    anchors: tuple[int, ...]
    """Number below 2^48 for each turn; equal where turns start from the same state."""
    prefix: SharedPrefix | None = None
    """First tokens that a micro-batch computes once for all rows with an equal prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Data of one optimizer update: one rank's micro-batches, and counts over all ranks."""

    micro_batches: tuple[tuple[TokenRow, ...], ...]
    num_episodes: int
    """Number of episodes over all ranks that have a trained token."""
    num_rows: int
    """Number of rows over all ranks that have a trained token."""
    num_trained_tokens: int
    """Number of trained tokens over all ranks."""
    num_tokens: int
    """Number of tokens over all ranks, each row counted whole."""
    num_computed_tokens: int
    """The same with shared prefixes counted once in each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBatch:
    """The groups of one step, packed for one learner rank.

    The episode table (all `[E]` arrays) is complete on every rank, since baselines need whole groups.
    Mini-batches have this rank's rows, whose `episode` indexes the table. Every rank has the same number
    of micro-batches in each mini-batch; an empty one runs a dummy forward and backward.
    """

    policy_version: PolicyVersion
    rewards: NDArray[np.float64]  # [E] NaN without a reward
    groups: NDArray[np.int64]  # [E] group ids
    num_episode_tokens: NDArray[np.int64]  # [E] trained tokens over all segments
    num_episode_rows: NDArray[np.int64]  # [E] segments that train
    greedy_rewards: NDArray[np.float64]  # [E] NaN without a greedy episode
    parts: Mapping[str, NDArray[np.float64]]
    """Unweighted rewards by function, each `[E]`."""
    num_sampled_tokens: int
    num_masked_tokens: Mapping[str, int]
    """Sampled tokens that do not train, by the rule that excludes them."""
    mini_batches: tuple[MiniBatch, ...]

    @property
    def num_rows(self) -> int:
        return sum(mini_batch.num_rows for mini_batch in self.mini_batches)

    @property
    def num_trained_tokens(self) -> int:
        return sum(mini_batch.num_trained_tokens for mini_batch in self.mini_batches)

    @property
    def num_tokens(self) -> int:
        return sum(mini_batch.num_tokens for mini_batch in self.mini_batches)

    @property
    def num_computed_tokens(self) -> int:
        return sum(mini_batch.num_computed_tokens for mini_batch in self.mini_batches)


@dataclass(frozen=True, slots=True)
class _Episode:
    index: int
    reward: float
    parts: Mapping[str, float | None]
    greedy_reward: float
    group_id: int
    segments: tuple[Trajectory, ...]

    @property
    def num_trained_tokens(self) -> int:
        return sum(segment.num_trained_tokens for segment in self.segments)

    @property
    def num_trained_rows(self) -> int:
        return sum(segment.num_trained_tokens > 0 for segment in self.segments)


def pack(
    groups: Sequence[TrajectoryGroup],
    *,
    policy_version: PolicyVersion,
    num_ranks: int,
    max_tokens_per_micro_batch: int,
    num_mini_batches: int = 1,
    should_mask_truncated: bool = False,
    shares_prefixes: bool = False,
) -> list[LearnerBatch]:
    """Return one batch per rank. A segment without trained tokens makes no row, but its reward counts.

    With `shares_prefixes` rows of a group share the tokens of their prompt, where that saves time; these
    count once against `max_tokens_per_micro_batch`.

    An episode without a finite reward trains nothing; with `should_mask_truncated` the same holds for
    truncated episodes. Mini-batches divide the trained episodes evenly, in order, and are never empty:
    fewer episodes give fewer mini-batches. Raises ValueError for a row longer than the budget.
    """
    if num_ranks < 1 or max_tokens_per_micro_batch < 1 or num_mini_batches < 1:
        raise ValueError(
            f"num_ranks, max_tokens_per_micro_batch and num_mini_batches must be >= 1, got "
            f"{num_ranks}, {max_tokens_per_micro_batch} and {num_mini_batches}"
        )
    groups, num_masked_tokens = _mask(groups, should_mask_truncated=should_mask_truncated)
    episodes = _episodes(groups)
    trained = [episode for episode in episodes if episode.num_trained_tokens]
    bounds = np.linspace(0, len(trained), min(num_mini_batches, len(trained)) + 1).round()
    per_rank: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    numbers: dict[bytes, int] = {}
    for start, end in zip(bounds[:-1].astype(int), bounds[1:].astype(int), strict=True):
        shares = _pack_mini_batch(
            trained[start:end],
            num_ranks,
            max_tokens_per_micro_batch,
            numbers,
            shares_prefixes=shares_prefixes,
        )
        for mini_batches, share in zip(per_rank, shares, strict=True):
            mini_batches.append(share)
    names = sorted({name for episode in episodes for name in episode.parts})
    return [
        LearnerBatch(
            policy_version=policy_version,
            rewards=np.array([episode.reward for episode in episodes], np.float64),
            groups=np.array([episode.group_id for episode in episodes], np.int64),
            num_episode_tokens=np.array([e.num_trained_tokens for e in episodes], np.int64),
            num_episode_rows=np.array([e.num_trained_rows for e in episodes], np.int64),
            greedy_rewards=np.array([e.greedy_reward for e in episodes], np.float64),
            parts={name: _part(episodes, name) for name in names},
            num_sampled_tokens=sum(t.num_sampled_tokens for g in groups for t in g.trajectories),
            num_masked_tokens=num_masked_tokens,
            mini_batches=tuple(mini_batches),
        )
        for mini_batches in per_rank
    ]


def num_computed_tokens(rows: Sequence[TokenRow]) -> int:
    """Count the tokens of a micro-batch, those of a shared prefix once."""
    saved = saved_prefixes([row.prefix for row in rows])
    return sum(row.trajectory.num_tokens for row in rows) - sum(saved)


def _mask(
    groups: Sequence[TrajectoryGroup], *, should_mask_truncated: bool
) -> tuple[list[TrajectoryGroup], dict[str, int]]:
    """Mask tokens that must not train; return the groups, and excluded tokens by rule."""
    counts = Counter({"error": 0, "stale": 0, "unscored": 0, "truncated": 0})
    masked: list[TrajectoryGroup] = []
    for group in groups:
        trajectories: list[Trajectory] = []
        rewards = group.rewards
        for trajectory in group.trajectories:
            num_excluded = trajectory.num_sampled_tokens - trajectory.num_trained_tokens
            counts["error" if trajectory.stop_reason is StopReason.ERROR else "stale"] += (
                num_excluded
            )
            reward = rewards[trajectory.sample_index]
            is_unscored = reward is None or not math.isfinite(reward)
            if is_unscored or (should_mask_truncated and trajectory.is_truncated):
                rule = "unscored" if is_unscored else "truncated"
                counts[rule] += trajectory.num_trained_tokens
                trajectory = trajectory.with_train_mask(np.zeros_like(trajectory.train_mask))
            trajectories.append(trajectory)
        masked.append(replace(group, trajectories=tuple(trajectories)))
    return masked, dict(counts)


def _part(episodes: Sequence[_Episode], name: str) -> NDArray[np.float64]:
    """Return one function's rewards; one that only some episodes have, such as a penalty, is 0 for others."""
    values = [e.parts.get(name, 0.0 if e.parts else None) for e in episodes]
    return np.array([_finite_or_nan(value) for value in values], np.float64)


def _finite_or_nan(reward: float | None) -> float:
    """Replace missing and infinite rewards by NaN."""
    return reward if reward is not None and math.isfinite(reward) else math.nan


def _episodes(groups: Sequence[TrajectoryGroup]) -> list[_Episode]:
    episodes: list[_Episode] = []
    for group in groups:
        segments: dict[int, list[Trajectory]] = {}
        for trajectory in group.trajectories:
            segments.setdefault(trajectory.sample_index, []).append(trajectory)
        for sample_index in sorted(segments):
            reward = group.rewards[sample_index]
            episodes.append(
                _Episode(
                    index=len(episodes),
                    reward=_finite_or_nan(reward),
                    parts=segments[sample_index][0].rewards,
                    greedy_reward=_finite_or_nan(group.greedy_reward),
                    group_id=group.group_id,
                    segments=tuple(sorted(segments[sample_index], key=lambda s: s.segment)),
                )
            )
    return episodes


def _row(episode: _Episode, trajectory: Trajectory, numbers: dict[bytes, int]) -> TokenRow:
    """Cut the arrays after the last trained token; later tokens cannot change any gradient."""
    end = int(np.flatnonzero(trajectory.train_mask)[-1]) + 1
    if trajectory.train_mask[0]:
        raise ValueError(
            f"group {trajectory.group_id}, sample {trajectory.sample_index}: the first token is "
            "trained, but nothing precedes it"
        )
    turns, anchors = _turns(trajectory, numbers)
    cut = replace(
        trajectory,
        token_ids=trajectory.token_ids[:end],
        loss_mask=trajectory.loss_mask[:end],
        train_mask=trajectory.train_mask[:end],
        behavior_logprobs=trajectory.behavior_logprobs[:end],
        policy_versions=trajectory.policy_versions[:end],
        turns=(),
        prompt_text="",
        rewards={},
        metrics={},
    )
    if cut.images:
        cut = replace(cut, images=cut.images[: len(cut.placeholder_runs)])
    return TokenRow(episode=episode.index, turns=turns[:end], anchors=anchors, trajectory=cut)


def _turns(
    trajectory: Trajectory, numbers: dict[bytes, int]
) -> tuple[NDArray[np.int32], tuple[int, ...]]:
    """Return each token's turn, and a hash of each turn's start: the previous reply or the prompt.

    Images in replies are identified by `numbers`, to which new ones are added. A trajectory without
    turns gets one for each run of sampled tokens, each with a unique hash.
    """
    starts = np.zeros(trajectory.num_tokens, np.int32)
    if trajectory.turns:
        np.add.at(starts, [turn.start for turn in trajectory.turns if turn.start < len(starts)], 1)
        begins = np.diff(trajectory.is_placeholder.astype(np.int8), prepend=0) == 1
        num_before = np.concatenate([[0], begins.cumsum()])
        anchors = [_hash(f"start {trajectory.segment}")]
        for turn in trajectory.turns[:-1]:
            images = trajectory.images[num_before[turn.end] : num_before[turn.reply_end]]
            shown = [numbers.setdefault(image, len(numbers)) for image in images]
            anchors.append(_hash(f"reply {shown} {turn.reply}"))
    else:
        starts[1:] = trajectory.loss_mask[1:] & ~trajectory.loss_mask[:-1]
        starts[0] = trajectory.loss_mask[0]
        key = trajectory.episode_key, trajectory.segment
        anchors = [
            _hash(f"start {trajectory.segment}"),
            *(_hash(f"{key} {n}") for n in range(1, int(starts.sum()))),
        ]
    return np.cumsum(starts, dtype=np.int32) - np.int32(1), tuple(anchors)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])


def _pack_mini_batch(
    episodes: Sequence[_Episode],
    num_ranks: int,
    max_tokens: int,
    numbers: dict[bytes, int],
    *,
    shares_prefixes: bool,
) -> list[MiniBatch]:
    rows = [
        _row(episode, segment, numbers)
        for episode in episodes
        for segment in episode.segments
        if segment.num_trained_tokens
    ]
    for row in rows:
        if row.trajectory.num_tokens > max_tokens:
            raise ValueError(
                f"group {row.trajectory.group_id}, sample {row.trajectory.sample_index}: the "
                f"trajectory has {row.trajectory.num_tokens} tokens, more than the "
                f"{max_tokens} of max_tokens_per_micro_batch; raise that or shorten responses"
            )
    if shares_prefixes:
        prefixes = find_prefixes([row.trajectory for row in rows])
        rows = [replace(row, prefix=p) for row, p in zip(rows, prefixes, strict=True)]
    sizes = [RowSize(num_tokens=row.trajectory.num_tokens, prefix=row.prefix) for row in rows]
    by_rank: list[list[tuple[TokenRow, ...]]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    num_computed_tokens = 0
    for bins in divide(sizes, num_ranks, max_tokens):
        # Micro-batches of one round run at the same time, so they have similar cost; the rank with
        # the least work so far gets the largest.
        order = sorted(range(num_ranks), key=lambda rank: (costs[rank], rank))
        for rank, one in zip(order, bins, strict=True):
            by_rank[rank].append(tuple(rows[index] for index in sorted(one.rows)))
            costs[rank] += one.cost
            num_computed_tokens += one.num_tokens
    return [
        MiniBatch(
            micro_batches=tuple(share),
            num_episodes=len(episodes),
            num_rows=len(rows),
            num_trained_tokens=sum(episode.num_trained_tokens for episode in episodes),
            num_tokens=sum(size.num_tokens for size in sizes),
            num_computed_tokens=num_computed_tokens,
        )
        for share in by_rank
    ]
