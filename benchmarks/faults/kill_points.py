# ruff: noqa: T201
"""The driver killed at seeded moments of one run and resumed each time: the same numbers at the end.

    python -m benchmarks.faults.kill_points [--points 20] [--seed 0]

The run is synchronous and seeded on the scripted engine. It is compared, step by step, with a run
that nothing interrupted, in all metrics of learner and rewards but times.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults.ledger import Balance, rows
from benchmarks.faults.run import FaultRun, make_model

COMPARED = ("learner/", "reward/", "rollout/reward/")
TIMED = ("_s", "_fraction", "/mfu", "per_s_per_rank")
RUN_S = 240.0

PHASES = {
    "start": ("starting", 0.5),
    "restore": ("restoring", 0.02),
    "first push": ("publishing", 0.1),
    "take": ("take", 0.05),
    "step": ("step", 0.03),
    "push": ("push", 0.02),
    "checkpoint copy": ("copy", 0.005),
    "checkpoint write": ("checkpoint", 0.02),
    "evaluation": ("evaluate", 0.05),
}
"""Spans of the driver, and the longest time into them at which it is killed."""
ONCE = {"start", "restore", "first push"}
"""Phases that a driver enters once."""
CLOSE = "close"
"""The phase after the last step: the driver is killed once the last checkpoint is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment at which a driver is killed."""

    phase: str
    count: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The interrupted run against the other."""

    kills: Sequence[str]
    """Phase and step of every kill."""
    num_steps: int
    num_keys: int
    different: dict[str, tuple[int, Any, Any]]
    """Key to the first step with other values, and both values."""
    balance: Balance
    left: Sequence[str]


def draw(num_points: int, *, seed: int, phases: Sequence[str] = tuple(PHASES)) -> list[Point]:
    """Return points in random order, with every phase at least once where there are enough.

    A repeated phase is left once or twice before, so that a run gets on; restoring comes last, since
    it needs a checkpoint.
    """
    generator = random.Random(seed)
    chosen = [phases[index % len(phases)] for index in range(num_points)]
    generator.shuffle(chosen)
    chosen.sort(key=lambda phase: phase == "restore")
    return [
        Point(
            phase=phase,
            count=1 if phase in ONCE or phase == "evaluation" else generator.randint(2, 3),
            delay_s=generator.random() * PHASES[phase][1],
        )
        for phase in chosen
    ]


def make_config(model: Path, *, num_steps: int) -> dict[str, Any]:
    """Return a synchronous run with a checkpoint every second step and frequent evaluations."""
    return {
        "run": {"num_steps": num_steps, "checkpoint_every_steps": 2},
        "model": make_model(model),
        "replay": {"max_staleness": 0},
        "actors": {"engine": {"arguments": {"delay_s": 0.002}}},
        "data": {"evaluation": {"kind": "calculator", "split": "evaluation", "num_prompts": 4}},
        "evaluation": {"num_prompts": 4, "every_steps": 3},
    }


def run_interrupted(
    config: dict[str, Any], points: Sequence[Point], *, say: Callable[[str], object]
) -> tuple[FaultRun, list[str]]:
    """Kill the driver at each point in turn, and resume; return the finished run and the kills."""
    run = FaultRun(config=config)
    kills: list[str] = []
    for point in points:
        span, _ = PHASES[point.phase]
        run.module = ("benchmarks.faults.dies", span, str(point.count), str(point.delay_s))
        restart(run)
        code = run.wait(timeout_s=RUN_S)
        if code != -signal.SIGKILL:
            say(f"not reached: {point.phase} (exit code {code})")
            if code != 0:
                raise SystemExit(run.output[-3000:])
            break
        kills.append(f"{point.phase} at step {run.step}")
        say(kills[-1])
    run.module = ("raylearner",)
    restart(run)
    last = run.dir / "checkpoints" / f"step_{config['run']['num_steps']:06d}" / "manifest.json"
    if run.wait_until(last.exists, timeout_s=RUN_S, pause_s=0.002) and run.is_running:
        run.driver.kill()
        run.driver.wait()
        kills.append(f"{CLOSE} at step {run.step}")
        say(kills[-1])
        run.resume()
    if run.wait(timeout_s=RUN_S) != 0:
        raise SystemExit(run.output[-3000:])
    return run, kills


def restart(run: FaultRun) -> None:
    """Start the run, or resume it; where there is no checkpoint to resume from, it starts over."""
    if run.dir.exists():
        run.resume("--restart-if-no-checkpoint")
    else:
        run.start()


def compare(
    points: Sequence[Point],
    *,
    num_steps: int,
    is_brief: bool = False,
    say: Callable[[str], object] = print,
) -> Comparison:
    """Run both, and compare their metrics bit by bit."""
    with tempfile.TemporaryDirectory(prefix="faults-model-") as folder:
        config = make_config(Path(folder) / "model", num_steps=num_steps)
        run, kills = run_interrupted(config, points, say=say)
        # The start of another run sweeps what the last killed driver left.
        with run, FaultRun(config=config) as whole:
            if whole.start().wait(timeout_s=RUN_S) != 0:
                raise SystemExit(whole.output[-3000:])
            expected, found = rows(whole.dir / "metrics.jsonl"), rows(run.dir / "metrics.jsonl")
            left, balance = run.leftovers(is_brief=is_brief).names, run.balance()
    for done in (whole, run):
        shutil.rmtree(done.folder, ignore_errors=True)
    keys = sorted(
        key
        for key in {key for row in expected for key in row}
        if key.startswith(COMPARED) and not key.endswith(TIMED)
    )
    different: dict[str, tuple[int, Any, Any]] = {}
    for mine, other in zip(expected, found, strict=True):
        for key in keys:
            if mine.get(key) != other.get(key) and not _are_nan(mine.get(key), other.get(key)):
                different.setdefault(key, (mine["step"], mine.get(key), other.get(key)))
    return Comparison(
        kills=kills,
        num_steps=len(found),
        num_keys=len(keys),
        different=different,
        balance=balance,
        left=left,
    )


def _are_nan(*values: Any) -> bool:
    return all(value != value for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    points = draw(options.points - 1, seed=options.seed)
    found = compare(points, num_steps=options.steps, say=lambda line: print(line, flush=True))
    print(f"{len(found.kills)} kills, {found.num_keys} keys over {found.num_steps} steps")
    print(f"different: {found.different or 'none'}")
    print(f"{found.balance}; left: {', '.join(found.left) or 'nothing'}")
    return int(bool(found.different or found.left) or not found.balance.is_balanced)


if __name__ == "__main__":
    sys.exit(main())
