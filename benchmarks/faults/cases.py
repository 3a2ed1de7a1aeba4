"""One fault a run, by the command line: what happened, and what was left.

    python -m benchmarks.faults.cases [NAME ..] [--out FILE]

prints a line of a Markdown table per case and writes the outcomes as JSON lines. Without names, all
cases run that need no vLLM. Cases with a disk need the right to mount.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.faults import injections
from benchmarks.faults.injections import Skipped, state_of, wait_recovered
from benchmarks.faults.run import ROOT, FaultRun, make_model

STEPS_BEFORE, STEPS_AFTER = 6, 15
START_S, RECOVER_S, END_S = 300.0, 150.0, 90.0
STOPPED, INTERRUPTED, FAILED = 143, 130, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run with one fault."""

    case: str
    recovered_s: float | None = None
    """Seconds from the fault until the run continues as before; None where it does not."""
    code: int | None = None
    """Exit code, after SIGTERM where the run continues; None where it does not end in time."""
    end_s: float = 0.0
    step: int = 0
    lost: int = 0
    twice: int = 0
    left: tuple[str, ...] = ()
    skipped: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def row(self) -> str:
        """Return a line of a Markdown table."""
        if self.skipped:
            return f"| {self.case} | skipped: {self.skipped} | | | |"
        went = "ended" if self.recovered_s is None else f"continues after {self.recovered_s:.1f} s"
        end = "does not end" if self.code is None else f"{self.code} after {self.end_s:.1f} s"
        left = ", ".join(self.left) or "nothing"
        return f"| {self.case} | {went} | {end} | {self.lost} lost, {self.twice} twice | {left} |"


HEAD = "| case | run | exit code | groups | left |\n|---|---|---|---|---|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault in a run of its own. `inject` returns the processes that must end in the recovery."""

    inject: injections.Fault
    change: Mapping[str, Any] = field(default_factory=dict[str, Any])
    files: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    disk: str = ""
    """Size of a file system for the run directory."""
    goes_on: bool = True
    """Whether the run must continue; otherwise it ends by itself with a code of `codes`."""
    codes: tuple[int, ...] = (STOPPED,)
    at_step: int = STEPS_BEFORE


def _nothing(run: FaultRun, generator: random.Random) -> list[Any]:
    """The engine's script is the fault."""
    return []


def _start_learner_late(run: FaultRun, generator: random.Random) -> list[Any]:
    assert not list((run.dir / "checkpoints").glob("step_*")), "before the first checkpoint"
    return injections.kill(run, "learner", generator)


def _remove(run: FaultRun, generator: random.Random) -> list[Any]:
    shutil.rmtree(run.dir, ignore_errors=True)
    return []


def _read_only(run: FaultRun, generator: random.Random) -> list[Any]:
    injections.make_read_only(run.dir.parent, is_read_only=True)
    return []


def _signals(*numbers: int) -> injections.Fault:
    def send(run: FaultRun, generator: random.Random) -> list[Any]:
        for number in numbers:
            run.driver.send_signal(number)
            time.sleep(0.5)
        return []

    return send


def _in_start(*numbers: int) -> injections.Fault:
    def send(run: FaultRun, generator: random.Random) -> list[Any]:
        if not run.wait_until(lambda: "runs as process" in run.log, timeout_s=START_S):
            raise Skipped("no actor was started")
        return _signals(*numbers)(run, generator)

    return send


def _in_push(run: FaultRun, generator: random.Random) -> list[Any]:
    """Kill the driver while weights are being written, and resume."""

    def is_writing() -> bool:
        return any(Path("/dev/shm").glob(f"*{run.name}*/*.partial"))

    run.wait_until(is_writing, timeout_s=30, pause_s=0.0002)
    return injections.kill_driver(run)


def _sick(script: str, **arguments: Any) -> dict[str, Any]:
    return {
        "actors": {
            "engine": {"script": f"benchmarks.faults.scripts:{script}", "arguments": arguments}
        }
    }


QUICKSTART = (f"{ROOT}/configs/quickstart.yaml",)
ENDLESS = ("run.num_steps=100000", "run.checkpoint_every_steps=5", "run.watchdog_s=40")

