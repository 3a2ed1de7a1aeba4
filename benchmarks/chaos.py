# ruff: noqa: T201
"""Random faults in one run for half an hour, and what it takes to recover from them.

    python benchmarks/chaos.py [--minutes 30] [--every-s 20] [--seed 0] [--engine vllm] [--out FOLDER]

`--engine vllm` runs configs/quickstart.yaml, `scripted` the same loop without a model to sample from.
The next fault is injected `--every-s` seconds after the one before, or once the run has recovered.
A shorter run without faults tells the usual reward. Writes chaos.json and chaos.md.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults import injections
from benchmarks.faults.injections import FAULTS, Skipped, state_of, wait_recovered
from benchmarks.faults.ledger import Balance
from benchmarks.faults.processes import Usage
from benchmarks.faults.run import ROOT, FaultRun, Leftovers, make_model

DISK = "1g"
OBSERVE_S = 5.0
RECOVER_S = 240.0
"""Maximum time to recover from a fault; beyond it the driver is ended and resumed."""
NUM_LAST = 20
"""Number of steps whose mean reward is compared."""
REFERENCE_STEPS = 60

QUICKSTART = (
    "run.num_steps=100000",
    "learner.num_ranks=2",
    "run.checkpoint_every_steps=5",
    "run.watchdog_s=45",
    "weights.deadline_s=30",
    "actors.start_timeout_s=120",
    "actors.max_restarts=1000",
    "run.max_learner_restarts=1000",
    "evaluation.num_prompts=16",
)
SCRIPTED = {
    "run": {"max_learner_restarts": 1000},
    "learner": {"num_ranks": 2},
    "actors": {"max_restarts": 1000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault, and the seconds after which the run went on as before."""

    fault: str
    at_s: float
    step: int
    recovered_s: float | None = None
    was_resumed: bool = False
    """Whether its driver had ended, so that it was resumed by hand."""
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run under faults did."""

    engine: str
    seed: int
    minutes: float
    num_steps: int
    code: int | None
    injected: Sequence[Injected]
    balance: Balance
    left: Leftovers
    reward: float
    usual_reward: float | None
    usage: dict[str, dict[str, float]]

    def json(self) -> str:
        record = asdict(self) | {"lost": self.balance.lost, "kinds": self.kinds()}
        return json.dumps(record, indent=1)

    def kinds(self) -> dict[str, dict[str, Any]]:
        """Return the number of faults, recoveries and seconds by kind."""
        kinds: dict[str, dict[str, Any]] = {}
        for name in sorted({fault.fault for fault in self.injected}):
            faults = [f for f in self.injected if f.fault == name and not f.skipped]
            seconds = [f.recovered_s for f in faults if f.recovered_s is not None]
            kinds[name] = {
                "faults": len(faults),
                "recovered": len(seconds),
                "resumed": sum(f.was_resumed for f in faults),
                "median_s": round(statistics.median(seconds), 1) if seconds else None,
                "max_s": round(max(seconds), 1) if seconds else None,
            }
        return kinds

    def markdown(self) -> str:
        usual = "" if self.usual_reward is None else f", {self.usual_reward:.3f} without faults"
        lines = [
            "| fault | injected | recovered | of them resumed by hand | median s | longest s |",
            "|---|---|---|---|---|---|",
            *(
                f"| {name} | {k['faults']} | {k['recovered']} | {k['resumed']}"
                f" | {k['median_s']} | {k['max_s']} |"
                for name, k in self.kinds().items()
            ),
            "",
            "| | |",
            "|---|---|",
            f"| engine, seed, minutes | {self.engine}, {self.seed}, {self.minutes:.0f} |",
            f"| steps, exit code | {self.num_steps}, {self.code} |",
            f"| groups | {self.balance.admitted} admitted, {self.balance.trained} trained,"
            f" {self.balance.dropped} dropped, {self.balance.open} open, {self.balance.lost} lost,"
            f" {self.balance.samples_trained_twice} samples trained twice |",
            f"| mean reward of the last {NUM_LAST} steps | {self.reward:.3f}{usual} |",
            f"| left behind | {', '.join(self.left.names) or 'nothing'} |",
            "",
            "| role | processes | MiB in the first third | last third | descriptors first | last |",
            "|---|---|---|---|---|---|",
            *(
                f"| {role} | {u['processes']:.0f} | {u['first_mib']:.0f} | {u['last_mib']:.0f}"
                f" | {u['first_descriptors']:.0f} | {u['last_descriptors']:.0f} |"
                for role, u in self.usage.items()
            ),
        ]
        return "\n".join(lines) + "\n"


def summarize(usage: Sequence[Usage]) -> dict[str, dict[str, float]]:
    """Return mean memory and descriptors of a role's processes, in the first and last third of the time."""
    by_role: dict[str, list[Usage]] = defaultdict(list)
    for sample in usage:
        by_role[sample.role].append(sample)
    found: dict[str, dict[str, float]] = {}
    for role, samples in sorted(by_role.items()):
        start_s, end_s = samples[0].time_s, samples[-1].time_s
        third = (end_s - start_s) / 3
        first = [s for s in samples if s.time_s <= start_s + third]
        last = [s for s in samples if s.time_s >= end_s - third]
        found[role] = {
            "processes": len({s.pid for s in samples}),
            "first_mib": statistics.fmean(s.rss_bytes for s in first) / 2**20,
            "last_mib": statistics.fmean(s.rss_bytes for s in last) / 2**20,
            "first_descriptors": statistics.fmean(s.num_descriptors for s in first),
            "last_descriptors": statistics.fmean(s.num_descriptors for s in last),
        }
    return found


