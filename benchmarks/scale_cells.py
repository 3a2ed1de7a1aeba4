"""Measures of one cell of `scale.py`, and their table."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row: rates over the window, latencies in milliseconds as seen by the callers."""

    mode: str
    profile: str
    num_actors: int
    window_s: float
    trajectories_per_s: float
    """Stored by the replay, counted by the clients that received `accepted`."""
    taken_per_s: float
    tokens_per_s: float
    claim_calls_per_s: float
    put_calls_per_s: float
    put_p50_ms: float
    put_p99_ms: float
    claim_p50_ms: float
    """Of claims that were answered with a sample. The capacity is four times what the slots hold, so that
    few wait for admission."""
    claim_p99_ms: float
    probe_p50_ms: float
    """Of a call that does nothing, while the others run."""
    probe_p99_ms: float
    take_p50_ms: float
    take_max_ms: float
    push_p50_s: float
    push_max_s: float
    replay_cpu: float
    """Cores that the replay process used, of which its Python thread can use one."""
    replay_cpu_us: float
    """CPU time of the replay process per stored trajectory."""
    clients_cpu: float
    driver_cpu: float
    machine_cpu: float
    """Busy cores of the machine, including what others ran."""
    replay_rss_mb: float
    store_mb: float
    num_pushes: int
    num_reached: int
    """Engines that acknowledged the last push."""


def cpu_s(pid: int) -> float:
    """Return the CPU time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """Return the busy time of all cores so far."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def store_mb() -> float:
    free = ray.available_resources().get("object_store_memory", 0.0)
    return (ray.cluster_resources()["object_store_memory"] - free) / 1e6


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else 0.0


def table(cells: Sequence[Cell]) -> list[str]:
    """Return the rows of docs/scale.md."""
    return [
        "| mode | episodes | actors | trajectories/s | put p50 / p99, ms | claim p50 / p99, ms "
        "| call p50 / p99, ms | push of all, s | replay: cores, us each, MB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {c.mode} | {c.profile} | {c.num_actors:,} | {c.trajectories_per_s:,.0f} "
            f"| {c.put_p50_ms:,.0f} / {c.put_p99_ms:,.0f} | {c.claim_p50_ms:,.0f} / "
            f"{c.claim_p99_ms:,.0f} | {c.probe_p50_ms:,.0f} / {c.probe_p99_ms:,.0f} "
            f"| {c.push_p50_s:.2f} | {c.replay_cpu:.2f}, {c.replay_cpu_us:,.0f}, "
            f"{c.replay_rss_mb:,.0f} |"
            for c in cells
        ),
    ]
