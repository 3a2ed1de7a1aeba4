"""Replacements that fail, rollout actors that come and go with nodes, and other numbers on request."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Cluster
from loop import ENVIRONMENT, Launcher, finish, is_alive, rows, run_cli, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

SLOW = {"engine": {"arguments": {"delay_s": 0.05}}}


@contextmanager
def node(cluster: Cluster, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another node of the cluster, with room for one engine; ended at the end."""
    with (folder / "node.log").open("a") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=9"),
                *(f"--address={cluster.address}", "--node-ip-address=127.0.0.1"),
                "--object-store-memory=80000000",
            ],
            env=ENVIRONMENT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:  # Ray learns at once of a node that ends by itself
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)


def kill(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def pid_of(log: Path, actor: int) -> int | None:
    found = re.search(rf"rollout-{actor} with \w+ runs as process (\d+)", log.read_text())
    return int(found[1]) if found else None


def test_replacements_that_are_killed_or_fail_to_start_are_retried(
    launcher: Launcher,
) -> None:
    """Of the replacements the first raises and the second ends its process; the third plays."""
    tries = launcher.folder / "tries"
    change = {
        "run": {"num_steps": 100_000},
        "actors": {
            "max_restarts": 3,
            "engine": {
                "script": "benchmarks.faults.scripts:BadStart",
                "arguments": {
                    "vocab_size": 200,
                    "max_tokens": 8,
                    "delay_s": 0.02,
                    "folder": str(tries),
                    "bad": [2],
                    "killed": [3],
                },
            },
        },
        "evaluation": None,
    }
    tries.mkdir()
    process = launcher.start("run", change)
    log, metrics = launcher.folder / "run" / "log.txt", launcher.folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and bool(rows(metrics)), what="a step")
    pid = pid_of(log, 0)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(
        lambda: (
            rows(metrics)[-1]["rollout/actors"] == 2 and rows(metrics)[-1]["rollout/restarts"] == 3
        ),
        what="the third replacement",
    )
    os.kill(process.pid, signal.SIGTERM)
    finish(process, code=143)
    assert len(list(tries.iterdir())) == 5


def test_a_run_survives_a_lost_node_uses_the_next_one_and_scales(
    launcher: Launcher, cluster: Cluster
) -> None:
    """Each node has room for one engine: that of the shared cluster, and one that is lost and returns."""
    change = {
        "run": {"num_steps": 100_000, "restart_window_s": 3600.0},
        "actors": {
            **SLOW,
            "num_actors": {"min": 1, "max": 2},
            "cpus_per_actor": 5,
            "max_restarts": 0,
        },
        "replay": {"max_staleness": 2},
        "evaluation": None,
    }
    process = launcher.start("run", change)
    log, metrics = launcher.folder / "run" / "log.txt", launcher.folder / "run" / "metrics.jsonl"

    def playing() -> float:
        return rows(metrics)[-1]["rollout/actors"] if metrics.exists() and rows(metrics) else 0

    wait_for(lambda: playing() == 1, what="the first engine")
    with node(cluster, launcher.folder) as first:
        wait_for(lambda: playing() == 2, what="the engine of the new node")
        kill(first)
        wait_for(lambda: playing() == 1, what="the loss of the node")
    with node(cluster, launcher.folder):
        wait_for(lambda: playing() == 2, what="the engine of the next node")
        folder = str(launcher.folder / "run")
        assert "1 rollout actors" in run_cli("scale", folder, "actors=1", timeout_s=30)
        wait_for(lambda: playing() == 1, what="the smaller number")
        assert "actors=3" in run_cli("scale", folder, "actors=3", timeout_s=30, code=2)
        assert process.poll() is None
        assert rows(metrics)[-1]["rollout/restarts"] == 1
        os.kill(process.pid, signal.SIGTERM)
        finish(process, code=143)
    assert "not running" in run_cli("scale", folder, "actors=1", timeout_s=30, code=2)
    assert not is_alive(pid_of(log, 0) or 0)
