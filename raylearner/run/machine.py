"""What this machine must offer before anything starts: room on its disks, short paths for sockets."""

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from raylearner.config.schema import RunConfig, RunSection, VllmEngine
from raylearner.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107
"""Of a Unix socket on Linux (`sun_path` without its end)."""
RAY_SOCKET = "ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""The longest socket of a local cluster, behind Ray's temporary directory."""
VLLM_SOCKET = "00000000-0000-0000-0000-000000000000"
"""A socket of vLLM, behind the temporary directory of Python."""
MIN_FREE_BYTES = 1 << 20
"""A disk with less is full: not even a configuration and a log can be relied on."""
LOW_FREE_BYTES = 1 << 30
DEADLINE_VARIABLES = ("RAYLEARNER_DEADLINE", "SLURM_JOB_END_TIME")
"""Looked at in this order where `run.deadline` is not set."""


def check_socket_paths(config: RunConfig) -> None:
    """Raises `ConfigError` where Ray or vLLM could not open their sockets, for the length of the path.

    A cluster that runs already has its own.
    """
    if os.environ.get("RAY_ADDRESS") or config.cluster.address:
        return
    problems = socket_path_errors(has_vllm=isinstance(config.actors.engine, VllmEngine))
    if problems:
        raise ConfigError("\n".join(problems))


def socket_path_errors(*, has_vllm: bool) -> list[str]:
    """Temporary directories that are too long for the sockets in them, one message each."""
    problems: list[str] = []
    variable, folder = ray_temp_dir()
    sockets = [("Ray", variable, folder, RAY_SOCKET, "RAY_TMPDIR")]
    if has_vllm:
        base = os.environ.get("VLLM_RPC_BASE_PATH")
        name, path = ("VLLM_RPC_BASE_PATH", base) if base else ("TMPDIR", tempfile.gettempdir())
        sockets.append(("vLLM", name, path, VLLM_SOCKET, "VLLM_RPC_BASE_PATH"))
    for program, name, place, socket, cure in sockets:
        size, limit = len(os.fsencode(place)), MAX_SOCKET_PATH_BYTES - len(socket) - 1
        if size > limit:
            problems.append(
                f"{name}: {place!r} has {size} bytes, too many for the sockets of {program}; expected"
                f" at most {limit}; set {cure}, to /tmp for instance"
            )
    return problems


def ray_temp_dir() -> tuple[str, str]:
    """The temporary directory of a local cluster, as Ray finds it, and the variable that names it."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return variable, os.environ[variable]
    return "the temporary directory", "/tmp"


def check_disk_space(folder: Path) -> None:
    """Raises `ConfigError` where the run directory, or Ray's, would lie on a full disk; warns of a
    disk that is nearly full."""
    variable, temporary = ray_temp_dir()
    problems: list[str] = []
    for what, place in (("run.dir", folder), (variable, Path(temporary))):
        existing = next(p for p in (place.absolute(), *place.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if free < MIN_FREE_BYTES:
            problems.append(
                f"{what}: the disk of {str(existing)!r} is full ({free} bytes are free); free some"
                " space, or name a directory on another disk"
            )
        elif free < LOW_FREE_BYTES:
            logger.warning(
                "%s: %.0f MiB are free on the disk of %s; checkpoints and logs may not fit",
                *(what, free / 2**20, existing),
            )
    if problems:
        raise ConfigError("\n".join(problems))


def stop_time_s(run: RunSection, environment: Mapping[str, str]) -> float | None:
    """Seconds since 1970 at which to begin to stop, `deadline_margin_s` before the end; None for never.

    Raises `ConfigError` naming the key or variable whose value is no time.
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
            f"{where}: {text!r} is no time; give ISO 8601 such as 2026-05-01T18:00+02:00, or seconds "
            "since 1970"
        )
    return seconds
