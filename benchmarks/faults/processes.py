"""Processes of a run, found by its folder: every child of the driver inherits its working directory."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

TITLES = {
    "rollout": "ray::RolloutActor",
    "learner": "ray::LearnerActor",
    "replay": "ray::ReplayActor",
    "reward": "ray::GroupRewardActor",
    "core": "VLLM::EngineCore",
    "driver": "-m raylearner",
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
}
"""A part of the command line of each role. Ray renames its workers after their actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory and descriptors of one process at one moment."""

    time_s: float
    role: str
    pid: int
    rss_bytes: int
    num_descriptors: int


def members(folder: Path) -> list[psutil.Process]:
    """Return the living processes whose working directory is in `folder`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(
                folder
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def title(process: psutil.Process) -> str:
    """Return the command line, which is empty for a process that has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def role_of(process: psutil.Process) -> str | None:
    """Return a key of `TITLES`."""
    text = title(process)
    return next((role for role, part in TITLES.items() if part in text), None)


def usage(processes: Iterable[psutil.Process], *, time_s: float) -> list[Usage]:
    """Return the usage of every process with a role."""
    found: list[Usage] = []
    for process in processes:
        role = role_of(process)
        try:
            if role is not None:
                found.append(
                    Usage(
                        time_s=time_s,
                        role=role,
                        pid=process.pid,
                        rss_bytes=process.memory_info().rss,
                        num_descriptors=process.num_fds(),
                    )
                )
        except psutil.Error:
            continue
    return found


def listening(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the TCP ports on which the processes listen."""
    ports: set[int] = set()
    for process in processes:
        try:
            connections = process.net_connections("tcp")
        except (psutil.Error, OSError):
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports
