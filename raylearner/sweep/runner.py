"""Runs the trials of a sweep as Ray jobs: as many at once as fit, each on its own.

Consumes a plan; produces jobs, `sweep.json` and results. Waits for jobs, whose statuses the Jobs API
only answers when asked, and for the metrics that they write.
"""

import json
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import ray

from raylearner import jobs, placement
from raylearner.errors import ConfigError, RaylearnerError, RunStopped
from raylearner.observability import run_directory
from raylearner.sweep import progress, results
from raylearner.sweep.board import Board
from raylearner.sweep.early_stopping import Asha
from raylearner.sweep.plan import Plan, Trial, arguments, commands, read
from raylearner.sweep.state import Status, SweepState, TrialState, refuse_file

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Pause between two looks at all jobs."""
MAX_ATTEMPTS = 2
"""A trial that failed is tried once more."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
"""Statuses that a job keeps."""


def run(path: str) -> None:
    """Runs, or goes on with, the sweep of a file. Raises `RaylearnerError` where trials failed."""
    plan = read(path)
    cluster = plan.trials[0].config.cluster.model_copy(update={"dashboard": True})
    dashboard = placement.connect(cluster)
    try:
        client = jobs.connect(f"http://{dashboard}")
        package = _package(client)
        gpus = ray.cluster_resources().get("GPU", 0.0)
        sizes = {
            t.number: placement.size(t.config, least_cpus=t.cpus, num_gpus=gpus)
            for t in plan.trials
        }
        for trial in plan.trials:
            placement.refuse_too_large(sizes[trial.number], what=f"trial {trial.number:03d}")
        folder = run_directory.durable(Path("runs/sweeps", plan.sweep.name)).absolute()
        refuse_file(folder)
        with run_directory.claimed(folder, is_new=False):
            state = SweepState(folder, plan)
            Sweep(plan, state, client, package=package, sizes=sizes).run()
    finally:
        ray.shutdown()


def _package(client: Any) -> str:
    """The working directory of the trials: this one, or the package of the job that we are."""
    told = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    if told:
        package = json.loads(told).get("runtime_env", {}).get("working_dir")
        if package:
            return str(package)
    if not jobs.is_local(client):
        raise ConfigError(
            "a sweep reads what its trials write: start it on the cluster's head node, or as a job"
            " by `bash launch/submit.sh --sweep FILE`"
        )
    return str(Path.cwd())


