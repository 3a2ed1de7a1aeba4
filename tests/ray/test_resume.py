"""Resume after `kill -9`, at random moments and during a checkpoint write."""

import json
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from loop import SCRIPTED, TINY, Launcher, finish, merged, rows, wait_for
from reference import reference_loop
from transformers import AutoModelForCausalLM

from raylearner.config.schema import RunConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]


def checkpoints(folder: Path, pattern: str = "step_??????") -> list[Path]:
    return sorted((folder / "checkpoints").glob(pattern))


def kill(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_synchronous_run_killed_twice_ends_with_the_parameters_of_one_that_was_not(
    launcher: Launcher,
) -> None:
    """Once at a random moment after the first checkpoint, once while the next is being written."""
    change = {"run": {"num_steps": 6, "checkpoint_every_steps": 1}}
    folder = launcher.folder / "run"
    process = launcher.start("run", change)
    wait_for(lambda: bool(checkpoints(folder)), what="the first checkpoint")
    wait_for(lambda: random.random() < 0.2)
    kill(process)
    if not checkpoints(folder, "step_000006"):
        process = launcher.start_with("--resume", str(folder))
        before = len(rows(folder / "metrics.jsonl"))
        wait_for(
            lambda: (
                bool(checkpoints(folder, "*.partial"))
                or len(rows(folder / "metrics.jsonl")) >= max(5, before + 1)
            ),
            pause_s=0.001,
        )
        kill(process)
    launcher.resume("run")
    config = RunConfig.model_validate(merged(SCRIPTED, {"model": TINY} | change))
    losses, parameters = reference_loop(config, launcher.model)
    metrics = rows(folder / "metrics.jsonl")
    assert [row["learner/loss"] for row in metrics] == pytest.approx(losses, abs=1e-6, rel=1e-6)
    trained = AutoModelForCausalLM.from_pretrained(
        folder / "checkpoints" / "step_000006" / "model", dtype=torch.float64
    ).state_dict()
    for name, expected in parameters.items():
        assert torch.allclose(trained[name], expected, atol=1e-6, rtol=0), name
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]


def test_an_asynchronous_run_killed_and_resumed_loses_nothing_and_trains_nothing_twice(
    launcher: Launcher,
) -> None:
    change = {
        "run": {"num_steps": 8, "checkpoint_every_steps": 2},
        "replay": {"max_staleness": 2, "extra": 1},
        "actors": {"engine": {"arguments": {"delay_s": 0.02}}},
    }
    folder = launcher.folder / "run"
    process = launcher.start("run", change)
    wait_for(lambda: bool(checkpoints(folder)), what="the first checkpoint")
    kill(process)
    launcher.resume("run")
    trained: Counter[tuple[int, int]] = Counter()
    groups: set[int] = set()
    for path in sorted((folder / "trajectories").glob("step_*.jsonl")):
        for row in rows(path):
            trained[row["group_id"], row["sample_index"]] += 1
            groups.add(row["group_id"])
    assert max(trained.values()) == 1
    assert len(groups) == 8 * 3
    ledger = json.loads((checkpoints(folder)[-1] / "replay" / "ledger.json").read_text())
    counts, ledger = ledger["ledger"]["counts"], ledger["ledger"]
    num_open = len(ledger["running"]) + len(ledger["held"]) + len(ledger["leased"])
    assert counts["admitted"] == num_open + counts["trained"] + sum(counts["dropped"].values())
    assert counts["admitted"] == ledger["next_group_id"]
    assert counts["trained"] == len(groups)
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 9))
    assert 0 <= metrics[6]["checkpoint/stall_s"] < 30, "of the checkpoint after step 6"


def test_actors_and_learner_that_die_are_replaced_and_the_run_continues(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 12, "checkpoint_every_steps": 2},
        "replay": {"max_staleness": 2},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
    }
    folder = launcher.folder / "run"
    process = launcher.start("run", change)
    pids = folder / "log.txt"
    wait_for(lambda: bool(checkpoints(folder)), what="the first checkpoint")
    os.kill(started(pids, "rollout-0"), signal.SIGKILL)
    wait_for(lambda: "rollout-0 died and is replaced" in pids.read_text(), what="the loss")
    os.kill(started(pids, "learner-0"), signal.SIGKILL)
    output = finish(process, code=0)
    assert "the learner died" in output
    metrics = rows(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 13))
    assert metrics[-1]["rollout/restarts"] == 1
    trained = Counter(
        (row["group_id"], row["sample_index"])
        for path in (folder / "trajectories").glob("step_*.jsonl")
        for row in rows(path)
    )
    assert max(trained.values()) == 1


def test_a_learner_without_a_checkpoint_and_a_replay_actor_are_replaced(
    launcher: Launcher,
) -> None:
    change = {
        "run": {"num_steps": 8, "checkpoint_every_steps": 4},
        "replay": {"max_staleness": 2},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
    }
    folder = launcher.folder / "run"
    process = launcher.start("run", change)
    log, metrics = folder / "log.txt", folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(rows(metrics)) >= 1, what="a step")
    os.kill(started(log, "learner-0"), signal.SIGKILL)
    wait_for(lambda: "rolls back to step 0" in log.read_text(), what="the first rollback")
    wait_for(lambda: bool(checkpoints(folder)), what="the first checkpoint")
    (replay,) = [
        running
        for running in psutil.process_iter(["cmdline"])
        if " ".join(running.info["cmdline"] or []).startswith("ray::ReplayActor")
    ]
    replay.kill()
    output = finish(process, code=0)
    assert "the replay actor died" in output
    assert [row["step"] for row in rows(metrics)] == list(range(1, 9))
    files = sorted((folder / "trajectories").glob("step_*.jsonl"))
    trained = Counter((r["group_id"], r["sample_index"]) for path in files for r in rows(path))
    assert max(trained.values()) == 1
    assert len({group_id for group_id, _ in trained}) == 8 * 3
    path = checkpoints(folder, "step_000008")[0] / "replay" / "ledger.json"
    ledger = json.loads(path.read_text())["ledger"]
    counts, states = ledger["counts"], ("running", "held", "leased")
    num_open = sum(len(ledger[state]) for state in states)
    assert counts["trained"] == 8 * 3
    assert counts["admitted"] == num_open + counts["trained"] + sum(counts["dropped"].values())


def started(log: Path, name: str) -> int:
    """The process id that the log gives for an actor."""
    lines = [
        line
        for line in log.read_text().splitlines()
        if f"{name} " in line and "runs as process" in line
    ]
    return int(lines[-1].rsplit(" ", 1)[1])


def test_a_driver_that_is_killed_is_resumed_by_its_supervisor(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 6, "checkpoint_every_steps": 1},
        "actors": {"engine": {"arguments": {"delay_s": 0.02}}},
    }
    folder = launcher.folder / "run"
    process = launcher.start("run", change, "--retries", "2")
    wait_for(lambda: bool(checkpoints(folder)), what="the first checkpoint")
    (driver,) = psutil.Process(process.pid).children()
    driver.kill()
    output = finish(process, code=0)
    assert "killed by SIGKILL" in output
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert driver.pid not in psutil.pids()
