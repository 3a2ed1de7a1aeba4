"""What goes wrong is told in one clear line, with the right exit code, and nothing is left behind."""

import os
import re
import signal
import time
from typing import Any

import pytest
from loop import Launcher, finish, is_alive, merged, processes_of, rows, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def scripted(script: str, **arguments: object) -> dict[str, Any]:
    return {"engine": {"script": script, "arguments": arguments}}


def test_an_engine_that_does_not_start_ends_the_run_with_its_cause(launcher: Launcher) -> None:
    output = launcher.run(
        "run", {"actors": scripted("benchmarks.faults.scripts:NeverStarts", vocab_size=1)}, code=1
    )
    assert "the engine did not start" in output
    assert "benchmarks.faults.scripts:NeverStarts" in output
    assert "Traceback" not in output
    log = launcher.folder / "run" / "log.txt"
    wait_for(lambda: not any(map(is_alive, processes_of(log))), what="the processes to end")


def test_too_many_failed_episodes_end_the_run_naming_the_cause(launcher: Launcher) -> None:
    change = {
        "actors": scripted(
            "benchmarks.faults.scripts:Fails", share=0.8, vocab_size=200, max_tokens=8
        ),
        "replay": {"error_window": 24},
    }
    output = launcher.run("run", change, code=1)
    assert "engine" in output
    assert "the scripted engine lost the request" in output
    summary = output.rpartition(" failed at step ")[2]
    assert "causes of failed ones: run/failures.jsonl" in summary
    assert summary.splitlines()[-1].startswith("the run failed: ")


def test_some_failed_episodes_are_counted_and_the_run_continues(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 3},
        "actors": scripted(
            "benchmarks.faults.scripts:Fails", share=0.2, vocab_size=200, max_tokens=8
        ),
    }
    launcher.run("run", change)
    folder = launcher.folder / "run"
    metrics = rows(folder / "metrics.jsonl")
    assert metrics[-1]["rollout/errors/engine"] > 0
    by_source = [v for k, v in metrics[-1].items() if re.fullmatch("rollout/source/.+/errors", k)]
    assert by_source == [metrics[-1]["rollout/errors/engine"]]
    trained = [row for path in (folder / "trajectories").iterdir() for row in rows(path)]
    failed = [row for row in trained if row["stop_reason"] == "error"]
    assert failed
    assert all(row["reward"] is None and not any(row["train_mask"]) for row in failed)


def test_a_run_that_makes_no_progress_names_who_waits_for_whom(launcher: Launcher) -> None:
    change = {
        "run": {"watchdog_s": 4},
        "actors": scripted(
            "benchmarks.faults.scripts:Hangs", num_calls=5, vocab_size=200, max_tokens=8
        ),
    }
    output = launcher.run("run", change, code=1)
    assert "no progress for" in output
    assert "rollout-0" in output
    assert (launcher.folder / "run" / "stalled" / "ledger.json").is_file()


def test_an_interrupt_leaves_no_process_and_a_deadline_a_checkpoint(launcher: Launcher) -> None:
    """The time that the first run took to its second step tells how long the other may take."""
    change = {
        "run": {"num_steps": 1000},
        "actors": {"engine": {"arguments": {"delay_s": 0.05}}},
        "replay": {"max_staleness": 2},
    }
    began_s = time.time()
    process = launcher.start("interrupted", change)
    metrics = launcher.folder / "interrupted" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(rows(metrics)) >= 2, what="two steps")
    took_s = time.time() - began_s
    os.kill(process.pid, signal.SIGINT)
    output = finish(process, code=130)
    assert f"interrupted at step {len(rows(metrics))} of" in output
    assert output.splitlines()[-1] == "interrupted"
    pids = processes_of(launcher.folder / "interrupted" / "log.txt")
    assert len(pids) == 3
    wait_for(lambda: not any(map(is_alive, pids)), what="the processes to end")
    deadline = {"deadline": str(time.time() + 1.5 * took_s + 5), "deadline_margin_s": 5}
    output = launcher.run("late", merged(change, {"run": deadline}), code=143)
    assert "--resume" in output
    step = rows(launcher.folder / "late" / "metrics.jsonl")[-1]["step"]
    assert 0 < step < 1000
    manifest = launcher.folder / "late" / "checkpoints" / f"step_{step:06d}" / "manifest.json"
    assert manifest.is_file()


BAD_INPUT = [
    (["actors.gpus_per_actor=4"], ["8 GPUs are needed", "the cluster has 0"]),
    (["learner.num_ranks=40"], ["CPUs are needed", "the cluster has 8"]),
    (["learner.optimiser=adam"], ["learner.optimiser", "unknown key"]),
    (["model={kind: pretrained, path: ./nowhere}"], ["nowhere"]),
    (["data.train={kind: jsonl, path: bad.jsonl}"], ["bad.jsonl:2", "no prompt in column"]),
    (["data.train={kind: jsonl, path: empty.jsonl}"], ["no prompts"]),
    (["rewards.functions=[{kind: exact_anser}]"], ["exact_anser"]),
]


def test_bad_input_is_one_clear_line_and_nothing_starts(launcher: Launcher) -> None:
    (launcher.folder / "bad.jsonl").write_text('{"prompt": "x"}\n{"question": "y"}\n')
    (launcher.folder / "empty.jsonl").write_text("")
    processes = [
        launcher.start(f"run-{number}", {}, *arguments)
        for number, (arguments, _) in enumerate(BAD_INPUT)
    ]
    for number, (process, (arguments, words)) in enumerate(zip(processes, BAD_INPUT, strict=True)):
        output = finish(process, code=2)
        for word in words:
            assert word in output, arguments
        assert "Traceback" not in output, arguments
        assert not (launcher.folder / f"run-{number}").exists(), arguments


def test_an_existing_run_directory_is_refused(launcher: Launcher) -> None:
    (launcher.folder / "run").mkdir()
    output = launcher.run("run", {}, code=2)
    assert "--resume" in output