class Sweep:
    """Owns the jobs of a sweep: starts what fits, follows, gives up, tries again, reports."""

    def __init__(
        self,
        plan: Plan,
        state: SweepState,
        client: Any,
        *,
        package: str,
        sizes: Mapping[int, placement.Size],
    ) -> None:
        self._plan = plan
        self._state = state
        self._client = client
        self._package = package
        self._sizes = sizes
        self._board = Board(plan, state)
        self._commands = commands(plan)
        early, steps = plan.sweep.early_stopping, [t.config.run.num_steps for t in plan.trials]
        self._asha = early and Asha(early, plan.sweep.metric, max_steps=min(steps))

    def run(self) -> None:
        """To the end of every trial, or to a signal: then running trials stop with a checkpoint."""
        signal.signal(signal.SIGTERM, _raise_stopped)
        if self._state.is_taken_up:
            self._take_up()
        try:
            with self._board:
                while not all(found.status.is_final for found in self._state.trials):
                    self._look()
                    self._start_what_fits()
                    time.sleep(POLL_S)
        except (KeyboardInterrupt, RunStopped):
            self._stop_running()
            raise
        finally:
            self._state.save()
            results.write(self._plan, self._state, self._commands)
        self._report()

    def _report(self) -> None:
        logger.info("results are in %s", self._state.folder / "results.md")
        failed = [found for found in self._state.trials if found.status is Status.FAILED]
        if failed:
            raise RaylearnerError(
                f"{len(failed)} of {len(self._state.trials)} trials failed, the others are done:\n"
                + "\n".join(f"  {found.number:03d}: {found.error}" for found in failed)
            )

    # -- what runs ---------------------------------------------------------------------------

    def _look(self) -> None:
        for found in self._running():
            run_dir = self._state.run_dir(found.number)
            curve = progress.curve(run_dir, self._plan.sweep.metric)
            found.step = progress.num_steps(run_dir)
            found.value = curve[-1][1] if curve else None
            status = self._status(found)
            if status in ENDED:
                self._end(found, status)
            elif self._asha and self._asha.should_stop(found.number, curve):
                self._client.stop_job(found.submission_id)
                self._finish(found, Status.STOPPED_EARLY)

    def _status(self, found: TrialState) -> str:
        """What the cluster says; a job that it does not know was lost with its cluster."""
        try:
            return str(self._client.get_job_status(found.submission_id).value)
        except RuntimeError:
            return "STOPPED"

    def _end(self, found: TrialState, status: str) -> None:
        if status == "SUCCEEDED":
            self._finish(found, Status.DONE)
            return
        found.error = self._cause(found) if status == "FAILED" else "its job was stopped"
        if found.num_attempts < MAX_ATTEMPTS:
            logger.warning("trial %03d is tried again: %s", found.number, found.error)
            found.status = Status.WAITING
            self._state.save()
        else:
            self._finish(found, Status.FAILED)

    def _cause(self, found: TrialState) -> str:
        """The last line of its log, where our command line says what ended it."""
        try:
            lines = self._client.get_job_logs(found.submission_id).strip().splitlines()
        except RuntimeError as error:
            return f"no logs: {error}"
        return lines[-1].removeprefix("the run failed: ") if lines else "no output"

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
                return
            self._start(found)

    def _start(self, found: TrialState) -> None:
        trial = self._plan.trials[found.number]
        found.num_attempts += 1
        environment = jobs.runtime_env(self._package)
        about = jobs.metadata(trial.config) | {
            "sweep": self._plan.sweep.name,
            "trial": f"{trial.number:03d}",
        }
        suffix = f"{trial.number:03d}-{int(time.time())}"
        found.submission_id = jobs.submit(
            self._client,
            self._arguments(trial),
            environment=environment,
            about=about,
            submission_id=f"{self._plan.sweep.name}-{suffix}",
        )
        found.status, found.error = Status.RUNNING, None
        found.started_at_s = found.started_at_s or time.time()
        self._state.save()
        self._board.tell(found)

    def _arguments(self, trial: Trial) -> list[str]:
        """From the start, or on from what an earlier attempt left behind, if it got to a checkpoint."""
        run_dir = self._state.run_dir(trial.number)
        if (run_dir / "config.yaml").is_file():
            return ["train", "--resume", str(run_dir), run_directory.OR_START_OVER]
        if run_dir.exists():
            run_directory.set_aside(run_dir)
        return arguments(self._plan, trial, run_dir)

    # -- interruptions -----------------------------------------------------------------------

    def _take_up(self) -> None:
        """Jobs that still run are followed on; those lost with their cluster wait again."""
        for found in self._running():
            if self._status(found) == "STOPPED":
                found.status = Status.WAITING
                found.num_attempts -= 1
        counts = [found.status for found in self._state.trials]
        logger.info(
            "going on with %s: %s",
            self._state.folder,
            ", ".join(f"{counts.count(status)} {status}" for status in Status if status in counts),
        )

    def _stop_running(self) -> None:
        """Each stops with a checkpoint and waits to be gone on with."""
        running = self._running()
        for found in running:
            self._client.stop_job(found.submission_id)
        deadline_s = time.monotonic() + jobs.STOP_WAIT_S
        while running and time.monotonic() < deadline_s:
            running = [found for found in running if self._status(found) not in ENDED]
            time.sleep(POLL_S)
        for found in self._running():
            found.status = Status.WAITING
            found.num_attempts -= 1


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise RunStopped("the sweep was stopped; the same command goes on with it")
