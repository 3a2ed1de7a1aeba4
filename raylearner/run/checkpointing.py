"""Checkpoints of a run: written during training, and resumed from.

Between two steps the state of learner and replay is copied; during the next step it is written. Waits
for the previous checkpoint before the next one starts, so that only one is ever in flight.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.config.schema import RunConfig, RunSection
from raylearner.errors import (
    CheckpointError,
    ConfigError,
    LearnerDied,
    LearnerError,
    ReplayDied,
    summary,
)
from raylearner.learner.checkpoint.directory import (
    PARTIAL,
    Checkpoint,
    create_checkpoint,
    find_damage,
    find_latest,
    find_newest,
    list_damage,
    prune_checkpoints,
    suggest_other,
)
from raylearner.observability import run_directory
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.observability.sinks.sink import flatten
from raylearner.observability.spans import Tracer
from raylearner.run.replay_process import asked
from raylearner.run.watchdog import Role, Watchdog

if TYPE_CHECKING:
    from raylearner.run.run_actors import RunActors

logger = logging.getLogger(__name__)

UNSET = "not set"
FIXED = ("model.kind", "learner.lora", "learner.critic.trunk", "learner.vision_tower")
"""Keys and sections that determine the tensors of a checkpoint; they cannot change at a resume."""
MOVABLE = ("learner.lora.path",)
"""Exceptions below `FIXED`: paths, since the same files may be elsewhere."""
FLOAT64 = "learner.compute_dtype"
"""Can change, but not to or from float64, the only other precision of tensors."""


class CheckpointWriter:
    """Owns the checkpoint in flight. A write that fails is logged; `run.max_checkpoint_failures` in a row
    raise `CheckpointError`.

    Raises `LearnerDied` and `ReplayDied` where their processes are gone.
    """

    def __init__(
        self,
        section: RunSection,
        folder: Path,
        *,
        actors: "RunActors",
        watchdog: Watchdog,
        roles: Sequence[Role],
        tracer: Tracer,
    ) -> None:
        """`folder` holds the checkpoints, which `roles` write."""
        self._section = section
        self._folder = folder
        self._actors = actors
        self._watchdog = watchdog
        self._roles = roles
        self._tracer = tracer
        self._running: asyncio.Task[None] | None = None
        self._running_step = -1
        self._started_at_s = time.monotonic()
        self._num_failed_in_row = 0
        self._metrics: dict[str, float] = {}
        self.completed = -1
        """Step of the last checkpoint that is complete, -1 before, and after a rollback."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint follows this step, by its number or by time."""
        every, every_s = self._section.checkpoint_every_steps, self._section.checkpoint_every_s
        if every and step % every == 0:
            return True
        return every_s is not None and time.monotonic() - self._started_at_s >= every_s

    async def start(self, step: int) -> None:
        """Start the checkpoint of this step, after the one in flight; then the next step may start.

        Without `run.checkpoint_async` it is on disk when this returns.
        """
        await self._in_time("copying a checkpoint", self._start(step))

    async def wait(self) -> None:
        """Wait until nothing is in flight any more."""
        await self._in_time("writing a checkpoint", self._wait())

    async def complete(self, step: int) -> None:
        """Return once the checkpoint of this step is complete, which is tried again where it fails."""
        await self.wait()
        while self.completed != step:
            await self.start(step)
            await self.wait()

    async def _start(self, step: int) -> None:
        started = self._started_at_s = time.monotonic()
        await self._wait()
        async with self._counting_failures(step), AsyncExitStack() as stack:
            with self._tracer.span("copy", step=step):
                partial = await stack.enter_async_context(
                    create_checkpoint(self._folder, step=step)
                )
                await _gather(
                    self._actors.learner.save(partial, should_defer=self._section.checkpoint_async),
                    asked(self._actors.replay.cut.remote()),
                )
            writing = self._finish(stack.pop_all(), partial, step)
            self._running, self._running_step = (
                asyncio.create_task(writing, name="checkpoint"),
                step,
            )
        if not self._section.checkpoint_async:
            await self._wait()
        self._metrics["checkpoint/stall_s"] = time.monotonic() - started

    async def _wait(self) -> None:
        running = self._running
        if running is not None:
            async with self._counting_failures(self._running_step):
                try:
                    # A cancelled loop does not cancel the write, which the end of the run waits for.
                    await asyncio.shield(running)
                finally:
                    if running.done():
                        self._running = None
                self.completed, self._num_failed_in_row = self._running_step, 0

    async def cancel(self) -> None:
        """Cancel the checkpoint in flight, since its ranks are gone or the run ends at once."""
        running, self._running = self._running, None
        self.completed = -1
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _in_time(self, label: str, call: Awaitable[None]) -> None:
        """Await the call as long as the checkpoint in flight grows, which takes long on a slow disk."""
        await self._watchdog.wait(label, call, roles=self._roles, progress=self._num_bytes)

    def _num_bytes(self) -> int:
        """Return the size of the checkpoint in flight."""
        written = self._folder.glob(f"*{PARTIAL}/**/*")
        return sum(path.stat().st_size for path in written if path.is_file())

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        drained, self._metrics = self._metrics, {}
        return drained

    @asynccontextmanager
    async def _counting_failures(self, step: int) -> AsyncIterator[None]:
        """Log a failed write and remove its files. Raises `CheckpointError` after too many in a row."""
        try:
            yield
        except (CheckpointError, LearnerError, OSError) as error:
            self._num_failed_in_row += 1
            folder = self._folder / f"step_{step:06d}"
            text = await asyncio.to_thread(_describe_failure, folder, error)
            limit = self._section.max_checkpoint_failures
            if self._num_failed_in_row >= limit:
                raise CheckpointError(text) from error
            logger.warning(
                "failure %d of at most %d in a row (run.max_checkpoint_failures), the run continues: %s",
                *(self._num_failed_in_row, limit, text),
            )

    async def _finish(self, rest: AsyncExitStack, partial: Path, step: int) -> None:
        started = time.monotonic()
        with self._tracer.span("checkpoint", step=step):
            async with rest:
                writes: list[Awaitable[None]] = [
                    asked(self._actors.replay.save.remote(str(partial / "replay")))
                ]
                if self._section.checkpoint_async:
                    writes.append(self._actors.learner.finish_save())
                await _gather(*writes)
            await asyncio.to_thread(self._prune, step)
        self._metrics["checkpoint/write_s"] = time.monotonic() - started
        logger.info(
            "the checkpoint of step %d is complete, written in %.1f s",
            step,
            self._metrics["checkpoint/write_s"],
        )

    def _prune(self, step: int) -> None:
        try:
            prune_checkpoints(self._folder, step=step, keep_last=self._section.keep_last)
        except OSError as error:
            logger.warning("an old checkpoint was not removed: %s", summary(error))


