"""Checkpoints of a run: written beside training, and resumed from.

Between two steps the state of learner and replay is copied; during the next step it is written. Waits
for the previous checkpoint before the next one starts, so that only one is ever in flight.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.config.schema import RunConfig
from raylearner.errors import CheckpointError, ConfigError, LearnerError
from raylearner.learner.checkpoint.directory import (
    Checkpoint,
    create_checkpoint,
    find_damage,
    find_latest,
    find_newest,
    list_damage,
    prune_checkpoints,
    suggest_other,
)
from raylearner.learner.learner_group import LearnerGroup
from raylearner.observability import run_directory
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.observability.sinks.sink import flatten
from raylearner.observability.spans import Tracer

logger = logging.getLogger(__name__)

UNSET = "not set"
FIXED = ("model.kind", "learner.lora", "learner.critic.trunk", "learner.vision_tower")
"""Keys, and sections, that say which tensors a checkpoint holds and what they mean."""
MOVABLE = ("learner.lora.path",)
"""Paths below them: the same files may lie elsewhere."""
FLOAT64 = "learner.compute_dtype"
"""Tensors have one of two precisions, float64 with float64."""


class CheckpointWriter:
    """Owns the checkpoint in flight. What went wrong with it is raised by the next call.

    Raises `CheckpointError`, or `LearnerDied` where a rank is gone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        learner: LearnerGroup,
        replay: Any,
        keep_last: int,
        should_defer: bool,
        tracer: Tracer,
    ) -> None:
        """`folder` holds the checkpoints; without `should_defer` each is on disk when `start` returns."""
        self._folder = folder
        self._learner = learner
        self._replay = replay
        self._keep_last = keep_last
        self._should_defer = should_defer
        self._tracer = tracer
        self._running: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}
        self.step = -1
        """Of the last checkpoint that was begun."""

    async def start(self, step: int) -> None:
        """Begin the checkpoint of this step; no step may come before this returns."""
        started = time.monotonic()
        await self.wait()
        with self._failures_told(step), self._tracer.span("copy", step=step):
            async with AsyncExitStack() as stack:
                partial = await stack.enter_async_context(
                    create_checkpoint(self._folder, step=step)
                )
                await asyncio.gather(
                    self._learner.save(partial, should_defer=self._should_defer),
                    self._replay.cut.remote(),
                )
                rest = stack.pop_all()
        self.step = step
        self._running = asyncio.create_task(self._finish(rest, partial, step), name="checkpoint")
        if not self._should_defer:
            await self.wait()
        self._metrics["checkpoint/stall_s"] = time.monotonic() - started

    async def wait(self) -> None:
        """Until the one in flight is whole."""
        running, self._running = self._running, None
        if running is None:
            return
        with self._failures_told(self.step):
            await running

    async def cancel(self) -> None:
        """Give up the one in flight: ranks that wrote it are gone, or the run is to end at once."""
        running, self._running = self._running, None
        self.step = -1
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def drain_metrics(self) -> dict[str, float]:
        """Of what happened since the last call."""
        drained, self._metrics = self._metrics, {}
        return drained

    @contextmanager
    def _failures_told(self, step: int) -> Iterator[None]:
        """As those of the checkpoint of this step; a rank that died stays one that a restart mends."""
        try:
            yield
        except (CheckpointError, LearnerError, OSError) as error:
            cause = getattr(error, "cause", error)  # what crossed Ray says its traceback as well
            raise CheckpointError(
                f"the checkpoint of step {step} was not written: {cause};"
                f" {suggest_other(self._folder / f'step_{step:06d}')}"
            ) from error

    async def _finish(self, rest: AsyncExitStack, partial: Path, step: int) -> None:
        started = time.monotonic()
        with self._tracer.span("checkpoint", step=step):
            async with rest:
                writes = [self._replay.save.remote(str(partial / "replay"))]
                if self._should_defer:
                    writes.append(self._learner.finish_save())
                await asyncio.gather(*writes)
            await asyncio.to_thread(
                prune_checkpoints, self._folder, step=step, keep_last=self._keep_last
            )
        self._metrics["checkpoint/write_s"] = time.monotonic() - started
        logger.info(
            "checkpoint of step %d is whole, %.1f s after it was begun to be written",
            step,
            self._metrics["checkpoint/write_s"],
        )


