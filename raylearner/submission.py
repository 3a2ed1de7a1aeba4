"""`submit`: a run or a sweep as a Ray job, checked here before anything is packaged."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylearner import jobs
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError, RaylearnerError
from raylearner.observability import logs, run_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for: arguments of `train`, or a sweep's file."""

    arguments: tuple[str, ...]
    resume: Path | None
    or_start_over: bool = False
    sweep_file: str | None


def submit(
    request: Request,
    load_run: Callable[[], RunConfig | None],
    *,
    address: str | None,
    dependencies: Path | None,
    should_follow: bool,
) -> None:
    """Checks, packages and starts; `load_run` checks, and gives the configuration of a single run.

    Raises `ConfigError` for what the user can mend, `RaylearnerError` where a followed job failed.
    """
    logs.set_up()
    _refuse_outside_files(request)
    config = load_run()
    if dependencies is not None and not dependencies.is_file():
        raise ConfigError(f"--pip {dependencies}: no such file; name a requirements file")
    client = jobs.connect(address)
    arguments = _arguments(request, config, is_local=jobs.is_local(client))
    job = jobs.submit(
        client,
        arguments,
        environment=jobs.runtime_env(str(Path.cwd()), dependencies=dependencies),
        about=jobs.metadata(config) if config is not None else {"sweep": str(request.sweep_file)},
        submission_id=f"{_name(request, config)}-{time.strftime('%Y%m%d-%H%M%S')}",
    )
    where = client.get_address()
    logger.info("job %s runs on %s; its log: ray job logs -f %s", job, where, job)
    logger.info("ray job stop %s ends it after a checkpoint", job)
    if should_follow:
        asyncio.run(_follow(client, job))


def _refuse_outside_files(request: Request) -> None:
    """A job sees this directory only."""
    here = Path.cwd().resolve()
    named = [a for a in request.arguments if Path(a).is_file()]
    for name in [*named, *([request.sweep_file] if request.sweep_file else [])]:
        path = Path(name)
        if path.is_absolute() or not path.resolve().is_relative_to(here):
            raise ConfigError(
                f"{name}: a job is given this directory; name a file in it, relative to {here}"
            )


def _name(request: Request, config: RunConfig | None) -> str:
    if config is not None:
        return config.run.name
    return f"sweep-{Path(str(request.sweep_file)).stem}"


def _arguments(request: Request, config: RunConfig | None, *, is_local: bool) -> list[str]:
    """On this machine runs keep their usual place, which a job's own files would not outlive."""
    if request.sweep_file is not None:
        return ["sweep", request.sweep_file]
    assert config is not None, "a run has a configuration"
    if request.resume is not None:
        folder = request.resume.absolute() if is_local else request.resume
        or_start_over = [run_directory.OR_START_OVER] * request.or_start_over
        return ["train", "--resume", str(folder), *or_start_over, *request.arguments]
    if not is_local:
        return ["train", *request.arguments]
    folder = run_directory.named(config.run).absolute()
    run_directory.refuse_existing(folder)
    return ["train", *request.arguments, f"run.dir={folder}"]


async def _follow(client: Any, job: str) -> None:
    async for part in client.tail_job_logs(job):
        sys.stdout.write(part)
        sys.stdout.flush()
    status = client.get_job_status(job).value
    if status != "SUCCEEDED":
        raise RaylearnerError(f"job {job} ended as {status}")
