"""A journal of finished episodes that a rollback may keep, for a replay actor that dies.

Only episodes of groups that ran at the last checkpoints, sampled by weights of that time, are valid after a
rollback to them, so that little is written. Batches are written by a thread: at most `MAX_BATCH` episodes
or those of `MAX_DELAY_S` are lost with the process.
"""

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raylearner.errors import CheckpointError
from raylearner.replay import snapshot
from raylearner.replay.buffer import ReplayBuffer
from raylearner.replay.groups import SampleState
from raylearner.types import PolicyVersion, StopReason, Trajectory

logger = logging.getLogger(__name__)

MAX_BATCH = 64
"""Maximum number of episodes that wait to be written."""
MAX_DELAY_S = 1.0
"""Maximum wait of an episode before its write begins."""
NUM_CUTS = 2
"""Number of checkpoints whose episodes are kept: the newest may not be complete yet."""

Episode = list[Trajectory]


class Journal:
    """Owns `folder`, of which each entry is a batch of episodes, named by checkpoint and number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cuts: deque[tuple[PolicyVersion, frozenset[int]]] = deque(maxlen=NUM_CUTS)
        self._epoch = max((int(path.name[:6]) for path in _batches(folder)), default=0)
        self._num_batches = len(_batches(folder))
        self._pending: list[Episode] = []
        self._is_full = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    def cut(self, buffer: ReplayBuffer) -> None:
        """Note what a checkpoint of this moment holds, and remove batches of the checkpoints before the last."""
        self._note(buffer)
        self._epoch += 1
        for path in _batches(self._folder):
            if int(path.name[:6]) <= self._epoch - NUM_CUTS:
                shutil.rmtree(path, ignore_errors=True)

    def add(self, episode: Sequence[Trajectory]) -> None:
        """Write an accepted episode soon, if a rollback might keep it."""
        group_id = episode[0].group_id
        versions = [version for version, groups in self._cuts if group_id in groups]
        if not versions or _newest_version(episode) > max(versions):
            return
        self._pending.append(list(episode))
        if len(self._pending) >= MAX_BATCH:
            self._is_full.set()
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def read(self) -> list[Episode]:
        """Return every episode that was written, each once."""
        if self._writing is not None:
            self._is_full.set()
            await self._writing
        return await asyncio.to_thread(_read, self._folder)

    def put_back(self, buffer: ReplayBuffer, episodes: Sequence[Episode]) -> int:
        """Put back the episodes that are valid in a restored buffer; return their number."""
        self._note(buffer)
        return sum(put_back(buffer, episode) for episode in episodes)

    def _note(self, buffer: ReplayBuffer) -> None:
        self._cuts.append((buffer.policy_version, frozenset(buffer.ledger.running)))

    async def _write(self) -> None:
        """Write batches while episodes are pending. A failure costs only what a rollback could keep."""
        try:
            while self._pending:
                if len(self._pending) < MAX_BATCH and not self._is_full.is_set():
                    try:
                        async with asyncio.timeout(MAX_DELAY_S):
                            await self._is_full.wait()
                    except TimeoutError:
                        pass
                self._is_full.clear()
                batch, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
                self._num_batches += 1
                path = self._folder / f"{self._epoch:06d}_{self._num_batches:06d}"
                await asyncio.to_thread(_save, path, batch)
        except OSError as error:
            self._pending.clear()
            logger.warning(
                "finished episodes could not be written to the replay journal: %s", error
            )
        finally:
            self._writing = None


def put_back(buffer: ReplayBuffer, episode: Sequence[Trajectory]) -> bool:
    """Store an episode that was accepted before a rollback, as the next attempt of its sample.

    Returns whether it is valid: its sample is still to be played, and its weights were not discarded.
    """
    first = episode[0]
    group_id, index, _ = first.episode_key
    group = buffer.ledger.running.get(group_id)
    if group is None or group.samples[index].state is not SampleState.PENDING:
        return False
    if _newest_version(episode) > buffer.policy_version or first.stop_reason is StopReason.ERROR:
        return False
    claim = buffer.ledger.start(group, index, "journal", first.claim_policy_version, 0.0)
    return buffer.put([replace(s, attempt=claim.attempt) for s in episode]) == "accepted"


def _newest_version(episode: Sequence[Trajectory]) -> PolicyVersion:
    return max(int(segment.policy_versions.max()) for segment in episode)


def _save(path: Path, batch: Sequence[Episode]) -> None:
    trajectories = [segment for episode in batch for segment in episode]
    order = np.empty(0, np.int64)
    snapshot.Snapshot(metadata={}, prompt_order=order, trajectories=trajectories).save(path)


def _read(folder: Path) -> list[Episode]:
    """Return the episodes of all whole batches, each once."""
    episodes: dict[tuple[int, int, int], dict[int, Trajectory]] = {}
    for path in _batches(folder):
        try:
            metadata, arrays, images = snapshot.read(path)
        except CheckpointError as error:  # its writer died
            logger.info("skipped a damaged batch of the replay journal: %s", error)
            continue
        for segment in snapshot.trajectories(metadata["trajectories"], arrays, images):
            episodes.setdefault(segment.episode_key, {})[segment.segment] = segment
    return [list(segments.values()) for segments in episodes.values()]


def _batches(folder: Path) -> list[Path]:
    return sorted(folder.glob("??????_??????"))