CASES: dict[str, Case] = {
    "blackhole": Case(
        inject=_nothing, change=_sick("Dies", num_calls=60, folder="starts"), at_step=20
    ),
    "badstart": Case(
        inject=injections.FAULTS["kill rollout actor"],
        change=_sick("BadStart", folder="starts", bad=[2]),
    ),
    "killstart": Case(inject=injections.kill_replacement),
    "replay": Case(inject=injections.FAULTS["kill replay actor"]),
    "learner": Case(inject=injections.FAULTS["kill learner rank"]),
    "learner_early": Case(
        inject=_start_learner_late, change={"run": {"checkpoint_every_steps": 5000}}
    ),
    "reward": Case(inject=injections.FAULTS["kill reward actor"]),
    "two_ranks": Case(
        inject=injections.FAULTS["kill learner rank"], change={"learner": {"num_ranks": 2}}
    ),
    "stop_learner": Case(inject=injections.FAULTS["stop learner rank"]),
    "stop_replay": Case(inject=injections.FAULTS["stop replay actor"]),
    "stop_rollout": Case(inject=injections.FAULTS["stop rollout actor"]),
    "fullhang": Case(
        inject=_nothing,
        change={"replay": {"group_time_limit_s": 5}} | _sick("Hangs", share=0.1),
        at_step=20,
    ),
    "publisher_single": Case(
        inject=injections.FAULTS["kill rollout actor"], change={"actors": {"num_actors": 1}}
    ),
    "push_kill": Case(inject=_in_push),
    "driver": Case(inject=injections.FAULTS["kill driver"]),
    "node": Case(inject=injections.kill_node),
    "term_startup": Case(
        inject=_in_start(signal.SIGTERM), goes_on=False, codes=(INTERRUPTED,), at_step=0
    ),
    "int_startup": Case(
        inject=_in_start(signal.SIGINT), goes_on=False, codes=(INTERRUPTED,), at_step=0
    ),
    "term_step": Case(inject=_signals(signal.SIGTERM), goes_on=False),
    "int_step": Case(inject=_signals(signal.SIGINT), goes_on=False, codes=(INTERRUPTED,)),
    "term_twice": Case(inject=_signals(signal.SIGTERM, signal.SIGTERM), goes_on=False),
    "disk_full": Case(inject=injections.FAULTS["fill disk"], disk="64m"),
    "disk_read_only": Case(inject=_read_only, disk="64m", goes_on=False, codes=(FAILED,)),
    "disk_removed": Case(inject=_remove, goes_on=False, codes=(FAILED,)),
    "core": Case(
        inject=injections.FAULTS["kill engine core"],
        files=QUICKSTART,
        overrides=(*ENDLESS, "model.warm_start=null", "evaluation.num_prompts=16"),
    ),
    "stop_core": Case(
        inject=injections.FAULTS["stop engine core"],
        files=QUICKSTART,
        overrides=(*ENDLESS, "model.warm_start=null", "weights.deadline_s=25"),
    ),
}


@contextmanager
def prepared(case: Case, model: Path) -> Iterator[FaultRun]:
    """Yield the run of a case, with a disk of its own where it needs one."""
    with ExitStack() as stack:
        change = {"model": make_model(model), **case.change}
        run = FaultRun(config=change, files=case.files, overrides=case.overrides)
        if case.disk:
            run.dir = run.folder / "disk" / "run"
            stack.enter_context(injections.small_disk(run.dir.parent, size=case.disk))
        stack.callback(lambda: shutil.rmtree(run.folder, ignore_errors=True))
        stack.enter_context(run)
        yield run


def play(name: str, case: Case, *, model: Path, seed: int) -> Outcome:
    """Run a case to its end."""
    try:
        with prepared(case, model) as run:
            return _play(name, case, run.start(), random.Random(f"{name}/{seed}"))
    except (Skipped, LookupError) as error:
        return Outcome(case=name, skipped=str(error))


def _play(name: str, case: Case, run: FaultRun, generator: random.Random) -> Outcome:
    if not run.wait_step(case.at_step, timeout_s=START_S):
        began_s, recovered_s = time.monotonic(), None
    else:
        run.observe()
        before, began_s = state_of(run), time.monotonic()
        victims = case.inject(run, generator)
        recovered_s = None
        if not case.goes_on:
            began_s = time.monotonic()
        if case.goes_on:
            recovered_s = wait_recovered(run, before, victims, timeout_s=RECOVER_S)
            if recovered_s is not None and not run.wait_step(run.step + STEPS_AFTER):
                recovered_s = None
            began_s = time.monotonic()
    code = run.end(timeout_s=END_S) if case.goes_on else run.wait(timeout_s=END_S)
    end_s = time.monotonic() - began_s
    left, balance = run.leftovers(), run.balance()
    return Outcome(
        case=name,
        recovered_s=recovered_s,
        code=code,
        end_s=end_s,
        step=balance.num_steps,
        lost=balance.lost,
        twice=balance.samples_trained_twice,
        left=tuple(left.names),
        warnings=tuple(
            line for line in run.output.splitlines() if " step " not in line[:22] and line.strip()
        )[-30:],
    )


def is_as_expected(outcome: Outcome, case: Case) -> bool:
    if outcome.skipped:
        return True
    went = (outcome.recovered_s is not None) == case.goes_on
    is_clean = not outcome.left and outcome.lost == outcome.twice == 0
    return went and is_clean and outcome.code in case.codes


def main(arguments: list[str] | None = None, say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to which JSON lines are appended")
    options = parser.parse_args(arguments)
    names = options.names or [name for name, case in CASES.items() if not case.files]
    failures = 0
    say(HEAD)
    with tempfile.TemporaryDirectory(prefix="faults-model-") as model:
        for name in names:
            case = CASES[name]
            outcome = play(name, case, model=Path(model) / "model", seed=options.seed)
            say(outcome.row)
            if not is_as_expected(outcome, case):
                failures += 1
                say("\n".join(f"    {line[:300]}" for line in outcome.warnings))
            if options.out is not None:
                with options.out.open("a") as file:
                    record = {key: getattr(outcome, key) for key in Outcome.__slots__}
                    file.write(json.dumps(record) + "\n")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
