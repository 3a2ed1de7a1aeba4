"""Checks of this machine before Ray starts: disk space, lengths of socket paths, the deadline."""

import logging
import math
import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from raylearner import leftovers
from raylearner.actors.engines.vllm_process import MAX_SOCKET_FOLDER_BYTES, SOCKETS_VARIABLE
from raylearner.config.schema import RunConfig, RunSection, VllmEngine
from raylearner.errors import ConfigError

logger = logging.getLogger(__name__)

RAY_SOCKET = "ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""Longest socket path of a local cluster, below Ray's temporary directory."""
MIN_FREE_BYTES = 1 << 20
"""Minimum free space: with less, even the configuration and the log may fail to be written."""
LOW_FREE_BYTES = 1 << 30
DEADLINE_VARIABLES = ("RAYLEARNER_DEADLINE", "SLURM_JOB_END_TIME")
"""Environment variables read in this order where `run.deadline` is not set."""


def check_socket_paths(config: RunConfig) -> None:
    """Raise `ConfigError` where the socket paths of Ray or vLLM would be too long.

    A running cluster has its own sockets.
    """
    if os.environ.get("RAY_ADDRESS") or config.cluster.address:
        return
    problems = socket_path_errors(has_vllm=isinstance(config.actors.engine, VllmEngine))
    if problems:
        raise ConfigError("\n".join(problems))


def socket_path_errors(*, has_vllm: bool) -> list[str]:
    """Return a message for each directory whose path is too long for its sockets.

    Without a directory set by the user, engines find a short one for vLLM's.
    """
    problems: list[str] = []
    max_bytes = leftovers.MAX_SOCKET_PATH_BYTES - len("/") - len(RAY_SOCKET)
    folders = [("Ray", *ray_temp_dir(), max_bytes, "RAY_TMPDIR")]
    if has_vllm and (given := os.environ.get(SOCKETS_VARIABLE)):
        folders.append(("vLLM", SOCKETS_VARIABLE, given, MAX_SOCKET_FOLDER_BYTES, SOCKETS_VARIABLE))
    for program, name, path, limit, variable in folders:
        if (size := len(os.fsencode(path))) > limit:
            problems.append(
                f"{name}: {path!r} has {size} bytes, too many for the sockets of {program}; expected"
                f" at most {limit}; set {variable}, to /tmp for instance"
            )
    return problems


def ray_temp_dir() -> tuple[str, str]:
    """Return the variable that sets the temporary directory of a local cluster, and the directory."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return "the temporary directory", "/tmp"


def check_disk_space(folder: Path) -> None:
    """Raise `ConfigError` where the run directory, or Ray's, is on a full disk; warn of a nearly full
    disk."""
    variable, temporary = ray_temp_dir()
    problems: list[str] = []
    for name, path in (("run.dir", folder), (variable, Path(temporary))):
        existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if free < MIN_FREE_BYTES:
            problems.append(
                f"{name}: the disk of {str(existing)!r} is full ({free} bytes are free); free"
                " space, or use a directory on another disk"
            )
        elif free < LOW_FREE_BYTES:
            logger.warning(
                "%s: %.0f MiB are free on the disk of %s; checkpoints and logs may not fit",
                *(name, free / 2**20, existing),
            )
    if problems:
        raise ConfigError("\n".join(problems))


def stop_time_s(run: RunSection, environment: Mapping[str, str]) -> float | None:
    """Return the Unix time to request a stop, `deadline_margin_s` before the deadline; None without one.

    Raises `ConfigError` naming the key or variable whose value is not a time.
    """
    if run.deadline is not None:
        return _seconds(run.deadline, "run.deadline") - run.deadline_margin_s
    for name in DEADLINE_VARIABLES:
        if environment.get(name):
            return _seconds(environment[name], name) - run.deadline_margin_s
    return None


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            seconds = math.nan
        else:
            seconds = moment.timestamp()  # local time where it names no offset
    if not math.isfinite(seconds):
        raise ConfigError(
            f"{where}: {text!r} is not a time; use ISO 8601 such as 2026-05-01T18:00+02:00, or seconds "
            "since 1970"
        )
    return seconds
