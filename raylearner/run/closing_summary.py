"""The summary at the end of a run, read from its directory: results, and the commands that come next."""

import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raylearner.config.schema import RunConfig
from raylearner.errors import RunStopped
from raylearner.learner.checkpoint.directory import Checkpoint, find_newest
from raylearner.observability.jsonl import read_rows
from raylearner.observability.lines import WIDTH, clock, fixed, number_of, without_set
from raylearner.observability.run_directory import FAILURES_FILE, RESTART_OPTION

logger = logging.getLogger(__name__)

MEAN_STEPS = 10
"""Maximum number of steps whose mean reward is reported at the start and at the end."""
LABEL_WIDTH = 12
NUMBER_WIDTH = 6


@contextmanager
def summarized(config: RunConfig) -> Iterator[None]:
    """Log the summary when the block ends, however it ends, if the run had begun to write its directory."""
    began_s = time.monotonic()
    assert config.run.dir is not None, "the command line names a directory"
    folder = Path(config.run.dir)
    before = _written_at(folder)
    outcome = "failed"
    try:
        yield
        outcome = "finished"
    except (KeyboardInterrupt, RunStopped) as end:
        outcome = "interrupted" if isinstance(end, KeyboardInterrupt) else "stopped"
        raise
    finally:
        if _written_at(folder) != before:
            lines = summary_lines(
                config, outcome=outcome, duration_s=time.monotonic() - began_s, program=program()
            )
            logger.info("%s", "\n".join(lines))


def summary_lines(
    config: RunConfig, *, outcome: str, duration_s: float, program: Sequence[str]
) -> list[str]:
    """Return a headline and indented lines; `outcome` is finished, stopped, interrupted or failed."""
    folder = Path(config.run.dir or "")
    metrics, evaluations = read_rows(folder / "metrics.jsonl"), read_rows(folder / "eval.jsonl")
    latest = find_newest(folder / "checkpoints")
    step = int(metrics[-1]["step"]) if metrics else 0
    is_short = outcome in ("interrupted", "stopped")
    lines = [f"{outcome} at step {step} of {config.run.num_steps} after {clock(duration_s)}"]
    lines += _labelled("reward", _reward(metrics))
    if not is_short:
        for name in dict.fromkeys(row.get("set") for row in evaluations):
            rows = [without_set(row) for row in evaluations if row.get("set") == name]
            text = _evaluation(rows)
            lines += _labelled("evaluation", f"{name}: {text}" if name and text else text)
    lines += _labelled("checkpoint", shown(latest.folder) if latest else "none yet")
    lines += _labelled("directory", shown(folder))
    if outcome == "failed":
        failures = folder / FAILURES_FILE
        lines += _labelled("log", shown(folder / "log.txt"))
        if failures.is_file() and failures.stat().st_size:
            lines += _labelled("episodes", f"causes of failed ones: {shown(failures)}")
        lines += _labelled("help", 'docs/running.md, "When something is wrong"')
    if (folder / "trajectories").is_dir() and not is_short:
        lines += _command("view", [*program, "view"], [shown(folder)])
    lines += _command("resume", [*program, "train"], _resume(config, folder, latest, outcome))
    if latest is not None and not is_short and config.held_out:
        lines += _command("evaluate", [*program, "eval"], [f"checkpoint={shown(latest.folder)}"])
    return lines


def program() -> list[str]:
    """Return the words that start this program again from the same shell."""
    script = shutil.which("raylearner")
    if Path(sys.argv[0]).name == "raylearner" and script and _is_same(script, sys.argv[0]):
        return ["raylearner"]
    python = shutil.which("python")
    # Environments link to one interpreter, so that the links are compared, not their targets.
    is_on_path = python is not None and Path(python).parent == Path(sys.executable).parent
    return ["python" if is_on_path else shown(Path(sys.executable)), "-m", "raylearner"]


def shown(path: Path) -> str:
    """Return a path as it is typed in the current directory."""
    here, absolute = Path.cwd(), Path(os.path.abspath(path))
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _resume(config: RunConfig, folder: Path, latest: Checkpoint | None, outcome: str) -> list[str]:
    words = ["--resume", shown(folder)]
    if outcome == "finished":
        words.append(f"run.num_steps={2 * config.run.num_steps}")
    elif latest is None:
        words.append(RESTART_OPTION)
    return words


def _reward(metrics: Sequence[Mapping[str, Any]]) -> str:
    values = [row.get("rollout/reward/mean") for row in metrics]
    rewards = [float(value) for value in values if value is not None]
    if len(rewards) < 2:
        return _number(rewards[0]) if rewards else ""
    count = min(MEAN_STEPS, len(rewards) // 2)
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    which = (
        "the first and the last step"
        if count == 1
        else f"means of the first and last {count} steps"
    )
    return f"{_number(first)} -> {_number(last)}  ({which})"


def _evaluation(evaluations: Sequence[Mapping[str, Any]]) -> str:
    known = [row for row in evaluations if row.get("reward/mean") is not None]
    if not known:
        return ""
    first, last = known[0], known[-1]
    about = number_of(int(last.get("num_prompts", 0)), "prompt")
    if first is last:
        return f"{_number(last['reward/mean'])}  (step {last['step']}, {about})"
    values = f"{_number(first['reward/mean'])} -> {_number(last['reward/mean'])}"
    return f"{values}  (steps {first['step']} and {last['step']}, {about})"


def _number(value: float) -> str:
    return fixed(value, NUMBER_WIDTH)


def _labelled(label: str, text: str) -> list[str]:
    return [f"  {label:<{LABEL_WIDTH}}{text}"] if text else []


def _command(label: str, start: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return a command to copy, continued over lines where it is too long for one."""
    words = [shlex.join(start), *map(shlex.quote, rest)]
    lines = [f"  {label:<{LABEL_WIDTH}}{words[0]}"]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + len("  \\") <= WIDTH:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(" " * (LABEL_WIDTH + 4) + word)
    return lines


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _written_at(folder: Path) -> int:
    """Return when this or an earlier process last wrote the configuration; 0 for never."""
    try:
        return (folder / "config.yaml").stat().st_mtime_ns
    except OSError:
        return 0
