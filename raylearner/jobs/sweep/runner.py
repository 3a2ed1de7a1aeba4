"""Runs the trials of a sweep as independent Ray jobs, as many at once as fit.

Consumes a plan; produces jobs, `sweep.json` and results. Polls the Jobs API for the status of jobs, and
their run directories for metrics.
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
from raylearner.config.report import job_metadata
from raylearner.errors import ConfigError, RaylearnerError, RunStopped
from raylearner.jobs import client as jobs_client
from raylearner.jobs.sweep import figures, report
from raylearner.jobs.sweep import plan as plans
from raylearner.jobs.sweep.board import Board
from raylearner.jobs.sweep.early_stopping import Asha
from raylearner.jobs.sweep.plan import Plan, Trial, arguments, read
from raylearner.jobs.sweep.state import Status, SweepState, TrialState, check_folder, read_progress
from raylearner.jobs.sweep.trial_jobs import ENDED, LOST, TrialJobs, runtime_env
from raylearner.observability import run_directory
from raylearner.run import cluster

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Polling interval."""
MAX_ATTEMPTS = 2
"""Maximum attempts at a trial in one call of the sweep."""
WAIT_LOG_S = 120.0
"""Interval between warnings that no trial can run."""
CAUSES = {"STOPPED": "its job was stopped", LOST: "the cluster has no record of its job"}
"""Causes of failure that a job's log does not contain."""


def run(path: str, *, variables: Sequence[str] = ()) -> None:
    """Run the sweep of a file, or resume it. Raises `RaylearnerError` if trials failed.

    `variables` are names of environment variables to pass to the trials' jobs.
    """
    plan = read(path)
    with job_variables.packed(variables, os.environ) as package:
        _run(plan, package)


def _run(plan: Plan, variables: Path | None) -> None:
    figures.check_matplotlib()
    early, steps = plan.sweep.early_stopping, [t.config.run.num_steps for t in plan.trials]
    asha = early and Asha(early, plan.sweep.metric, max_steps=min(steps))
    section = plan.trials[0].config.cluster.model_copy(update={"dashboard": True})
    dashboard = cluster.connect(section)
    try:
        client = jobs_client.connect(f"http://{dashboard}")
        trial_jobs = TrialJobs(client, runtime_env(client, variables=variables))
        supply = cluster.supply([t.config for t in plan.trials])
        sizes = {t.number: cluster.run_size(t.config, supply, min_cpus=t.cpus) for t in plan.trials}
        for trial in plan.trials:
            cluster.check_fits(sizes[trial.number], name=f"trial {trial.number:03d}")
        folder = plans.folder(plan.sweep.name).absolute()
        check_folder(folder)
        with run_directory.lock(folder, is_new=False):
            state = SweepState(folder, plan)
            Sweep(plan, state, trial_jobs, sizes=sizes, asha=asha).run()
    finally:
        cluster.disconnect()