async def _gather(*calls: Awaitable[None]) -> None:
    """Wait until all have ended, since none may still write; then raise a death, or the first failure."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failures = [outcome for outcome in outcomes if outcome is not None]
    deaths = [error for error in failures if isinstance(error, LearnerDied | ReplayDied)]
    for failure in deaths + failures:
        raise failure


def _describe_failure(folder: Path, error: BaseException) -> str:
    """Remove what was written of a checkpoint; return why it failed, and how many bytes were free."""
    place = folder.parent if folder.parent.is_dir() else folder.parent.parent
    free = (
        f"{shutil.disk_usage(place).free} bytes are free"
        if place.is_dir()
        else "it no longer exists"
    )
    shutil.rmtree(folder.with_name(folder.name + PARTIAL), ignore_errors=True)
    cause = getattr(error, "cause", error)  # Ray's error includes a traceback
    return (
        f"the checkpoint of step {int(folder.name.removeprefix('step_'))} was not written: {cause};"
        f" {place}: {free}; {suggest_other(folder)}"
    )


@contextmanager
def locked_checkpoint(
    folder: Path, *, restart_if_no_checkpoint: bool
) -> Iterator[Checkpoint | None]:
    """Lock a run directory for this process and yield its last complete checkpoint.

    Without one, `restart_if_no_checkpoint` sets the directory aside under a numbered name and yields None, with
    an empty one in its place. Raises `ConfigError` otherwise, and where another run uses it.
    """
    with run_directory.lock(folder, is_new=False):
        latest = find_latest(folder / "checkpoints")
        if latest is not None:
            logger.info("resuming from %s", latest.folder)
            yield latest
            return
        if not restart_if_no_checkpoint:
            raise ConfigError(_no_checkpoint_message(folder))
        aside = run_directory.rename_aside(folder)
        logger.warning(
            "%s had no complete checkpoint: it was renamed to %s, and the run starts over",
            folder,
            aside,
        )
    with run_directory.lock(folder, is_new=True):
        yield None


def is_finished(folder: Path, *, num_steps: int) -> bool:
    """Return whether the checkpoint of the last step is complete. Earlier ones are not read."""
    newest = find_newest(folder / "checkpoints")
    if newest is None or newest.step < num_steps:
        return False
    return find_damage(newest.folder) is None


def require_checkpoint(folder: Path) -> None:
    """Raise `ConfigError` where `locked_checkpoint` would find no checkpoint."""
    if find_latest(folder / "checkpoints") is None:
        raise ConfigError(_no_checkpoint_message(folder))


def _no_checkpoint_message(folder: Path) -> str:
    damaged = [f"  {damage}" for damage in list_damage(folder / "checkpoints")]
    metrics = folder / "metrics.jsonl"
    num_rows = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    return "\n".join(
        [
            f"--resume {folder}: no complete checkpoint to resume from, but {num_rows} steps in "
            "metrics.jsonl; nothing was changed",
            *(damaged or ["  no checkpoint was started"]),
            f"  to start over beside it: train {folder / 'config.yaml'} run.dir=ANOTHER",
            f"  to start over in its place: train --resume {folder} {RESTART_OPTION}, which keeps the"
            " old directory under a numbered name",
        ]
    )


def changed_keys(folder: Path, config: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the dotted keys that differ from the directory's `config.yaml`, with old and new value.

    Empty where that file is missing. Raises `ConfigError` with every changed key in `FIXED`.
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
                        f"{key}: cannot be changed when resuming, {_change(changed[key])}"
                        for key in refused
                    ),
                    f"  the checkpoints of {folder} have different tensors; restore the old "
                    "value, or start a new run",
                ]
            )
        )
    return changed


def format_changes(changed: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """Format each changed key as a line."""
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
