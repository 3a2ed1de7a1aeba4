"""What goes wrong is told in one clear line, with the right exit code, and nothing is left behind."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from loop import Launcher, finish, rows, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def scripted(script: str, **arguments: object) -> dict[str, Any]:
    return {"engine": {"script": script, "arguments": arguments}}


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(log: Path) -> list[int]:
    text = log.read_text()
    return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "runs as process" in line]


def test_an_engine_that_does_not_start_ends_the_run_with_its_cause(launcher: Launcher) -> None:
    output = launcher.run("run", {"actors": scripted("faults:NeverStarts", vocab_size=1)}, code=1)
    assert "the engine did not start" in output
    assert "faults:NeverStarts" in output
    assert "Traceback" not in output
    log = launcher.folder / "run" / "log.txt"
    wait_for(lambda: not any(map(is_alive, processes_of(log))), what="the processes to end")


def test_too_many_failed_episodes_end_the_run_naming_the_cause(launcher: Launcher) -> None:
    change = {
        "actors": scripted("faults:Fails", share=0.8, vocab_size=200, max_tokens=8),
        "replay": {"error_window": 24},
    }
    output = launcher.run("run", change, code=1)
    assert "engine" in output
    assert "the scripted engine lost the request" in output


def test_some_failed_episodes_are_counted_and_the_run_goes_on(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 3},
        "actors": scripted("faults:Fails", share=0.2, vocab_size=200, max_tokens=8),
    }
    launcher.run("run", change)
    folder = launcher.folder / "run"
    metrics = rows(folder / "metrics.jsonl")
    assert metrics[-1]["rollout/errors/engine"] > 0
    trained = [row for path in (folder / "trajectories").iterdir() for row in rows(path)]
    failed = [row for row in trained if row["stop_reason"] == "error"]
    assert failed
    assert all(row["reward"] is None and not any(row["train_mask"]) for row in failed)


def test_a_run_that_makes_no_progress_names_who_waits_for_whom(launcher: Launcher) -> None:
    change = {
        "run": {"watchdog_s": 4},
        "actors": scripted("faults:Hangs", num_calls=5, vocab_size=200, max_tokens=8),
    }
    output = launcher.run("run", change, code=1)
    assert "no progress for" in output
    assert "rollout-0" in output
    assert (launcher.folder / "run" / "stalled" / "ledger.json").is_file()


def test_interrupting_leaves_no_process_and_says_so(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 1000},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
        "replay": {"max_staleness": 2},
    }
    process = launcher.start("run", change)
    metrics = launcher.folder / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(rows(metrics)) >= 2, what="two steps")
    os.kill(process.pid, signal.SIGINT)
    output = finish(process, code=130)
    assert "interrupted" in output
    pids = processes_of(launcher.folder / "run" / "log.txt")
    assert len(pids) == 3
    wait_for(lambda: not any(map(is_alive, pids)), what="the processes to end")


def test_stopping_on_request_leaves_a_checkpoint_to_go_on_from(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 1000},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
    }
    process = launcher.start("run", change)
    folder = launcher.folder / "run"
    metrics = folder / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(rows(metrics)) >= 2, what="two steps")
    os.kill(process.pid, signal.SIGTERM)
    output = finish(process, code=143)
    assert "go on with --resume" in output
    step = rows(metrics)[-1]["step"]
    assert (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()


def test_a_deadline_stops_the_run_with_a_checkpoint(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 1000, "deadline": str(time.time() + 35), "deadline_margin_s": 5},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
    }
    output = launcher.run("run", change, code=143)
    assert "go on with --resume" in output
    folder = launcher.folder / "run"
    step = rows(folder / "metrics.jsonl")[-1]["step"]
    assert 0 < step < 1000
    assert (folder / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["actors.gpus_per_actor=4"], ["8 GPUs are needed", "the cluster has 0"]),
        (["learner.num_ranks=40"], ["CPUs are needed", "the cluster has 8"]),
        (["learner.optimiser=adam"], ["learner.optimiser", "unknown key"]),
        (["model={kind: pretrained, path: ./nowhere}"], ["nowhere"]),
        (["data.train={kind: jsonl, path: bad.jsonl}"], ["bad.jsonl:2", "no prompt in column"]),
        (["data.train={kind: jsonl, path: empty.jsonl}"], ["holds no prompts"]),
        (["rewards.functions=[{kind: exact_anser}]"], ["exact_anser"]),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_starts(
    launcher: Launcher, arguments: list[str], words: list[str]
) -> None:
    (launcher.folder / "bad.jsonl").write_text('{"prompt": "x"}\n{"question": "y"}\n')
    (launcher.folder / "empty.jsonl").write_text("")
    output = launcher.run("run", {}, *arguments, code=2)
    for word in words:
        assert word in output
    assert "Traceback" not in output
    assert not (launcher.folder / "run").exists()


def test_an_existing_run_directory_is_refused(launcher: Launcher) -> None:
    (launcher.folder / "run").mkdir()
    output = launcher.run("run", {}, code=2)
    assert "--resume" in output
