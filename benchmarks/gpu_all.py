"""Everything that must be seen on GPUs, stage by stage, two stages at once where GPUs are left.

    python benchmarks/gpu_all.py --out DIR --model SMOLLM2 [--only NAME,..] [--skip NAME,..] [--cpu]

Every stage is a process with its own time limit and writes `DIR/<name>.json` when it ends, and as it
goes; a stage whose result says that it is done is not run again. Without GPUs, `--cpu` runs every
stage at reduced size, one after the other. Nothing needs a network.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.common import ROOT, end, environment, say, visible_gpus

CPU_LIMIT_S = 900.0


@dataclass(frozen=True)
class Stage:
    """One result. `module` is run with `arguments`; `num_gpus` are its own while it runs."""

    name: str
    module: str
    num_gpus: int
    limit_s: float
    arguments: tuple[str, ...] = ()
    on_cpu: bool = True


def real_size(size: str, *, num_gpus: int) -> Iterator[Stage]:
    """Yield the stages at one size: vLLM alone, both layouts, and asynchronous training by staleness."""
    runs: dict[str, tuple[str, ...]] = {
        "bare": ("--layout", "bare", "--seconds", "60"),
        "async": ("--layout", "async"),
        "colocated": ("--layout", "colocated"),
        **{f"async_{n}": ("--layout", "async", "--staleness", str(n)) for n in (1, 2, 8)},
    }
    for kind, arguments in runs.items():
        name = f"real_size_{size}_{kind}"
        yield Stage(
            name,
            "benchmarks.gpu.real_size",
            1 if kind == "bare" else num_gpus,
            360,
            ("--size", size, "--name", name, *arguments),
            on_cpu=size != "8B" and kind in ("bare", "async"),
        )


STAGES = (
    Stage("parity", "benchmarks.gpu.parity", 3, 200),
    Stage(
        "quickstart_one_gpu",
        "benchmarks.gpu.quickstart",
        1,
        200,
        ("--name", "quickstart_one_gpu", "--steps", "12"),
        on_cpu=False,
    ),
    Stage(
        "quickstart_one_gpu_tuned",
        "benchmarks.gpu.quickstart",
        1,
        200,
        (
            *("--name", "quickstart_one_gpu_tuned", "--steps", "12", "actors.num_actors=3"),
            *("actors.engine.eager=false", "learner.compile=false"),
            "learner.max_tokens_per_micro_batch=32768",
        ),
        on_cpu=False,
    ),
    Stage("quickstart", "benchmarks.gpu.quickstart", 3, 220),
    Stage("throughput_eager", "benchmarks.gpu.throughput", 1, 120),
    Stage("throughput_compiled", "benchmarks.gpu.throughput", 1, 200, ("--compile",), on_cpu=False),
    Stage(
        "throughput_compiled_4",
        "benchmarks.gpu.throughput",
        1,
        200,
        ("--compile", "--micro-batches", "4"),
        on_cpu=False,
    ),
    Stage(
        "throughput_compiled_4_keep_nothing",
        "benchmarks.gpu.throughput",
        1,
        200,
        ("--compile", "--micro-batches", "4", "--keep", "nothing"),
        on_cpu=False,
    ),
    Stage(
        "throughput_eager_4",
        "benchmarks.gpu.throughput",
        1,
        120,
        ("--micro-batches", "4"),
    ),
    Stage(
        "throughput_8B_compiled_4_keep_weights",
        "benchmarks.gpu.throughput",
        4,
        400,
        (
            *("--size", "8B", "--ranks", "4", "--compile", "--micro-batches", "4"),
            *("--keep", "weights", "--chunk", "4096"),
        ),
        on_cpu=False,
    ),
    Stage(
        "quickstart_lora",
        "benchmarks.gpu.quickstart",
        1,
        200,
        (
            *("--name", "quickstart_lora", "--steps", "12", "learner.lora.rank=16"),
            "actors.engine.dtype=bfloat16",
        ),
        on_cpu=False,
    ),
    Stage("engine", "benchmarks.gpu.engine", 1, 1500, on_cpu=False),
    Stage("head", "benchmarks.gpu.head", 1, 120),
    Stage("prefix", "benchmarks.gpu.prefix", 1, 150),
    Stage(
        "prefix_compiled",
        "benchmarks.gpu.prefix",
        1,
        220,
        ("--compile", "--name", "prefix_compiled"),
        on_cpu=False,
    ),
    Stage("verification", "benchmarks.gpu.verification", 1, 180),
    Stage(
        "throughput_eager_full",
        "benchmarks.gpu.throughput",
        1,
        120,
        ("--checkpointing", "full"),
    ),
    Stage("images", "benchmarks.gpu.images", 1, 320),
    Stage("visual", "benchmarks.gpu.visual", 2, 240),
    Stage("visual_3B", "benchmarks.gpu.visual", 2, 420, ("--size", "3B")),
    Stage("pushes_2.3B_1to1", "benchmarks.gpu.pushes", 2, 220, ("--size", "2.3B")),
    Stage("pushes_8B_1to1", "benchmarks.gpu.pushes", 2, 240, ("--size", "8B"), on_cpu=False),
    Stage(
        "pushes_2.3B_1to1_ipc",
        "benchmarks.gpu.pushes",
        1,
        200,
        ("--size", "2.3B", "--transport", "ipc"),
        on_cpu=False,
    ),
    Stage(
        "pushes_8B_1to1_ipc",
        "benchmarks.gpu.pushes",
        1,
        260,
        ("--size", "8B", "--transport", "ipc"),
        on_cpu=False,
    ),
    Stage("agreement", "benchmarks.gpu.agreement", 4, 240),
    Stage("agreement_context", "benchmarks.gpu.agreement", 2, 180, ("--context",)),
    Stage(
        "pushes_2.3B_2to2",
        "benchmarks.gpu.pushes",
        4,
        200,
        ("--size", "2.3B", "--learners", "2", "--engines", "2"),
        on_cpu=False,
    ),
    Stage("broadcast", "benchmarks.gpu.broadcast", 4, 90),
    Stage("start_1", "benchmarks.gpu.start", 1, 400, ("--name", "start_1", "--engines", "3")),
    Stage(
        "start_4",
        "benchmarks.gpu.start",
        4,
        300,
        ("--name", "start_4", "--engines", "4"),
        on_cpu=False,
    ),
    Stage(
        "start_12",
        "benchmarks.gpu.start",
        4,
        400,
        ("--name", "start_12", "--engines", "12"),
        on_cpu=False,
    ),
    Stage("modes_async", "benchmarks.gpu.modes", 4, 400, ("--mode", "async")),
    Stage("modes_sync", "benchmarks.gpu.modes", 4, 400, ("--mode", "sync")),
    Stage("stories", "benchmarks.stories", 2, 420),
    Stage(
        "stories_wait",
        "benchmarks.stories",
        2,
        420,
        ("--on-stale", "wait", "--name", "stories_wait"),
        on_cpu=False,
    ),
    Stage(
        "stories_tuned",
        "benchmarks.stories",
        2,
        420,
        ("--engines", "6", "--tuned", "--name", "stories_tuned"),
        on_cpu=False,
    ),
    Stage("trl_stories", "benchmarks.gpu.trl_stories", 2, 360, on_cpu=False),
    Stage("modes_colocated", "benchmarks.gpu.modes", 4, 400, ("--mode", "colocated"), on_cpu=False),
    *real_size("8B", num_gpus=4),
    *real_size("2.3B", num_gpus=1),
    Stage("task", "benchmarks.gpu.task", 4, 330),
    Stage(
        "pushes_8B_2to2",
        "benchmarks.gpu.pushes",
        4,
        240,
        ("--size", "8B", "--learners", "2", "--engines", "2"),
        on_cpu=False,
    ),
    Stage(
        "pushes_8B_2to1_tensor2",
        "benchmarks.gpu.pushes",
        4,
        240,
        ("--size", "8B", "--learners", "2", "--engines", "1", "--tensor", "2"),
        on_cpu=False,
    ),
)
"""In order of worth."""


def is_done(out: Path, stage: Stage) -> bool:
    path = out / f"{stage.name}.json"
    try:
        return bool(json.loads(path.read_text())["is_done"])
    except (OSError, ValueError, KeyError):
        return False


@dataclass
class Running:
    stage: Stage
    gpus: list[str]
    process: "subprocess.Popen[Any]"
    log: TextIO
    started: float


class Runner:
    """Starts stages in order as GPUs become free; ends those that take too long."""

    def __init__(self, arguments: argparse.Namespace, gpus: list[str]) -> None:
        self._arguments = arguments
        self._all = list(gpus)
        self._free = list(gpus)
        self._running: list[Running] = []

    def run(self, stages: list[Stage]) -> None:
        waiting = list(stages)
        until = time.monotonic() + self._arguments.seconds
        try:
            while waiting or self._running:
                self._collect()
                if time.monotonic() > until:
                    say(out_of_time=[stage.name for stage in waiting])
                    return
                # A stage may overtake one that waits for more GPUs than are free now.
                for stage in list(waiting):
                    if self._needed(stage) <= len(self._free) and self._has_slot():
                        waiting.remove(stage)
                        self._start(stage)
                time.sleep(0.3)
        finally:
            for running in self._running:
                end(running.process, grace_s=5.0)

    def _has_slot(self) -> bool:
        return bool(self._all) or not self._running

    def _needed(self, stage: Stage) -> int:
        return 0 if self._arguments.cpu else min(stage.num_gpus, len(self._all))

    def _start(self, stage: Stage) -> None:
        number = self._needed(stage)
        gpus, self._free = self._free[:number], self._free[number:]
        arguments = self._arguments
        command = [sys.executable, "-m", stage.module, "--out", str(arguments.out)]
        command += ["--model", arguments.model, *stage.arguments]
        if arguments.cpu:
            command.append("--cpu")
        log = (arguments.out / f"{stage.name}.stage.log").open("w")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(gpus, cpu=arguments.cpu),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.append(Running(stage, gpus, process, log, time.monotonic()))
        say(started=stage.name, gpus=gpus)

    def _collect(self) -> None:
        for running in list(self._running):
            took = time.monotonic() - running.started
            limit = CPU_LIMIT_S if self._arguments.cpu else running.stage.limit_s
            is_late = took > limit
            if running.process.poll() is None and not is_late:
                continue
            end(running.process, grace_s=10.0)
            running.log.close()
            self._running.remove(running)
            self._free = sorted([*self._free, *running.gpus])
            say(
                ended=running.stage.name,
                is_done=is_done(self._arguments.out, running.stage),
                exit_code=running.process.returncode,
                is_late=is_late,
                seconds=round(took, 1),
            )


def gpus_of_machine() -> list[str]:
    visible = visible_gpus()
    if visible:
        return visible
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(index) for index, _ in enumerate(listed.stdout.splitlines())]


def report(out: Path) -> None:
    """All results in one file, small enough to carry home."""
    found = {}
    for path in sorted(out.glob("*.json")):
        if path.name != "all.json":
            found[path.stem] = json.loads(path.read_text())
    (out / "all.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True, help="SmolLM2 or the like, a directory")
    parser.add_argument("--only", default="", help="names of stages, or beginnings of them")
    parser.add_argument("--skip", default="")
    parser.add_argument("--again", action="store_true", help="run what is done already, too")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so long")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.model = str(Path(arguments.model).resolve())
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    only, skip = (tuple(filter(None, text.split(","))) for text in (arguments.only, arguments.skip))
    gpus = [] if arguments.cpu else gpus_of_machine()
    if not gpus and not arguments.cpu:
        sys.exit("no GPU is visible; --cpu runs every stage at reduced size")
    stages = [
        stage
        for stage in STAGES
        if (not only or stage.name.startswith(only))
        and not (skip and stage.name.startswith(skip))
        and (stage.on_cpu or not arguments.cpu)
        and (arguments.again or not is_done(arguments.out, stage))
    ]
    say(gpus=gpus, stages=[stage.name for stage in stages])
    try:
        Runner(arguments, gpus).run(stages)
    finally:
        report(arguments.out)


if __name__ == "__main__":
    main()
