"""The jobs of a sweep's trials, through a Jobs API that may be silent for a while.

Waits for the API's answers, which only the cluster's head node gives; a failure to answer says nothing
of the job.
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
from raylearner.jobs import jobs

logger = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Longest that the API may fail for one job before the sweep ends, and its trials run on alone."""
LOST = "LOST"
"""Of a job that the cluster does not know: it went with another cluster, or never started."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED", LOST)
"""Statuses that a job keeps."""
NO_ANSWER = (RuntimeError, OSError, AuthenticationError)
"""What the client raises; failures of the connection are `OSError`s."""
HANDED_ON = ("pip", "uv", "conda", "py_modules")
"""What of our own job's environment the trials need too."""


def environment(client: Any, *, variables: Path | None = None) -> dict[str, Any]:
    """Of the trials' jobs: this directory, or the package and dependencies of the job that we are.

    `variables` is the package of those that are handed on; without it, that of our own job is.
    Raises `ConfigError` where the trials would run on another machine.
    """
    told = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    ours: dict[str, Any] = told.get("runtime_env") or {}
    package = ours.get("working_dir")
    if not package and not jobs.is_local(client):
        raise ConfigError(
            "a sweep reads what its trials write: start it on the cluster's head node, or as a job"
            " by `bash launch/submit.sh --sweep FILE`"
        )
    handed_on = {key: ours[key] for key in HANDED_ON if ours.get(key)}
    return handed_on | jobs.runtime_env(str(package or Path.cwd()), variables=variables)


class TrialJobs:
    """Starts, asks and stops jobs; bears with an API that does not answer, but not for ever."""

    def __init__(self, client: Any, environment: Mapping[str, Any]) -> None:
        self._client = client
        self._environment = environment
        self._silent_since_s: dict[str, float] = {}
        self._stopped: set[str] = set()

    def start(self, job: str, arguments: Sequence[str], about: Mapping[str, str]) -> bool:
        """Whether it surely started; `status` tells of one that may have. Raises `ConfigError` where it was refused."""
        try:
            jobs.submit(
                self._client,
                arguments,
                environment=self._environment,
                about=about,
                submission_id=job,
            )
        except (OSError, AuthenticationError) as error:
            self._bear(job, error)
            return False
        return True

    def status(self, job: str) -> str | None:
        """What the cluster says, `LOST` where it does not know the job, None where it says nothing.

        Raises `RaylearnerError` where it has said nothing for `PATIENCE_S`.
        """
        try:
            said = str(self._client.get_job_status(job).value)
        except NO_ANSWER as error:
            if not _is_unknown(error):
                self._bear(job, error)
                return None
            said = LOST
        if self._silent_since_s.pop(job, None) is not None:
            logger.info("the cluster answers again for %s: %s", job, said)
        return said

    def stop(self, job: str) -> None:
        """Asks for its end, once; where that is not heard, the next call asks again."""
        if job in self._stopped:
            return
        try:
            self._client.stop_job(job)
        except NO_ANSWER as error:
            if not _is_unknown(error):
                self._bear(job, error)
                return
        self._stopped.add(job)

    def last_line(self, job: str) -> str:
        """Of its log, where our command line says what ended it."""
        try:
            lines = self._client.get_job_logs(job).strip().splitlines()
        except NO_ANSWER as error:
            return f"no logs: {error}"
        return lines[-1].removeprefix("the run failed: ") if lines else "no output"

    def _bear(self, job: str, error: Exception) -> None:
        now_s = time.monotonic()
        since_s = self._silent_since_s.setdefault(job, now_s)
        if since_s == now_s:
            logger.warning(
                "the cluster does not answer for %s (%s); asking again for %g s",
                *(job, error, PATIENCE_S),
            )
        elif now_s - since_s > PATIENCE_S:
            raise RaylearnerError(
                f"the cluster has not answered for job {job} in {PATIENCE_S:g} s: {error}; trials"
                " that run go on, and the same command follows them"
            ) from error


def _is_unknown(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "status code 404" in str(error)
