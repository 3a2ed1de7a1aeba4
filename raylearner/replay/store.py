"""The memory of the replay: finished episodes by group, and the images that they show, each kept once."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raylearner.types import EpisodeScore, StopReason, Trajectory

Episode = tuple[Trajectory, ...]
"""The segments of one episode, in order."""


class EpisodeStore:
    """Owns every stored episode, as copies that share no memory with received ones."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[int, Episode]] = {}  # group_id, sample_index
        self.images = ImageStore()
        self.num_trajectories = 0

    def add(self, episode: Sequence[Trajectory]) -> Episode:
        """Copy and keep an episode. A failed one has no reward and no trained token."""
        owned = tuple(self._copy(s) for s in sorted(episode, key=lambda s: s.segment))
        group_id, index, _ = owned[0].episode_key
        self.groups.setdefault(group_id, {})[index] = owned
        self.num_trajectories += len(owned)
        return owned

    def pop_group(self, group_id: int) -> list[Episode]:
        episodes = list(self.groups.pop(group_id, {}).values())
        for episode in episodes:
            self._release(episode)
        return episodes

    def episode_keys(self) -> set[tuple[int, int, int]]:
        return {e[0].episode_key for episodes in self.groups.values() for e in episodes.values()}

    def reward(self, group_id: int, index: int) -> float | None:
        episode = self.groups.get(group_id, {}).get(index)
        return None if episode is None else episode[0].reward

    def trajectories(self, group_id: int) -> list[Trajectory]:
        """Return the segments of a group by sample index and segment."""
        episodes = self.groups.get(group_id, {})
        return [segment for index in sorted(episodes) for segment in episodes[index]]

    def rescore(self, group_id: int, scores: Mapping[int, EpisodeScore]) -> None:
        """Set the final rewards of episodes; one whose score is an error has failed."""
        episodes = self.groups[group_id]
        for index, score in scores.items():
            episodes[index] = tuple(_apply_score(segment, score) for segment in episodes[index])

    def restore(self, trajectories: Sequence[Trajectory]) -> None:
        """Replace everything stored by copies of these."""
        self.groups = {}
        self.images = ImageStore()
        self.num_trajectories = len(trajectories)
        for trajectory in trajectories:
            episodes = self.groups.setdefault(trajectory.group_id, {})
            index = trajectory.sample_index
            episodes[index] = (*episodes.get(index, ()), self._copy(trajectory))

    def _copy(self, trajectory: Trajectory) -> Trajectory:
        is_error = trajectory.stop_reason is StopReason.ERROR
        train_mask = trajectory.train_mask
        return replace(
            trajectory,
            token_ids=np.array(trajectory.token_ids, np.int32),
            loss_mask=np.array(trajectory.loss_mask, np.bool_),
            train_mask=np.zeros_like(train_mask) if is_error else np.array(train_mask, np.bool_),
            behavior_logprobs=np.array(trajectory.behavior_logprobs, np.float32),
            policy_versions=np.array(trajectory.policy_versions, np.int32),
            images=self.images.add(trajectory.images),
            reward=None if is_error else trajectory.reward,
        )

    def _release(self, episode: Episode) -> None:
        self.num_trajectories -= len(episode)
        for segment in episode:
            self.images.remove(segment.images)


def _apply_score(segment: Trajectory, score: EpisodeScore) -> Trajectory:
    if score.error is not None:
        return segment.failed(score.error)
    return replace(
        segment,
        reward=score.reward,
        rewards=score.rewards,
        columns={**segment.columns, **score.columns},
        metrics={**segment.metrics, **score.metrics},
    )


class ImageStore:
    """Owns the bytes of every image that a stored trajectory shows, with a count of its references.

    Episodes of a group show the same images: each is compared with those that look alike, which costs a
    tenth of a hash.
    """

    def __init__(self) -> None:
        self._alike: dict[tuple[int, bytes], list[bytes]] = {}
        self._num_references: dict[int, int] = {}  # by `id` of the kept bytes

    def __len__(self) -> int:
        return len(self._num_references)

    @property
    def num_bytes(self) -> int:
        return sum(len(image) for alike in self._alike.values() for image in alike)

    def add(self, images: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the same images, each as the one copy that is kept."""
        return tuple(map(self._add, images))

    def _add(self, image: bytes) -> bytes:
        alike = self._alike.setdefault(_look(image), [])
        kept = next((other for other in alike if other == image), None)
        if kept is None:
            kept = image
            alike.append(kept)
        self._num_references[id(kept)] = self._num_references.get(id(kept), 0) + 1
        return kept

    def remove(self, images: tuple[bytes, ...]) -> None:
        """Remove a reference to each of these images, as `add` returned them."""
        for image in images:
            self._num_references[id(image)] -= 1
            if self._num_references[id(image)] == 0:
                del self._num_references[id(image)]
                look = _look(image)
                self._alike[look] = [other for other in self._alike[look] if other is not image]
                if not self._alike[look]:
                    del self._alike[look]


def _look(image: bytes) -> tuple[int, bytes]:
    """Return length and last bytes, which differ between most images: a PNG ends with checksums."""
    return len(image), image[-64:]


def image_name(image: bytes) -> str:
    """Return the SHA-256 of the encoded bytes."""
    return hashlib.sha256(image).hexdigest()
