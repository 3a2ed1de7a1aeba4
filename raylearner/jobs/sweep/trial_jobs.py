"""Jobs of a sweep's trials, through a Jobs API that may be unavailable for a while.

Waits for answers of the cluster's head node; a missing answer implies nothing about the job.
"""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray.exceptions import AuthenticationError

from raylearner.errors import ConfigError, RaylearnerError
from raylearner.jobs import client as jobs_client

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Maximum API outage for one job, after which the sweep ends and its running trials continue."""
LOST = "LOST"
"""Status of a job that the cluster does not have: it belonged to another cluster, or never started."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED", LOST)
"""Final statuses of a job."""
NO_ANSWER = (RuntimeError, OSError, AuthenticationError)
"""Errors of the client; connection failures are `OSError`s."""
INHERITED = ("pip", "uv", "conda", "py_modules")
"""Keys of this job's runtime environment that trials need too."""


def runtime_env(client: Any, *, variables: Path | None = None) -> dict[str, Any]:
    """Return the runtime environment of trials: this directory, or this job's package and dependencies.

    `variables` is a package of environment variables; by default this job's own is passed on.
    Raises `ConfigError` if trials would run on another machine.
    """
    job_config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    ours: dict[str, Any] = job_config.get("runtime_env") or {}
    package = ours.get("working_dir")
    if not package and not jobs_client.is_local(client):
        raise ConfigError(
            "a sweep reads its trials' files: start it on the cluster's head node, or as a job with"
            " `bash launch/submit.sh --sweep FILE`"
        )
    inherited = {key: ours[key] for key in INHERITED if ours.get(key)}
    return inherited | jobs_client.runtime_env(str(package or Path.cwd()), variables=variables)


class TrialJobs:
    """Starts, polls and stops jobs; tolerates API outages of up to `PATIENCE_S`."""

    def __init__(self, client: Any, environment: Mapping[str, Any]) -> None:
        self._client = client
        self._environment = environment
        self._outage_since_s: dict[str, float] = {}
        self._stopped: set[str] = set()

    def start(self, job: str, arguments: Sequence[str], about: Mapping[str, str]) -> bool:
        """Start a job; return False if the API did not answer and only `status` can show whether it runs.

        Raises `ConfigError` if the job was refused.
        """
        try:
            jobs_client.submit(
                self._client,
                arguments,
                environment=self._environment,
                about=about,
                submission_id=job,
            )
        except (OSError, AuthenticationError) as error:
            self._tolerate(job, error)
            return False
        return True

    def status(self, job: str) -> str | None:
        """Return the job's status, `LOST` if the cluster does not have it, None if there is no answer.

        Raises `RaylearnerError` after an outage of `PATIENCE_S`.
        """
        try:
            status = jobs_client.read_status(self._client, job) or LOST
        except NO_ANSWER as error:
            self._tolerate(job, error)
            return None
        if self._outage_since_s.pop(job, None) is not None:
            logger.info("the status of job %s is available again: %s", job, status)
        return status

    def stop(self, job: str) -> None:
        """Ask the job to stop, once; after an API failure the next call asks again."""
        if job in self._stopped:
            return
        try:
            jobs_client.stop(self._client, job)
        except NO_ANSWER as error:
            self._tolerate(job, error)
            return
        self._stopped.add(job)

    def read_last_line(self, job: str) -> str:
        """Return the last line of the job's log, where the command line prints its error."""
        try:
            lines = self._client.get_job_logs(job).strip().splitlines()
        except NO_ANSWER as error:
            return f"no log: {error}"
        return lines[-1].removeprefix("the run failed: ") if lines else "no output"

    def _tolerate(self, job: str, error: Exception) -> None:
        now_s = time.monotonic()
        since_s = self._outage_since_s.setdefault(job, now_s)
        if since_s == now_s:
            logger.warning(
                "no status of job %s (%s); retrying for %g s",
                *(job, error, PATIENCE_S),
            )
        elif now_s - since_s > PATIENCE_S:
            raise RaylearnerError(
                f"no status of job {job} for {PATIENCE_S:g} s: {error}; running trials continue, "
                "and the same command resumes the sweep"
            ) from error