class Chaos:
    """Injects faults into a run until the time is over."""

    def __init__(
        self,
        run: FaultRun,
        *,
        seed: int,
        every_s: float,
        faults: Sequence[str],
        say: Callable[[str], object] = print,
    ) -> None:
        self._run = run
        self._generator = random.Random(seed)
        self._every_s = every_s
        self._faults = list(faults)
        self._say = say
        self._began_s = time.monotonic()
        self._usual = state_of(run).counts
        """Processes by role of the undisturbed run; later there may be more, which are ending."""
        self.injected: list[Injected] = []

    def play(self, *, duration_s: float | None) -> None:
        """Inject until `duration_s` is over, or each fault once. All are drawn before one is drawn again."""
        deck = self._generator.sample(self._faults, len(self._faults))
        while deck if duration_s is None else time.monotonic() - self._began_s < duration_s:
            if not deck:
                deck = self._generator.sample(self._faults, len(self._faults))
            next_s = time.monotonic() + self._every_s
            injected = self._inject(deck.pop())
            self.injected.append(injected)
            self._say(f"{injected.at_s:6.0f} s, step {injected.step}: {_describe(injected)}")
            self._run.observe()
            while not injected.skipped and time.monotonic() < next_s:
                self._run.observe()
                time.sleep(min(OBSERVE_S, max(0.0, next_s - time.monotonic())))

    def _inject(self, name: str) -> Injected:
        run = self._run
        before = state_of(run)
        before = replace(before, counts=before.counts & self._usual)
        fault = Injected(fault=name, at_s=before.began_s - self._began_s, step=before.step)
        try:
            victims = FAULTS[name](run, self._generator)
        except (Skipped, LookupError) as error:
            return _changed(fault, skipped=str(error))
        recovered_s = wait_recovered(run, before, victims, timeout_s=RECOVER_S)
        if recovered_s is not None:
            return _changed(fault, recovered_s=recovered_s)
        self._say(f"the driver {'hangs' if run.is_running else 'ended'} after: {name}")
        self._say("\n".join(f"    {line[:300]}" for line in run.output.splitlines()[-8:]))
        run.kill()
        run.resume()
        seconds = wait_recovered(run, before, victims, timeout_s=2 * RECOVER_S)
        return _changed(fault, recovered_s=seconds, was_resumed=True)


