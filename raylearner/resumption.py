"""What `--resume` goes on from: the last whole checkpoint of a run directory, and never from nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raylearner.errors import ConfigError
from raylearner.learner import checkpoint
from raylearner.learner.checkpoint import Checkpoint
from raylearner.observability import run_directory
from raylearner.observability.run_directory import OR_START_OVER

logger = logging.getLogger(__name__)


@contextmanager
def taken_up(folder: Path, *, or_start_over: bool) -> Iterator[Checkpoint | None]:
    """Holds a run directory for this process and yields its last whole checkpoint.

    Without one, `or_start_over` sets the directory aside under a numbered name and yields None, with
    an empty one in its place. Raises `ConfigError` otherwise, and where another run has it.
    """
    with run_directory.claimed(folder, is_new=False):
        latest = checkpoint.latest(folder / "checkpoints")
        if latest is not None:
            logger.info("going on from %s", latest.folder)
            yield latest
            return
        if not or_start_over:
            raise ConfigError(_refusal(folder))
        aside = run_directory.set_aside(folder)
        logger.warning(
            "%s held no whole checkpoint: it is now %s, and it starts over", folder, aside
        )
    with run_directory.claimed(folder, is_new=True):
        yield None


def is_done(folder: Path, *, num_steps: int) -> bool:
    """Whether the last step of a run is on disk already. Reads no checkpoint of an earlier step."""
    newest = checkpoint.newest(folder / "checkpoints")
    if newest is None or newest.step < num_steps:
        return False
    return checkpoint.find_fault(newest.folder) is None


def refuse_without_checkpoint(folder: Path) -> None:
    """Raises `ConfigError` where `taken_up` would find nothing to go on from."""
    if checkpoint.latest(folder / "checkpoints") is None:
        raise ConfigError(_refusal(folder))


def _refusal(folder: Path) -> str:
    found = [f"  {fault}" for fault in checkpoint.faults(folder / "checkpoints")]
    metrics = folder / "metrics.jsonl"
    num_rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return "\n".join(
        [
            f"--resume {folder}: it holds no whole checkpoint to go on from, and {num_rows} steps in"
            " metrics.jsonl; nothing was changed",
            *(found or ["  no checkpoint was begun"]),
            f"  to start over beside it: train {folder / 'config.yaml'} run.dir=ANOTHER",
            f"  to start over in its place: train --resume {folder} {OR_START_OVER}, which keeps what"
            f" is there under a numbered name",
        ]
    )