@contextmanager
def locked_checkpoint(
    folder: Path, *, restart_if_no_checkpoint: bool
) -> Iterator[Checkpoint | None]:
    """Holds a run directory for this process and yields its last whole checkpoint.

    Without one, `restart_if_no_checkpoint` sets the directory aside under a numbered name and yields None, with
    an empty one in its place. Raises `ConfigError` otherwise, and where another run has it.
    """
    with run_directory.lock(folder, is_new=False):
        latest = find_latest(folder / "checkpoints")
        if latest is not None:
            logger.info("going on from %s", latest.folder)
            yield latest
            return
        if not restart_if_no_checkpoint:
            raise ConfigError(_refusal(folder))
        aside = run_directory.rename_aside(folder)
        logger.warning(
            "%s held no whole checkpoint: it is now %s, and it starts over", folder, aside
        )
    with run_directory.lock(folder, is_new=True):
        yield None


def is_done(folder: Path, *, num_steps: int) -> bool:
    """Whether the last step of a run is on disk already. Reads no checkpoint of an earlier step."""
    newest = find_newest(folder / "checkpoints")
    if newest is None or newest.step < num_steps:
        return False
    return find_damage(newest.folder) is None


def require_checkpoint(folder: Path) -> None:
    """Raises `ConfigError` where `locked_checkpoint` would find nothing to go on from."""
    if find_latest(folder / "checkpoints") is None:
        raise ConfigError(_refusal(folder))


def _refusal(folder: Path) -> str:
    found = [f"  {fault}" for fault in list_damage(folder / "checkpoints")]
    metrics = folder / "metrics.jsonl"
    num_rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return "\n".join(
        [
            f"--resume {folder}: it holds no whole checkpoint to go on from, and {num_rows} steps in"
            " metrics.jsonl; nothing was changed",
            *(found or ["  no checkpoint was begun"]),
            f"  to start over beside it: train {folder / 'config.yaml'} run.dir=ANOTHER",
            f"  to start over in its place: train --resume {folder} {RESTART_OPTION}, which keeps what"
            f" is there under a numbered name",
        ]
    )


def changed_keys(folder: Path, config: RunConfig) -> dict[str, tuple[object, object]]:
    """Dotted keys whose value is another than in the directory's `config.yaml`: old and new value.

    Empty where that file is missing. Raises `ConfigError` with every changed key that a checkpoint
    does not let change.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    tree, _ = parse(path.read_text(encoding="utf-8"), Where(0, 0, str(path)))
    old = flatten(tree.plain()) if tree is not None else {}
    new = flatten(config.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*old, *new]) if key != "run.dir"]
    changed: dict[str, tuple[object, object]] = {
        key: (old.get(key, UNSET), new.get(key, UNSET))
        for key in keys
        if old.get(key, UNSET) != new.get(key, UNSET)
    }
    refused = [key for key, values in changed.items() if _is_fixed(key, values, new)]
    if refused:
        raise ConfigError(
            "\n".join(
                [
                    *(
                        f"{key}: cannot change at a resume, {_change(changed[key])}"
                        for key in refused
                    ),
                    f"  the checkpoints of {folder} hold other tensors; leave it as it was, or start a"
                    " new run",
                ]
            )
        )
    return changed


def described(changed: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """A line for each changed key."""
    for key, values in changed.items():
        yield f"changed at this resume: {key}: {_change(values)}"


def _change(values: tuple[object, object]) -> str:
    return f"{values[0]} -> {values[1]}"


def _is_fixed(key: str, values: tuple[object, object], new: Mapping[str, object]) -> bool:
    if key == FLOAT64:
        return "float64" in values
    if key in MOVABLE:
        return False
    if new.get("model.kind") == "tiny" and key.startswith("model."):
        return not key.startswith("model.warm_start")
    return any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)
