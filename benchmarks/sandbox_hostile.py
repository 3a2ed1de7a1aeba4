# ruff: noqa: T201
"""Runs each program of tests/hostile many times, all at once, beside normal calls, and prints a table.

    python benchmarks/sandbox_hostile.py --repeat 100

Exit code 1 when a program escapes, ends otherwise than it should, a normal call fails, or anything
is left behind.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from raylearner.config.environment import MIB, SandboxSection
from raylearner.sandbox.bubblewrap import FIRST_USER
from raylearner.sandbox.sandbox import Sandbox, SandboxResult

FOLDER = Path(__file__).parents[1] / "tests" / "hostile"
SECRET = "a-secret-of-the-run-5f1c"
NORMAL_PERIOD_S = 0.5


@dataclass
class Row:
    """What happened to the calls of one program."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    wall_s: list[float] = field(default_factory=list[float])
    num_bad: int = 0


def boxed() -> list[int]:
    """Processes of any sandbox, in any namespace."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"/code/main.py" in line:
            found.append(int(folder.name))
    return found


def sandbox_files() -> set[str]:
    """Files on the host, where all may write, that a sandbox or its user made."""
    found: set[str] = set()
    for folder in ("/tmp", "/dev/shm", "/var/tmp"):
        for entry in os.scandir(folder):
            is_ours = entry.name.startswith("raylearner") or "escaped" in entry.name
            if is_ours or entry.stat(follow_symlinks=False).st_uid >= FIRST_USER:
                found.add(entry.path)
    return found


def used_mib() -> float:
    """Memory of the machine that is not available, files in memory included."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    return (total - free) / 1024


async def run(repeat: int, concurrent: int) -> int:
    os.environ["RAY_AUTH_TOKEN"] = SECRET
    limits = SandboxSection(
        wall_s=3.0,
        cpu_s=0.5,
        memory_bytes=256 * MIB,
        folder_bytes=16 * MIB,
        file_bytes=4 * MIB,
        max_processes=24,
        max_concurrent=concurrent,
    )
    hostile = Sandbox(limits)
    normal = Sandbox(limits.model_copy(update={"wall_s": 30.0, "max_concurrent": 2}))
    programs = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
    rows: defaultdict[str, Row] = defaultdict(Row)
    latencies: list[float] = []
    num_failed, peak_mib, before_mib = 0, 0.0, used_mib()
    files, descriptors = sandbox_files(), len(os.listdir("/proc/self/fd"))

    async def attack(name: str, code: str) -> None:
        expected = code.splitlines()[0].removeprefix("# ends:").split()
        expected += ["wall"] if "cpu" in expected else []
        result: SandboxResult = await hostile.run(code)
        row = rows[name]
        row.outcomes[result.limit_hit or result.status.value] += 1
        row.wall_s.append(result.wall_s)
        said = result.stdout + result.stderr
        row.num_bad += "ESCAPED" in said or SECRET in said
        row.num_bad += (result.limit_hit or result.status.value) not in expected

    async def work() -> None:
        nonlocal num_failed, peak_mib
        while True:
            started = time.monotonic()
            result = await normal.run("print(sum(range(1000)))")
            latencies.append(time.monotonic() - started)
            num_failed += result.stdout != "499500\n"
            peak_mib = max(peak_mib, used_mib())
            await asyncio.sleep(NORMAL_PERIOD_S)

    jobs = [(name, code) for name, code in programs.items() for _ in range(repeat)]
    random.Random(0).shuffle(jobs)
    started = time.monotonic()
    worker = asyncio.ensure_future(work())
    await asyncio.gather(*(attack(*job) for job in jobs))
    worker.cancel()
    await asyncio.wait([worker])
    took_s = time.monotonic() - started

    print("| program | calls | how they ended | bad | median s | longest s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in sorted(rows.items()):
        ends = ", ".join(f"{end} {count}" for end, count in row.outcomes.most_common())
        median = statistics.median(row.wall_s)
        print(
            f"| {name} | {len(row.wall_s)} | {ends} | {row.num_bad} | {median:.2f} |"
            f" {max(row.wall_s):.2f} |"
        )
    left = boxed()
    new_files = sorted(sandbox_files() - files)
    new_descriptors = len(os.listdir("/proc/self/fd")) - descriptors
    ordered = sorted(latencies)
    print(
        f"\n{len(jobs)} hostile calls, {concurrent} at once, in {took_s:.0f} s; {len(latencies)}"
        f" normal calls beside them, {num_failed} failed, median {ordered[len(ordered) // 2]:.2f} s,"
        f" longest {ordered[-1]:.2f} s; machine memory {before_mib:.0f} MiB before,"
        f" {peak_mib:.0f} MiB at most; left behind: {len(left)} processes,"
        f" {len(new_files)} files {new_files[:5]}, {new_descriptors} descriptors"
    )
    return int(bool(num_failed or left or sum(row.num_bad for row in rows.values())))


def main() -> int:
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--repeat", type=int, default=100, help="calls of each program")
    command.add_argument("--concurrent", type=int, default=8, help="hostile calls at once")
    options = command.parse_args()
    return asyncio.run(run(options.repeat, options.concurrent))


if __name__ == "__main__":
    sys.exit(main())