def _changed(fault: Injected, **changes: Any) -> Injected:
    return Injected(**(asdict(fault) | changes))


def _describe(fault: Injected) -> str:
    if fault.skipped:
        return f"{fault.fault}, skipped: {fault.skipped}"
    seconds = "not recovered" if fault.recovered_s is None else f"{fault.recovered_s:.1f} s"
    return f"{fault.fault}, {seconds}{', resumed by hand' if fault.was_resumed else ''}"


def make_run(engine: str, model: Path) -> FaultRun:
    """Return a run that is not started; both engines go on from a model that is made once."""
    if engine == "scripted":
        return FaultRun(config={"model": make_model(model), **SCRIPTED})
    kept = [f"model={{kind: pretrained, path: {model}}}"] if model.exists() else []
    return FaultRun(files=[f"{ROOT}/configs/quickstart.yaml"], overrides=[*QUICKSTART, *kept])


def measure_usual_reward(engine: str, model: Path) -> float:
    """Run without faults, keep the model that it made and return its last rewards' mean."""
    with make_run(engine, model) as run:
        run.overrides = [*run.overrides, f"run.num_steps={REFERENCE_STEPS}"]
        if run.start().wait(timeout_s=900) != 0:
            raise SystemExit(f"the run without faults failed:\n{run.output[-3000:]}")
        if not model.exists():
            shutil.copytree(run.dir / "model", model)
        reward = statistics.fmean(run.rewards[-NUM_LAST:])
    shutil.rmtree(run.folder, ignore_errors=True)
    return reward


def torment(
    run: FaultRun,
    *,
    engine: str,
    minutes: float | None = None,
    every_s: float,
    seed: int,
    faults: Sequence[str],
    usual_reward: float | None = None,
    is_brief: bool = False,
    say: Callable[[str], object] = print,
) -> Report:
    """Start the run, inject faults, stop it, and look at what it did and left.

    Without `minutes`, every fault is injected once.
    """
    with run:
        run.start()
        if not run.wait_step(3, timeout_s=600):
            raise SystemExit(f"the run did not start:\n{run.output[-3000:]}")
        run.observe()
        began_s = time.monotonic()
        chaos = Chaos(run, seed=seed, every_s=every_s, faults=faults, say=say)
        chaos.play(duration_s=None if minutes is None else 60 * minutes)
        if minutes is not None:
            run.wait_step(run.step + NUM_LAST, timeout_s=RECOVER_S)
        rewards = run.rewards[-NUM_LAST:]
        code = run.end(timeout_s=120)
        return Report(
            engine=engine,
            seed=seed,
            minutes=(time.monotonic() - began_s) / 60,
            num_steps=run.step,
            code=code,
            injected=chaos.injected,
            left=run.leftovers(is_brief=is_brief),
            balance=run.balance(),
            reward=statistics.fmean(rewards),
            usual_reward=usual_reward,
            usage=summarize(run.usage),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["scripted", "vllm"], default="vllm")
    parser.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # A scripted engine has no core.
    faults = [f for f in options.faults if options.engine == "vllm" or not f.endswith("core")]
    with tempfile.TemporaryDirectory(prefix="faults-model-") as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        usual = measure_usual_reward(options.engine, model)
        print(f"reward without faults {usual:.3f}", flush=True)
        run = make_run(options.engine, model)
        try:
            stack.enter_context(injections.small_disk(run.folder / "disk", size=DISK))
            run.dir = run.folder / "disk" / "run"
        except Skipped as error:
            print(f"no disk is filled: {error}", flush=True)
        report = torment(
            run,
            engine=options.engine,
            minutes=options.minutes,
            every_s=options.every_s,
            seed=options.seed,
            faults=faults,
            usual_reward=usual,
            say=lambda line: print(line, flush=True),
        )
        shutil.copy(run.folder / "output.txt", options.out / "output.txt")
    (options.out / "chaos.json").write_text(report.json() + "\n")
    (options.out / "chaos.md").write_text(report.markdown())
    print(report.markdown())


if __name__ == "__main__":
    main()
