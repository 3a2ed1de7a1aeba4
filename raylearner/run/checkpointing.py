"""Checkpoints of a run: written during training, and resumed from.

Between two steps the state of learner and replay is copied; during the next step it is written. Waits
for the previous checkpoint before the next one starts, so that only one is ever in flight.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from raylearner.config.document import parse
from raylearner.config.problems import Where
from raylearner.config.schema import RunConfig
from raylearner.errors import CheckpointError, ConfigError, LearnerError
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
from raylearner.learner.learner_group import LearnerGroup
from raylearner.observability import run_directory
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.observability.sinks.sink import flatten
from raylearner.observability.spans import Tracer
from raylearner.run.watchdog import Role, Watchdog

logger = logging.getLogger(__name__)

UNSET = "not set"
FIXED = ("model.kind", "learner.lora", "learner.critic.trunk", "learner.vision_tower")
"""Keys and sections that determine the tensors of a checkpoint; they cannot change at a resume."""
MOVABLE = ("learner.lora.path",)
"""Exceptions below `FIXED`: paths, since the same files may be elsewhere."""
FLOAT64 = "learner.compute_dtype"
"""Can change, but not to or from float64, the only other precision of tensors."""


class CheckpointWriter:
    """Owns the checkpoint in flight. Its failure is raised by the next call.

    Raises `CheckpointError`, or `LearnerDied` where a rank is gone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        learner: LearnerGroup,
        replay: Any,
        watchdog: Watchdog,
        roles: Sequence[Role],
        keep_last: int,
        should_defer: bool,
        tracer: Tracer,
    ) -> None:
        """`folder` holds the checkpoints, which `roles` write; without `should_defer` each is on disk when `start` returns."""
        self._folder = folder
        self._learner = learner
        self._replay = replay
        self._watchdog = watchdog
        self._roles = roles
        self._keep_last = keep_last
        self._should_defer = should_defer
        self._tracer = tracer
        self._running: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}
        self.step = -1
        """Step of the last checkpoint that was started, -1 before."""

    async def start(self, step: int) -> None:
        """Start the checkpoint of this step; the next step may start when this returns."""
        await self._in_time("copying a checkpoint", self._start(step))

    async def wait(self) -> None:
        """Wait until the checkpoint in flight is complete."""
        await self._in_time("writing a checkpoint", self._wait())

    async def _start(self, step: int) -> None:
        started = time.monotonic()
        await self._wait()
        with self._naming_step(step), self._tracer.span("copy", step=step):
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
            await self._wait()
        self._metrics["checkpoint/stall_s"] = time.monotonic() - started

    async def _wait(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        with self._naming_step(self.step):
            await running

    async def cancel(self) -> None:
        """Cancel the checkpoint in flight, since its ranks are gone or the run ends at once."""
        running, self._running = self._running, None
        self.step = -1
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

    @contextmanager
    def _naming_step(self, step: int) -> Iterator[None]:
        """Add the step to failures, except `LearnerDied`, which a restart handles."""
        try:
            yield
        except (CheckpointError, LearnerError, OSError) as error:
            cause = getattr(error, "cause", error)  # Ray's error includes a traceback
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
            "the checkpoint of step %d is complete, written in %.1f s",
            step,
            self._metrics["checkpoint/write_s"],
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
