"""Faults that are injected into a running `FaultRun`, and how it is seen to recover from them."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults import processes
from benchmarks.faults.run import FaultRun

ROLES = ("rollout", "learner", "replay", "reward", "core")
FULL_S = 8.0
"""Time for which a disk stays full."""
NODE_S = 60.0
"""Maximum time for a second node to join."""


class Skipped(Exception):
    """A fault cannot be injected here; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Processes of a run by role, and its step, before a fault."""

    step: int
    counts: Counter[str]
    began_s: float


def state_of(run: FaultRun) -> State:
    counts = Counter(role for p in processes.members(run.folder) if (role := processes.role_of(p)))
    kept = Counter({role: count for role, count in counts.items() if role in ROLES})
    return State(step=run.step, counts=kept, began_s=time.monotonic())


def wait_recovered(
    run: FaultRun, before: State, victims: list[psutil.Process], *, timeout_s: float
) -> float | None:
    """Return the seconds until no victim is left, every role is complete and a later step is made.

    None where that does not happen in time, or the driver ends.
    """

    def is_complete() -> bool:
        if any(is_living(victim) for victim in victims):
            return False
        now = state_of(run)
        return all(now.counts[role] >= count for role, count in before.counts.items())

    deadline_s = before.began_s + timeout_s
    if not run.wait_until(is_complete, timeout_s=timeout_s, pause_s=0.3):
        return None
    # The step may have been set back meanwhile, so that the next one counts from here.
    step = max(before.step, run.step)
    left_s = deadline_s - time.monotonic()
    if not run.wait_until(lambda: run.step > step, timeout_s=left_s):
        return None
    return time.monotonic() - before.began_s


def is_living(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# -- faults -----------------------------------------------------------------------------------------


def kill(run: FaultRun, role: str, generator: random.Random) -> list[psutil.Process]:
    victim = run.pick(role, generator)
    victim.kill()
    return [victim]


def stop(run: FaultRun, role: str, generator: random.Random) -> list[psutil.Process]:
    """Stop a process with SIGSTOP: it is there, but does not answer."""
    victim = run.pick(role, generator)
    victim.suspend()
    return [victim]


def kill_replacement(run: FaultRun, generator: random.Random) -> list[psutil.Process]:
    """Kill a rollout actor, and the process that is started in its place."""
    old = {process.pid for process in run.find("rollout")}
    first = kill(run, "rollout", generator)
    started: list[psutil.Process] = []

    def has_started() -> bool:
        started[:] = [p for p in run.find("rollout") if p.pid not in old]
        return bool(started)

    if not run.wait_until(has_started, timeout_s=60, pause_s=0.05):
        raise Skipped("no replacement was started")
    started[0].kill()
    return [*first, started[0]]


def kill_driver(run: FaultRun) -> list[psutil.Process]:
    """Kill the driver alone, and resume the run at once."""
    orphans = [p for p in processes.members(run.folder) if processes.role_of(p) in ROLES]
    run.driver.kill()
    run.driver.wait()
    run.resume()
    return orphans


@contextmanager
def small_disk(folder: Path, *, size: str) -> Iterator[None]:
    """Mount a file system of limited size at `folder`. Raises `Skipped` where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        raise Skipped(f"mounting is not permitted: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def make_read_only(folder: Path, *, is_read_only: bool) -> None:
    option = "remount,ro" if is_read_only else "remount,rw"
    done = subprocess.run(["mount", "-o", option, str(folder)], capture_output=True, check=False)
    if done.returncode:
        raise Skipped(f"{option} is not permitted: {done.stderr.decode().strip()}")


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Fill the file system of `folder`, and free it again."""
    filler = folder / "filler"
    try:
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(b"\0" * (1 << 20))
                    file.flush()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        yield
    finally:
        filler.unlink(missing_ok=True)


def fill_disk(run: FaultRun) -> list[psutil.Process]:
    """Fill the disk of the run directory for some seconds, and resume the run if it ended."""
    disk = run.dir.parent
    if not os.path.ismount(disk):
        raise Skipped("the run directory is not on a file system of limited size")
    with full_disk(disk):
        run.wait_until(lambda: False, timeout_s=FULL_S)
    if not run.is_running:
        run.resume()
    return []


@contextmanager
def second_node(run: FaultRun, *, num_cpus: int = 2) -> Iterator[psutil.Process]:
    """Add a second raylet to the run's local cluster, and kill it at the end if it still lives."""
    gcs = run.find("raylet")
    found = re.search(r"--gcs-address=(\S+)", processes.title(gcs[0])) if gcs else None
    if found is None:
        raise Skipped("the run has no local cluster")
    address = found[1]
    old = {process.pid for process in gcs}
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"),
        *("--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}"),
        "--object-store-memory=100000000",
    ]
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(run.folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
    }
    with (run.folder / "node.txt").open("ab") as output:
        node = subprocess.Popen(
            command,
            cwd=run.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        raylet: list[psutil.Process] = []

        def has_joined() -> bool:
            raylet[:] = [process for process in run.find("raylet") if process.pid not in old]
            return bool(raylet)

        if not run.wait_until(has_joined, timeout_s=NODE_S):
            raise Skipped("the second node did not join")
        yield raylet[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def kill_node(run: FaultRun, generator: random.Random) -> list[psutil.Process]:
    """Let a node join, move a rollout actor there by killing one, and kill the node with all of it."""
    with second_node(run) as raylet:
        before = state_of(run)
        victims = kill(run, "rollout", generator)
        wait_recovered(run, before, victims, timeout_s=90)
        moved = [p for p in raylet.children(recursive=True) if processes.role_of(p) == "rollout"]
        raylet.kill()
        return [*victims, *moved]


Fault = Callable[[FaultRun, random.Random], list[psutil.Process]]
"""Injects a fault and returns the processes that must end before the run has recovered."""


def _kill(role: str) -> Fault:
    return lambda run, generator: kill(run, role, generator)


def _stop(role: str) -> Fault:
    return lambda run, generator: stop(run, role, generator)


FAULTS: dict[str, Fault] = {
    "kill rollout actor": _kill("rollout"),
    "kill engine core": _kill("core"),
    "kill learner rank": _kill("learner"),
    "kill replay actor": _kill("replay"),
    "kill reward actor": _kill("reward"),
    "stop rollout actor": _stop("rollout"),
    "stop engine core": _stop("core"),
    "stop learner rank": _stop("learner"),
    "stop replay actor": _stop("replay"),
    "stop reward actor": _stop("reward"),
    "kill replacement": kill_replacement,
    "kill driver": lambda run, generator: kill_driver(run),
    "fill disk": lambda run, generator: fill_disk(run),
    "kill node": kill_node,
}
