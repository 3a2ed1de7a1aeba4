"""`submit`: a run or a sweep as a Ray job, checked before anything is packaged."""

import asyncio
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from raylearner import job_variables
from raylearner.config.report import git_revision, job_metadata
from raylearner.config.resources import HUB_TOKEN, WANDB_KEY, named_variables, wants_wandb_key
from raylearner.config.schema import PretrainedModel, RunConfig
from raylearner.errors import ConfigError, RaylearnerError
from raylearner.jobs import client as jobs_client
from raylearner.observability import logs, run_directory

logger = logging.getLogger(__name__)

MODEL_FILES = ("config.json", "adapter_config.json")
"""Files by which a directory is recognized as a model or an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's request: arguments of `train`, or a sweep's file."""

    arguments: tuple[str, ...]
    resume: Path | None
    restart_if_no_checkpoint: bool = False
    sweep_file: str | None
    retries: int = 0
    """Maximum number of times within an hour that a failed run is resumed by its job."""
    variables: tuple[str, ...] = ()
    """Names of environment variables to pass to the job."""


def submit(
    request: Request,
    load_runs: Callable[[], Sequence[RunConfig]],
    *,
    address: str | None,
    dependencies: Path | None,
    should_follow: bool,
) -> None:
    """Check, package and start a job; `load_runs` checks and returns the configuration of every run.

    A run resumed on another machine is checked there, where its directory is. Raises `ConfigError` for
    errors that the user can fix, `RaylearnerError` if a followed job failed.
    """
    logs.set_up()
    client = jobs_client.connect(address) if request.resume is not None else None
    is_elsewhere = client is not None and not jobs_client.is_local(client)
    configs = _checked(request, (lambda: ()) if is_elsewhere else load_runs, dependencies)
    client = client or jobs_client.connect(address)
    config = configs[0] if configs and request.sweep_file is None else None
    name = config.run.name if config is not None else _name(request)
    arguments = _arguments(request, config, is_local=jobs_client.is_local(client))
    for line in _missing_variables(configs, request.variables):
        logger.warning("%s", line)
    with job_variables.packed(request.variables, os.environ) as package:
        job = jobs_client.submit(
            client,
            arguments,
            environment=jobs_client.runtime_env(
                str(Path.cwd()), dependencies=dependencies, variables=package
            ),
            about=job_metadata(config) if config is not None else _about(request, name),
            submission_id=f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
        )
    where = client.get_address()
    stop = _ray_command(where, "stop", job)
    logger.info(
        "job %s runs on %s; follow its log with: %s",
        job,
        where,
        _ray_command(where, "logs -f", job),
    )
    logger.info("stop it with a checkpoint: %s", stop)
    if should_follow:
        try:
            asyncio.run(_follow(client, job))
        except KeyboardInterrupt:
            logger.info("job %s continues; stop it with a checkpoint: %s", job, stop)
            raise


def _ray_command(where: str, verb: str, job: str) -> str:
    """Return a command that works in a shell without this process's variables."""
    variables = [f"RAY_API_SERVER_ADDRESS={where}"]
    if mode := os.environ.get("RAY_AUTH_MODE"):
        variables.append(f"RAY_AUTH_MODE={mode}")
    return f"{shlex.join(variables)} ray job {verb} {shlex.quote(job)}"


def _checked(
    request: Request, load_runs: Callable[[], Sequence[RunConfig]], dependencies: Path | None
) -> Sequence[RunConfig]:
    """Return the configurations; raise `ConfigError` with all problems."""
    problems: list[str] = []
    configs: Sequence[RunConfig] = ()
    try:
        with job_variables.packed(request.variables, os.environ):
            pass
    except ConfigError as error:
        problems.append(str(error))
    try:
        _refuse_outside_files(request)
    except ConfigError as error:
        problems.append(str(error))
    if dependencies is not None and not dependencies.is_file():
        problems.append(f"--pip {dependencies}: no such file; name a requirements file")
    try:
        configs = load_runs()
    except ConfigError as error:
        problems.append(str(error))
    problems += dict.fromkeys(problem for config in configs for problem in _model_problems(config))
    if problems:
        raise ConfigError("\n".join(problems))
    return configs


