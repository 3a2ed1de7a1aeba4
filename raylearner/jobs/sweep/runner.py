"""Runs the trials of a sweep as Ray jobs: as many at once as fit, each on its own.

Consumes a plan; produces jobs, `sweep.json` and results. Waits for jobs, whose statuses the Jobs API
only answers when asked, and for the metrics that they write.
"""

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import ray

from raylearner import job_variables
from raylearner.errors import ConfigError, RaylearnerError, RunStopped
from raylearner.jobs import jobs
from raylearner.jobs.sweep import progress, results
from raylearner.jobs.sweep.board import Board
from raylearner.jobs.sweep.early_stopping import Asha
from raylearner.jobs.sweep.plan import Plan, Trial, arguments, commands, read
from raylearner.jobs.sweep.state import Status, SweepState, TrialState, refuse_file
from raylearner.jobs.sweep.trial_jobs import ENDED, LOST, TrialJobs, environment
from raylearner.observability import run_directory
from raylearner.run import cluster

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Pause between two looks at all jobs."""
MAX_ATTEMPTS = 2
"""A trial that failed is tried once more; a new call of the sweep begins to count again."""
WAIT_LOG_S = 120.0
"""Between two reports of what a sweep waits for while none of its trials runs."""
CAUSES = {"STOPPED": "its job was stopped", LOST: "the cluster does not know its job"}
"""Ends of a job that its log does not tell."""


def run(path: str, *, variables: Sequence[str] = ()) -> None:
    """Runs, or goes on with, the sweep of a file. Raises `RaylearnerError` where trials failed.

    `variables` names those of this environment that the trials' jobs are given.
    """
    plan = read(path)
    with job_variables.packed(variables, os.environ) as package:
        _run(plan, package)


def _run(plan: Plan, variables: Path | None) -> None:
    results.refuse_without_matplotlib()
    early, steps = plan.sweep.early_stopping, [t.config.run.num_steps for t in plan.trials]
    asha = early and Asha(early, plan.sweep.metric, max_steps=min(steps))
    section = plan.trials[0].config.cluster.model_copy(update={"dashboard": True})
    dashboard = cluster.connect(section)
    try:
        client = jobs.connect(f"http://{dashboard}")
        trial_jobs = TrialJobs(client, environment(client, variables=variables))
        gpus = ray.cluster_resources().get("GPU", 0.0)
        sizes = {
            t.number: cluster.run_size(t.config, least_cpus=t.cpus, num_gpus=gpus)
            for t in plan.trials
        }
        for trial in plan.trials:
            cluster.check_fits(sizes[trial.number], what=f"trial {trial.number:03d}")
        folder = run_directory.durable(Path("runs/sweeps", plan.sweep.name)).absolute()
        refuse_file(folder)
        with run_directory.claimed(folder, is_new=False):
            state = SweepState(folder, plan)
            Sweep(plan, state, trial_jobs, sizes=sizes, asha=asha).run()
    finally:
        cluster.disconnect()


class Sweep:
    """Owns the jobs of a sweep: starts what fits, follows, gives up, tries again, reports."""

    def __init__(
        self,
        plan: Plan,
        state: SweepState,
        trial_jobs: TrialJobs,
        *,
        sizes: Mapping[int, cluster.RunSize],
        asha: Asha | None,
    ) -> None:
        self._plan = plan
        self._state = state
        self._jobs = trial_jobs
        self._sizes = sizes
        self._asha = asha
        self._board = Board(plan, state)
        self._commands = commands(plan)
        self._damaged: set[int] = set()
        self._waits_since_s: float | None = None

    def run(self) -> None:
        """To the end of every trial, or to a signal: then running trials stop with a checkpoint."""
        signal.signal(signal.SIGTERM, _raise_stopped)
        try:
            if self._state.is_taken_up:
                self._take_up()
            with self._board:
                while not all(found.status.is_final for found in self._state.trials):
                    self._look()
                    self._start_what_fits()
                    time.sleep(POLL_S)
        except BaseException as error:
            self._leave(should_stop=isinstance(error, KeyboardInterrupt | RunStopped))
            raise
        self._state.save()
        results.write(self._plan, self._state, self._commands)
        self._report()

    def _leave(self, *, should_stop: bool) -> None:
        """Keeps what there is; what fails in doing so is told beside the error that ends the sweep."""
        try:
            if should_stop:
                self._stop_running()
            elif self._running():
                logger.info("trials that run go on; the same command follows them")
            self._state.save()
            results.write(self._plan, self._state, self._commands)
        except Exception:
            logger.exception("the results so far could not be written")

    def _report(self) -> None:
        logger.info("results are in %s", self._state.folder / "results.md")
        failed = [found for found in self._state.trials if found.status is Status.FAILED]
        if failed:
            raise RaylearnerError(
                f"{len(failed)} of {len(self._state.trials)} trials failed, the others are done:\n"
                + "\n".join(f"  {found.number:03d}: {found.error}" for found in failed)
                + "\nonce the cause is mended, the same command tries them again"
            )

    # -- what runs ---------------------------------------------------------------------------

    def _look(self) -> None:
        for found in self._running():
            status = self._status(found)  # first: what an ended job wrote is all there
            curve = self._read(found)
            if self._asha and self._asha.should_stop(found.number, curve) and status not in ENDED:
                logger.info("trial %03d falls behind at step %d", found.number, found.step)
                found.is_given_up = True
                self._state.save()
            if status in ENDED:
                self._end(found, status)
            elif found.is_given_up:
                self._jobs.stop(_job(found))

    def _status(self, found: TrialState) -> str | None:
        return self._jobs.status(_job(found))

    def _read(self, found: TrialState) -> list[tuple[int, float]]:
        """Takes over how far a trial is; returns its curve."""
        made = progress.read(self._state.run_dir(found.number), self._plan.sweep.metric)
        if made.num_damaged and found.number not in self._damaged:
            self._damaged.add(found.number)
            logger.warning(
                "trial %03d: %d lines of its metrics are damaged and do not count",
                *(found.number, made.num_damaged),
            )
        found.step = made.num_steps
        found.value = made.curve[-1][1] if made.curve else None
        found.failed_fraction = made.failed_fraction
        return made.curve

    def _end(self, found: TrialState, status: str) -> None:
        if status == "SUCCEEDED":
            self._finish(found, Status.DONE)
        elif found.is_given_up:
            self._finish(found, Status.STOPPED_EARLY)
        else:
            found.error = CAUSES.get(status) or self._jobs.last_line(_job(found))
            if found.num_attempts >= MAX_ATTEMPTS:
                self._finish(found, Status.FAILED)
                return
            logger.warning("trial %03d is tried again: %s", found.number, found.error)
            found.status = Status.WAITING
            self._state.save()

    def _finish(self, found: TrialState, status: Status) -> None:
        found.status, found.finished_at_s = status, time.time()
        if status is Status.DONE:
            found.error = None
        self._state.save()
        self._board.tell(found)

    # -- what comes next ---------------------------------------------------------------------

    def _running(self) -> list[TrialState]:
        return [found for found in self._state.trials if found.status is Status.RUNNING]

    def _start_what_fits(self) -> None:
        supply = ray.cluster_resources()
        for found in self._state.trials:
            running = self._running()
            limit = self._plan.sweep.max_concurrent
            if limit is not None and len(running) >= limit:
                return
            if found.status is not Status.WAITING:
                continue
            taken = [self._sizes[other.number] for other in running]
            mine = self._sizes[found.number]
            cpus = sum(size.cpus for size in taken) + mine.cpus
            gpus = sum(size.gpus for size in taken) + mine.gpus
            if cpus > supply.get("CPU", 0.0) or gpus > supply.get("GPU", 0.0):
                self._wait_for_supply(found, supply)
                return
            self._start(found)

    def _wait_for_supply(self, found: TrialState, supply: Mapping[str, float]) -> None:
        """Says now and then what a trial lacks; while others run, it waits for their end."""
        now_s = time.monotonic()
        if self._waits_since_s is None or self._running():
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= WAIT_LOG_S:
            self._waits_since_s = now_s
            size = self._sizes[found.number]
            logger.warning(
                "trial %03d waits for nodes to come back: it needs %g CPUs and %g GPUs, the cluster"
                " has %g and %g",
                *(found.number, size.cpus, size.gpus),
                *(supply.get("CPU", 0.0), supply.get("GPU", 0.0)),
            )

    def _start(self, found: TrialState) -> None:
        """On record before it is started, so that no job runs that nobody follows."""
        trial = self._plan.trials[found.number]
        about = jobs.metadata(trial.config) | {
            "sweep": self._plan.sweep.name,
            "trial": f"{trial.number:03d}",
        }
        trial_arguments = self._arguments(trial)
        found.submission_id = f"{self._plan.sweep.name}-{trial.number:03d}-{int(time.time())}"
        found.status, found.error, found.is_given_up = Status.RUNNING, None, False
        self._state.save()
        try:
            is_started = self._jobs.start(found.submission_id, trial_arguments, about)
        except ConfigError:
            found.status = Status.WAITING
            raise
        found.num_attempts += is_started
        found.started_at_s = found.started_at_s or time.time()
        self._waits_since_s = None
        self._state.save()
        self._board.tell(found)

    def _arguments(self, trial: Trial) -> list[str]:
        """From the start, or on from what an earlier attempt left behind, if it got to a checkpoint."""
        run_dir = self._state.run_dir(trial.number)
        if (run_dir / "config.yaml").is_file():
            return ["train", "--resume", str(run_dir), run_directory.RESTART_OPTION]
        if run_dir.exists():
            run_directory.set_aside(run_dir)
        return arguments(self._plan, trial, run_dir)

    # -- interruptions -----------------------------------------------------------------------

    def _take_up(self) -> None:
        """Running jobs are followed on, those stopped or lost wait again, failed trials begin again."""
        for found in self._running():
            if self._status(found) in ("STOPPED", LOST):
                self._interrupt(found)
        failed = [found for found in self._state.trials if found.status is Status.FAILED]
        for found in failed:
            found.status, found.num_attempts = Status.WAITING, 0
            found.started_at_s = found.finished_at_s = None
        if self._asha:  # which forgot, with the process that it was in
            for found in self._state.trials:
                run_dir = self._state.run_dir(found.number)
                made = progress.read(run_dir, self._plan.sweep.metric)
                self._asha.should_stop(found.number, made.curve)
        counts = [found.status for found in self._state.trials]
        logger.info(
            "going on with %s: %s",
            self._state.folder,
            ", ".join(f"{counts.count(status)} {status}" for status in Status if status in counts),
        )
        if failed:
            logger.info(
                "trials that failed are tried again: %s",
                ", ".join(f"{found.number:03d}" for found in failed),
            )

    def _interrupt(self, found: TrialState) -> None:
        """An attempt that was cut short does not count."""
        if found.is_given_up:
            self._finish(found, Status.STOPPED_EARLY)
            return
        found.status = Status.WAITING
        found.num_attempts = max(found.num_attempts - 1, 0)

    def _stop_running(self) -> None:
        """Each stops with a checkpoint and waits to be gone on with; what does not end, runs on."""
        running = self._running()
        deadline_s = time.monotonic() + jobs.STOP_WAIT_S
        while running and time.monotonic() < deadline_s:
            for found in running:
                self._jobs.stop(_job(found))
            time.sleep(POLL_S)
            for found in running:
                match self._status(found):
                    case "SUCCEEDED":
                        self._read(found)
                        self._finish(found, Status.DONE)
                    case "STOPPED" | "FAILED" | "LOST":
                        self._interrupt(found)
                    case _:
                        pass
            running = self._running()


def _job(found: TrialState) -> str:
    assert found.submission_id is not None, f"trial {found.number} never ran"
    return found.submission_id


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise RunStopped("the sweep was stopped; the same command goes on with it")