class Sweep:
    """Owns the jobs of a sweep: starts those that fit, follows, stops and retries them, reports."""

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
        self._damaged: set[int] = set()
        self._waits_since_s: float | None = None

    def run(self) -> None:
        """Run until every trial has ended, or a signal stops running trials with a checkpoint."""
        signal.signal(signal.SIGTERM, _raise_stopped)
        try:
            if self._state.is_resumed:
                self._resume()
            with self._board:
                while not all(state.status.is_final for state in self._state.trials):
                    self._poll()
                    self._start_fitting()
                    time.sleep(POLL_S)
        except BaseException as error:
            self._leave(should_stop=isinstance(error, KeyboardInterrupt | RunStopped))
            raise
        self._state.save()
        report.write(self._state.folder)
        self._report()

    def _leave(self, *, should_stop: bool) -> None:
        """Save the results so far; errors while doing so are logged beside the one that ends the sweep."""
        try:
            if should_stop:
                self._stop_running()
            elif self._running():
                logger.info("running trials continue; the same command resumes the sweep")
            self._state.save()
            report.write(self._state.folder)
        except Exception:
            logger.exception("the results so far could not be written")

    def _report(self) -> None:
        logger.info("results are in %s", self._state.folder / "results.md")
        failed = [state for state in self._state.trials if state.status is Status.FAILED]
        if failed:
            raise RaylearnerError(
                f"{len(failed)} of {len(self._state.trials)} trials failed, the others completed:\n"
                + "\n".join(f"  {state.number:03d}: {state.error}" for state in failed)
                + "\nonce the cause is fixed, the same command retries them"
            )

    # -- running trials -----------------------------------------------------------------------

    def _poll(self) -> None:
        for state in self._running():
            status = self._status(
                state
            )  # before the metrics, which are then complete if the job has ended
            curve = self._read(state)
            if self._asha and self._asha.should_stop(state.number, curve) and status not in ENDED:
                logger.info("trial %03d is stopped early at step %d", state.number, state.step)
                state.is_stopped_early = True
                self._state.save()
            if status in ENDED:
                self._end(state, status)
            elif state.is_stopped_early:
                self._jobs.stop(_job(state))

    def _status(self, state: TrialState) -> str | None:
        return self._jobs.status(_job(state))

    def _read(self, state: TrialState) -> list[tuple[int, float]]:
        """Update the trial's progress and return its curve."""
        progress = read_progress(self._state.run_dir(state.number), self._plan.sweep.metric)
        if progress.num_damaged and state.number not in self._damaged:
            self._damaged.add(state.number)
            logger.warning(
                "trial %03d: %d damaged lines of its metrics are ignored",
                *(state.number, progress.num_damaged),
            )
        state.step = progress.num_steps
        state.value = progress.curve[-1][1] if progress.curve else None
        state.failed_fraction = progress.failed_fraction
        return progress.curve

    def _end(self, state: TrialState, status: str) -> None:
        if status == "SUCCEEDED":
            self._finish(state, Status.DONE)
        elif state.is_stopped_early:
            self._finish(state, Status.STOPPED_EARLY)
        else:
            state.error = CAUSES.get(status) or self._jobs.read_last_line(_job(state))
            if state.num_attempts >= MAX_ATTEMPTS:
                self._finish(state, Status.FAILED)
                return
            logger.warning("trial %03d is retried: %s", state.number, state.error)
            state.status = Status.WAITING
            self._state.save()

    def _finish(self, state: TrialState, status: Status) -> None:
        state.status, state.finished_at_s = status, time.time()
        if status is Status.DONE:
            state.error = None
        self._state.save()
        self._board.log_change(state)

    # -- starting trials ----------------------------------------------------------------------

    def _running(self) -> list[TrialState]:
        return [state for state in self._state.trials if state.status is Status.RUNNING]

    def _start_fitting(self) -> None:
        supply = ray.cluster_resources()
        for state in self._state.trials:
            running = self._running()
            limit = self._plan.sweep.max_concurrent
            if limit is not None and len(running) >= limit:
                return
            if state.status is not Status.WAITING:
                continue
            taken = [self._sizes[other.number] for other in running]
            mine = self._sizes[state.number]
            cpus = sum(size.cpus for size in taken) + mine.cpus
            gpus = sum(size.gpus for size in taken) + mine.gpus
            if cpus > supply.get("CPU", 0.0) or gpus > supply.get("GPU", 0.0):
                self._warn_of_supply(state, supply)
                return
            self._start(state)

    def _warn_of_supply(self, state: TrialState, supply: Mapping[str, float]) -> None:
        """Warn at intervals which resources a trial lacks; while others run, it waits for their end."""
        now_s = time.monotonic()
        if self._waits_since_s is None or self._running():
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= WAIT_LOG_S:
            self._waits_since_s = now_s
            size = self._sizes[state.number]
            logger.warning(
                "trial %03d waits for nodes: it needs %g CPUs and %g GPUs, the cluster has %g and %g",
                *(state.number, size.cpus, size.gpus),
                *(supply.get("CPU", 0.0), supply.get("GPU", 0.0)),
            )

    def _start(self, state: TrialState) -> None:
        """Record the job before starting it, so that no job runs unfollowed."""
        trial = self._plan.trials[state.number]
        about = job_metadata(trial.config) | {
            "sweep": self._plan.sweep.name,
            "trial": f"{trial.number:03d}",
        }
        trial_arguments = self._arguments(trial)
        state.submission_id = f"{self._plan.sweep.name}-{trial.number:03d}-{int(time.time())}"
        state.status, state.error, state.is_stopped_early = Status.RUNNING, None, False
        self._state.save()
        try:
            is_started = self._jobs.start(state.submission_id, trial_arguments, about)
        except ConfigError:
            state.status = Status.WAITING
            raise
        state.num_attempts += is_started
        state.started_at_s = state.started_at_s or time.time()
        self._waits_since_s = None
        self._state.save()
        self._board.log_change(state)

    def _arguments(self, trial: Trial) -> list[str]:
        """Return arguments that resume an earlier attempt from its checkpoint, or start anew."""
        run_dir = self._state.run_dir(trial.number)
        if (run_dir / "config.yaml").is_file():
            return ["train", "--resume", str(run_dir), run_directory.RESTART_OPTION]
        if run_dir.exists():
            run_directory.rename_aside(run_dir)
        return [*arguments(self._plan, trial), f"run.dir={run_dir}"]

    # -- interruptions -----------------------------------------------------------------------

    def _resume(self) -> None:
        """Follow running jobs again, and queue trials whose job was stopped, lost or failed."""
        for state in self._running():
            if self._status(state) in ("STOPPED", LOST):
                self._interrupt(state)
        failed = [state for state in self._state.trials if state.status is Status.FAILED]
        for state in failed:
            state.status, state.num_attempts = Status.WAITING, 0
            state.started_at_s = state.finished_at_s = None
        if self._asha:  # the state that the earlier process saved
            for state in self._state.trials:
                run_dir = self._state.run_dir(state.number)
                progress = read_progress(run_dir, self._plan.sweep.metric)
                self._asha.should_stop(state.number, progress.curve)
        counts = [state.status for state in self._state.trials]
        logger.info(
            "resuming %s: %s",
            self._state.folder,
            ", ".join(f"{counts.count(status)} {status}" for status in Status if status in counts),
        )
        if failed:
            logger.info(
                "failed trials are retried: %s",
                ", ".join(f"{state.number:03d}" for state in failed),
            )

    def _interrupt(self, state: TrialState) -> None:
        """Queue a trial again; the interrupted attempt does not count."""
        if state.is_stopped_early:
            self._finish(state, Status.STOPPED_EARLY)
            return
        state.status = Status.WAITING
        state.num_attempts = max(state.num_attempts - 1, 0)

    def _stop_running(self) -> None:
        """Stop each running trial with a checkpoint; those that do not end in time continue."""
        running = self._running()
        deadline_s = time.monotonic() + jobs_client.STOP_WAIT_S
        while running and time.monotonic() < deadline_s:
            for state in running:
                self._jobs.stop(_job(state))
            time.sleep(POLL_S)
            for state in running:
                match self._status(state):
                    case "SUCCEEDED":
                        self._read(state)
                        self._finish(state, Status.DONE)
                    case "STOPPED" | "FAILED" | "LOST":
                        self._interrupt(state)
                    case _:
                        pass
            running = self._running()


def _job(state: TrialState) -> str:
    assert state.submission_id is not None, f"trial {state.number} has not run"
    return state.submission_id


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    # Schedulers and `timeout` signal the process and its group: once is enough.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise RunStopped("the sweep was stopped; the same command resumes it")