def _missing_variables(configs: Sequence[RunConfig], passed: Sequence[str]) -> Iterator[str]:
    """Yield warnings of variables that runs need and the job may lack."""
    needed: dict[str, str] = {}
    for config in configs:
        for key, name in named_variables(config):
            needed.setdefault(name, f"{key} names {name}")
        if wants_wandb_key(config):
            needed.setdefault(WANDB_KEY, f"observability.wandb needs {WANDB_KEY}")
        is_hub = isinstance(config.model, PretrainedModel) and not os.path.isdir(config.model.path)
        if is_hub and os.environ.get(HUB_TOKEN):
            needed.setdefault(
                HUB_TOKEN,
                f"model.path is on the hub, and {HUB_TOKEN} is set here",
            )
    for name in needed.keys() - set(passed):
        yield (
            f"{needed[name]}: the job has it only if it was set for `ray start`; pass it on with"
            f" {job_variables.OPTION} {name}"
        )


def _model_problems(config: RunConfig) -> Iterator[str]:
    """Yield problems of model paths relative to this directory, whose weights are not packaged."""
    for key, value in _texts(config.model_dump(), ""):
        is_here = key.endswith("path") and not Path(value).is_absolute() and os.path.isdir(value)
        if is_here and any(os.path.isfile(Path(value, name)) for name in MODEL_FILES):
            yield (
                f"{key}: {value!r} is a model in this directory, whose weights are not packaged with a job; use"
                f" a path on the job's machine, such as {os.path.abspath(value)}"
            )


def _texts(tree: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every string of a configuration with its dotted key."""
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, Mapping | list | tuple):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for part, value in cast(Iterable[tuple[Any, Any]], pairs):
            yield from _texts(value, f"{key}.{part}".removeprefix("."))


def _refuse_outside_files(request: Request) -> None:
    """Raise `ConfigError` for files outside this directory, which are not packaged."""
    here = Path.cwd().resolve()
    named = [a for a in request.arguments if os.path.isfile(a)]
    for name in [*named, *([request.sweep_file] if request.sweep_file else [])]:
        path = Path(name)
        if path.is_absolute() or not path.resolve().is_relative_to(here):
            raise ConfigError(
                f"{name}: must be a file in this directory, which is copied to the job, relative "
                f"to {here}"
            )


def _name(request: Request) -> str:
    """Return the name of the job of a sweep, or of a run whose configuration is on another machine."""
    name = f"sweep-{Path(request.sweep_file).stem}" if request.sweep_file else str(request.resume)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def _about(request: Request, name: str) -> dict[str, str]:
    if request.sweep_file is not None:
        return {"sweep": request.sweep_file}
    return {"job_name": name, "run": str(request.resume), "commit": git_revision()}


def _arguments(request: Request, config: RunConfig | None, *, is_local: bool) -> list[str]:
    """Return the job's arguments; on this machine the run directory is absolute, since a job's files are
    removed after it."""
    if request.sweep_file is not None:
        return ["sweep", request.sweep_file]
    train = ["train", *(["--retries", str(request.retries)] if request.retries else [])]
    if request.resume is not None:
        folder = request.resume.absolute() if is_local else request.resume
        restart_if_no_checkpoint = [run_directory.RESTART_OPTION] * request.restart_if_no_checkpoint
        return [*train, "--resume", str(folder), *restart_if_no_checkpoint, *request.arguments]
    if not is_local:
        return [*train, *request.arguments]
    assert config is not None, "a new run has a configuration"
    folder = run_directory.name_new(config.run).absolute()
    run_directory.check_new(folder)
    return [*train, *request.arguments, f"run.dir={folder}"]


async def _follow(client: Any, job: str) -> None:
    from aiohttp import ClientError

    try:
        async for part in client.tail_job_logs(job):
            sys.stdout.write(part)
            sys.stdout.flush()
        status = client.get_job_status(job).value
    except (ClientError, OSError) as error:
        raise RaylearnerError(
            f"the connection to the log of job {job} was lost, but the job may still be running: "
            f"{error}"
        ) from error
    if status != "SUCCEEDED":
        raise RaylearnerError(f"job {job} ended with status {status}")
