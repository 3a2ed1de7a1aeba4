"""Lays trajectories out for the learner: token-budget micro-batches without padding, even over ranks.

Everything here is deterministic: the same groups give the same layout on every machine.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from raylearner.types import PolicyVersion, StopReason, Trajectory, TrajectoryGroup

QUADRATIC_TOKENS = 24_576
"""Length at which attention costs as much as everything else: 12 x hidden size, here of 2,048."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One packed sequence of a micro-batch on its way to the learner."""

    episode: int
    trajectory: Trajectory
    turns: NDArray[np.int32]  # [T] number of the token's turn, -1 before the first
    anchors: tuple[int, ...]
    """By turn: equal where turns start from the same state, below 2^48."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one optimizer update sees: one rank's micro-batches, and counts over all ranks."""

    micro_batches: tuple[tuple[TokenRow, ...], ...]
    num_episodes: int
    """Episodes over all ranks that have at least one trained token."""
    num_rows: int
    """Rows over all ranks that have at least one trained token."""
    num_trained_tokens: int
    """Trained tokens over all ranks."""
    num_tokens: int
    """All tokens over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBatch:
    """One take, laid out for one learner rank.

    The episode table (all that is `[E]`) is whole on every rank, since baselines need whole groups;
    the mini-batches hold this rank's rows, each row's `episode`
    indexing the table. Every rank has the same number of micro-batches in each mini-batch; an empty
    one runs a dummy forward and backward.
    """

    policy_version: PolicyVersion
    rewards: NDArray[np.float64]  # [E] NaN where no reward applies
    groups: NDArray[np.int64]  # [E] group ids
    num_episode_tokens: NDArray[
        np.int64
    ]  # [E] trained tokens of the episode, over all its segments
    num_episode_rows: NDArray[np.int64]  # [E] segments that train
    greedy_rewards: NDArray[np.float64]  # [E] NaN where no greedy episode was played
    parts: Mapping[str, NDArray[np.float64]]
    """Unweighted rewards by function, each `[E]`."""
    num_sampled_tokens: int
    num_masked_tokens: Mapping[str, int]
    """Sampled tokens that do not train, by the rule that keeps them from it."""
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
) -> list[LearnerBatch]:
    """One batch per rank. What trains no token makes no row, but its reward stays in the table.

    An episode without a finite reward trains nothing, and neither does one that ran out of tokens
    with `should_mask_truncated`.
    Mini-batches divide the episodes that train evenly, in order, and are never empty: a take of
    fewer such episodes gives fewer of them. Raises ValueError for a row longer than the budget.
    """
    if num_ranks < 1 or max_tokens_per_micro_batch < 1 or num_mini_batches < 1:
        raise ValueError(
            f"num_ranks, max_tokens_per_micro_batch and num_mini_batches must be >= 1, got "
            f"{num_ranks}, {max_tokens_per_micro_batch} and {num_mini_batches}"
        )
    groups, num_masked_tokens = _masked(groups, should_mask_truncated=should_mask_truncated)
    episodes = _episodes(groups)
    trained = [episode for episode in episodes if episode.num_trained_tokens]
    bounds = np.linspace(0, len(trained), min(num_mini_batches, len(trained)) + 1).round()
    per_rank: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    numbers: dict[bytes, int] = {}
    for start, end in zip(bounds[:-1].astype(int), bounds[1:].astype(int), strict=True):
        shares = _pack_mini_batch(
            trained[start:end], num_ranks, max_tokens_per_micro_batch, numbers
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


def row_cost(num_tokens: int) -> float:
    """What a row costs, in tokens of a short row: linear, plus attention's quadratic part."""
    return num_tokens + num_tokens * num_tokens / QUADRATIC_TOKENS


def _masked(
    groups: Sequence[TrajectoryGroup], *, should_mask_truncated: bool
) -> tuple[list[TrajectoryGroup], dict[str, int]]:
    """The groups as they train, and how many sampled tokens do not, by the first rule that says so."""
    counts = Counter({"error": 0, "stale": 0, "unscored": 0, "truncated": 0})
    masked: list[TrajectoryGroup] = []
    for group in groups:
        trajectories: list[Trajectory] = []
        rewards = group.rewards
        for trajectory in group.trajectories:
            num_lost = trajectory.num_sampled_tokens - trajectory.num_trained_tokens
            counts["error" if trajectory.stop_reason is StopReason.ERROR else "stale"] += num_lost
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
    """One function's rewards; a part that only some episodes have, such as a penalty, is 0 for others."""
    values = [e.parts.get(name, 0.0 if e.parts else None) for e in episodes]
    return np.array([_known(value) for value in values], np.float64)


def _known(reward: float | None) -> float:
    """NaN stands for every reward that means nothing."""
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
                    reward=_known(reward),
                    parts=segments[sample_index][0].rewards,
                    greedy_reward=_known(group.greedy_reward),
                    group_id=group.group_id,
                    segments=tuple(sorted(segments[sample_index], key=lambda s: s.segment)),
                )
            )
    return episodes


def _row(episode: _Episode, trajectory: Trajectory, numbers: dict[bytes, int]) -> TokenRow:
    """The arrays up to the last trained token: what follows it can change nothing that is learned."""
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
    """Each token's turn, and what the turn starts from: the reply before it, the prompt for the first.

    Images of replies go by their `numbers`, which new ones are given here. A trajectory that names
    no turns has one for each run of sampled tokens, all of unlike state.
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
    episodes: Sequence[_Episode], num_ranks: int, max_tokens: int, numbers: dict[bytes, int]
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
    lengths = [row.trajectory.num_tokens for row in rows]
    shares: list[list[tuple[TokenRow, ...]]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for bins in _rounds(lengths, num_ranks, max_tokens):
        # Micro-batches of one round run at once, so they are of similar cost; the rank that has
        # had least so far gets the largest.
        order = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, indices in zip(order, bins, strict=True):
            shares[rank].append(tuple(rows[index] for index in sorted(indices)))
            totals[rank] += sum(row_cost(lengths[index]) for index in indices)
    return [
        MiniBatch(
            micro_batches=tuple(share),
            num_episodes=len(episodes),
            num_rows=len(rows),
            num_trained_tokens=sum(episode.num_trained_tokens for episode in episodes),
            num_tokens=sum(lengths),
        )
        for share in shares
    ]


def _rounds(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Row indices as rounds of `num_ranks` bins each, costly bins first, as few rounds as fit."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    num_rounds = max(1, math.ceil(sum(lengths) / (max_tokens * num_ranks)))
    while (bins := _fill(order, lengths, num_rounds * num_ranks, max_tokens)) is None:
        num_rounds += 1
    bins.sort(key=lambda indices: -sum(row_cost(lengths[index]) for index in indices))
    return [bins[start : start + num_ranks] for start in range(0, len(bins), num_ranks)]


def _fill(
    order: Sequence[int], lengths: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Longest first into the cheapest bin with room; if that does not fit, into the fullest one."""
    for prefers_cheapest in (True, False):
        bins: list[list[int]] = [[] for _ in range(num_bins)]
        tokens = np.zeros(num_bins, np.int64)
        costs = np.zeros(num_bins)
        for index in order:
            has_room = tokens + lengths[index] <= max_tokens
            if not has_room.any():
                break
            key = costs if prefers_cheapest else -tokens
            chosen = int(np.argmin(np.where(has_room, key, np.inf)))
            bins[chosen].append(index)
            tokens[chosen] += lengths[index]
            costs[chosen] += row_cost(lengths[index])
        else:
            return bins
    return None
