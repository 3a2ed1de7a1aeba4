"""The summary of a run: its results, and commands that the command line accepts."""

import json
import logging
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from minimal import QUICKSTART

from raylearner.config.loader import load
from raylearner.config.report import resolved_yaml
from raylearner.config.schema import RunConfig
from raylearner.errors import LearnerError, StoppedEarly
from raylearner.observability.run_directory import RESTART_OPTION
from raylearner.run.closing_summary import summarized, summary_lines

PROGRAM = ("python", "-m", "raylearner")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    return load([QUICKSTART], ["run.dir=runs/first", "run.num_steps=12"])


def write_run(config: RunConfig, *, num_steps: int, checkpoint: int | None) -> None:
    folder = Path(config.run.dir or "")
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text(resolved_yaml(config))
    rows = [{"step": i, "rollout/reward/mean": i / 10} for i in range(1, num_steps + 1)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "rollout/rew')
    evaluations = [{"step": 0, "reward/mean": 0.0}, {"step": num_steps, "reward/mean": 0.75}]
    lines = (json.dumps(row | {"num_prompts": 128}) + "\n" for row in evaluations)
    (folder / "eval.jsonl").write_text("".join(lines))
    (folder / "failures.jsonl").write_text("")
    if checkpoint is not None:
        (folder / "checkpoints" / f"step_{checkpoint:06d}").mkdir(parents=True)


def summarize(config: RunConfig, outcome: str) -> dict[str, str]:
    """Return the lines by their labels, with commands on one line."""
    lines = summary_lines(config, outcome=outcome, duration_s=126.0, program=PROGRAM)
    assert max(map(len, lines)) <= 80
    headline, *labelled = re.sub(r" \\\n +", " ", "\n".join(lines)).split("\n")
    pairs = (tuple(line.split(maxsplit=1)) for line in labelled)
    return {"headline": headline} | dict(pairs)


def test_a_finished_run_has_its_results_and_the_commands_that_come_next(config: RunConfig) -> None:
    write_run(config, num_steps=12, checkpoint=12)
    found = summarize(config, "finished")
    assert found["headline"] == "finished at step 12 of 12 after 2:06"
    assert found["reward"].startswith("0.350 -> 0.950")
    assert found["evaluation"].startswith("0.000 -> 0.750")
    assert "steps 0 and 12, 128 prompts" in found["evaluation"]
    assert found["checkpoint"] == "runs/first/checkpoints/step_000012"
    assert found["directory"] == "runs/first"
    assert found["view"] == "python -m raylearner view runs/first"
    assert found["resume"] == "python -m raylearner train --resume runs/first run.num_steps=24"
    assert shlex.split(found["evaluate"])[3:] == [
        "eval",
        "checkpoint=runs/first/checkpoints/step_000012",
    ]


def test_long_commands_continue_over_lines_that_can_be_copied(
    config: RunConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "a directory with a long name"
    run = config.run.model_copy(update={"dir": str(folder)})
    config = config.model_copy(update={"run": run})
    write_run(config, num_steps=3, checkpoint=3)
    lines = summary_lines(config, outcome="finished", duration_s=1.0, program=PROGRAM)
    start = next(i for i, line in enumerate(lines) if line.startswith("  resume"))
    end = next(i for i in range(start, len(lines)) if not lines[i].endswith("\\"))
    command = "\n".join(lines[start : end + 1]).removeprefix("  resume")
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True)
    assert done.stdout.splitlines()[3:] == [
        *("train", "--resume", "a directory with a long name", "run.num_steps=24")
    ]


def test_a_run_that_is_interrupted_has_a_shorter_one(config: RunConfig) -> None:
    write_run(config, num_steps=5, checkpoint=None)
    found = summarize(config, "interrupted")
    assert set(found) == {"headline", "reward", "checkpoint", "directory", "resume"}
    assert found["headline"] == "interrupted at step 5 of 12 after 2:06"
    assert found["resume"].endswith(f"train --resume runs/first {RESTART_OPTION}")


def test_a_failed_run_names_its_log_and_the_causes_of_failed_episodes(config: RunConfig) -> None:
    write_run(config, num_steps=5, checkpoint=4)
    assert "episodes" not in summarize(config, "failed")
    Path("runs/first/failures.jsonl").write_text("{}\n")
    found = summarize(config, "failed")
    assert found["log"] == "runs/first/log.txt"
    assert "runs/first/failures.jsonl" in found["episodes"]
    assert found["checkpoint"].endswith("step_000004")
    assert found["resume"] == "python -m raylearner train --resume runs/first"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "finished"), (KeyboardInterrupt(), "interrupted"), (LearnerError("x"), "failed")],
)
def test_a_run_that_wrote_its_directory_ends_with_a_summary(
    config: RunConfig,
    caplog: pytest.LogCaptureFixture,
    error: BaseException | None,
    outcome: str,
) -> None:
    caplog.set_level(logging.INFO)

    def run() -> None:
        with summarized(config):
            write_run(config, num_steps=2, checkpoint=None)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert caplog.messages[-1].startswith(f"{outcome} at step 2 of 12")
    caplog.clear()
    with pytest.raises(StoppedEarly), summarized(config):
        raise StoppedEarly("before it began")
    assert not caplog.messages
