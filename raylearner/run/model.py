"""The model that a run starts from: its path, and its preparation while other processes start."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylearner.config.model_files import is_hub_id
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.observability.lines import number_of
from raylearner.types import Prompt

logger = logging.getLogger(__name__)


class RunModel:
    """The model of a run. Processes import their libraries while it is made, or downloaded to their node."""

    def __init__(self, path: str, *, making: Coroutine[Any, Any, None] | None = None) -> None:
        """`path` is a directory or hub id; `making` makes the directory."""
        self.path = path
        self._progress = "starting the process"
        self._making = None if making is None else asyncio.ensure_future(making)
        self._downloads: dict[str, asyncio.Future[None]] = {}

    @property
    def is_made(self) -> bool:
        return self._making is None or self._making.done()

    def report(self, progress: str) -> None:
        """Set how far the model is made, in words."""
        self._progress = progress

    @property
    def awaited(self) -> str:
        """What the model waits for, in words; empty if it is there."""
        if not self.is_made:
            return self._progress
        num_downloads = sum(not download.done() for download in self._downloads.values())
        return f"downloading to {number_of(num_downloads, 'node')}" if num_downloads else ""

    async def made(self) -> None:
        """Wait until the model has been made. Raises what failed."""
        if self._making is not None:
            await asyncio.shield(self._making)

    async def ready(self, node: str) -> None:
        """Wait until the model is on a node, to which its first caller downloads it. Raises what failed."""
        await self.made()
        if not is_hub_id(self.path):
            return
        downloading = self._downloads.get(node)
        if downloading is None or (downloading.done() and not self.is_ready(node)):
            downloading = asyncio.ensure_future(_download_to(node, self.path))
            self._downloads[node] = downloading
        await asyncio.shield(downloading)

    def is_ready(self, node: str) -> bool:
        """Return whether a process on this node need not wait."""
        parts: list[asyncio.Future[None]] = [] if self._making is None else [self._making]
        if is_hub_id(self.path):
            if node not in self._downloads:
                return False
            parts.append(self._downloads[node])
        return all(p.done() and not p.cancelled() and p.exception() is None for p in parts)

    def failed_with(self, error: BaseException) -> bool:
        """Return whether making the model raised this error."""
        making = self._making
        has_failed = making is not None and making.done() and not making.cancelled()
        return making is not None and has_failed and making.exception() is error

    async def close(self) -> None:
        """End the preparation."""
        parts = [*self._downloads.values(), *([] if self._making is None else [self._making])]
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


def model_path(config: RunConfig, folder: Path) -> str:
    """Return the directory or hub id of the model; a tiny model is made below the run directory `folder`."""
    model = config.model
    return str(folder / "model") if isinstance(model, TinyModel) else model.path


async def prepare_model(
    config: RunConfig,
    folder: Path,
    training: Sequence[Prompt],
    *,
    on_progress: Callable[[str], None],
) -> None:
    """Make a tiny model, unless it exists; `training` are the prompts of its warm start."""
    model, path = config.model, Path(model_path(config, folder))
    if not isinstance(model, TinyModel) or await asyncio.to_thread(path.exists):
        return
    make: Any = _make_tiny_model
    reports = make.remote(
        model, config.renderer, config.environment, training, str(path), config.run.seed
    )
    progress = ""
    async for report in reports:
        progress = await report
        on_progress(progress)
    logger.info("the model is ready%s", f": {progress}" if progress else "")


# Both without a CPU of their own: actors that wait for the model may have reserved all of them.
@ray.remote(num_cpus=0)
def _make_tiny_model(*arguments: Any) -> Iterator[str]:
    """Run in a separate process, so that the driver never loads torch; yield the progress."""
    from raylearner.tiny.demonstrations import prepare_tiny_model

    yield from prepare_tiny_model(*arguments)


async def _download_to(node: str, path: str) -> None:
    download: Any = _download
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    await download.options(scheduling_strategy=strategy).remote(path)


@ray.remote(num_cpus=0)
def _download(path: str) -> None:
    from raylearner.actors.process import prepare_process
    from raylearner.config.model_files import local_directory

    prepare_process()
    local_directory(path)
