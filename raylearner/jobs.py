"""Runs as Ray jobs: what is packaged, what the cluster is told about them, and who refuses what."""

import hashlib
import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raylearner.config.report import COMMIT_VARIABLE, git_revision
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError

EXCLUDES = (
    *(".git", ".venv*", "venv", "__pycache__", ".*_cache", ".hypothesis"),
    *("/runs", "checkpoints", "/wandb", "*.safetensors", "*.pt", "*.egg-info"),
)
"""What is never packaged with a working directory, beside what .gitignore and .rayignore name."""
STOP_WAIT_S = 180
"""Time from a stop to the kill; Ray's own 3 seconds are too few for a step and a checkpoint."""
CHATTY = {
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray.dashboard.modules.job.sdk": logging.WARNING,
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,
}
"""Loggers that tell every step of an upload, and the last warns of what it leaves out by design."""
TOO_LARGE = ("exceeds the maximum size", "Maximum request body size")
"""What Ray says of a working directory beyond 512 MiB, and its job server of one beyond 100 MiB."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def use_token_where_there_is_one() -> None:
    """Makes this process present Ray's token: the command line leaves authentication off otherwise."""
    has_token = (
        os.environ.get("RAY_AUTH_TOKEN")
        or os.environ.get("RAY_AUTH_TOKEN_PATH")
        or (Path.home() / ".ray" / "auth_token").is_file()
    )
    if has_token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def connect(address: str | None = None) -> Any:
    """A client of the Jobs API at `address`, else at that of the environment, else on this machine.

    Raises `ConfigError` where no cluster answers, or where it does not take our token.
    """
    use_token_where_there_is_one()
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name, level in CHATTY.items():
        logging.getLogger(name).setLevel(level)
    named = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    where = named or "this machine"
    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        raise ConfigError(
            f"cluster at {where}: nothing answers ({_first_line(error)}); start one with"
            " `ray start --head`, or name the dashboard's address, http://HOST:8265, in RAY_ADDRESS"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"cluster at {where}: {_first_line(error)}; name the dashboard's address, http://HOST:8265"
        ) from error
    except (AuthenticationError, RuntimeError) as error:
        if _is_unauthorised(error):
            raise ConfigError(unauthorised(where)) from error
        raise ConfigError(f"cluster at {where}: {_first_line(error)}") from error


def unauthorised(where: str) -> str:
    """What to do about a token that is missing or wrong."""
    return (
        f"cluster at {where}: it asks for a token that was not given or is another; set"
        " RAY_AUTH_MODE=token and put the token of its head node into ~/.ray/auth_token or"
        " RAY_AUTH_TOKEN (`ray get-auth-token` prints it there)"
    )


def _is_unauthorised(error: Exception) -> bool:
    said = str(error).lower()
    return any(word in said for word in ("401", "403", "unauthorized", "unauthenticated", "token"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_local(client: Any) -> bool:
    """Whether jobs run on this machine, and so see its files and interpreter."""
    host: Any = urlsplit(client.get_address()).hostname
    return host in LOOPBACK


def config_hash(config: RunConfig) -> str:
    """Of everything that a configuration says, but for where it is written."""
    tree = config.model_dump(mode="json")
    tree["run"].pop("dir")
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def metadata(config: RunConfig) -> dict[str, str]:
    """What the Jobs page shows of a run."""
    return {
        "job_name": config.run.name,  # what Ray shows as the job's name
        "run": config.run.name,
        "commit": git_revision(),
        "config": config_hash(config),
    }


def runtime_env(folder: str, *, dependencies: Path | None = None) -> dict[str, Any]:
    """The job's files and variables; with `dependencies`, a requirements file that Ray installs."""
    environment: dict[str, Any] = {
        "working_dir": folder,
        "excludes": list(EXCLUDES),
        "env_vars": {
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
            COMMIT_VARIABLE: git_revision(),
        },
    }
    if dependencies is not None:
        environment["pip"] = str(dependencies)
    return environment


def entrypoint(client: Any, arguments: Sequence[str]) -> str:
    """`python -m raylearner ..`, by this very interpreter where the job runs on this machine."""
    python = sys.executable if is_local(client) else "python"
    return shlex.join([python, "-m", "raylearner", *arguments])


def submit(
    client: Any,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, Any],
    about: Mapping[str, str],
    submission_id: str | None = None,
) -> str:
    """Starts `python -m raylearner ARGUMENTS` as a job; returns its id.

    Raises `ConfigError` where the working directory is too large or the cluster refuses.
    """
    try:
        return client.submit_job(
            entrypoint=entrypoint(client, arguments),
            runtime_env=dict(environment),
            metadata=dict(about),
            submission_id=submission_id,
        )
    except (ValueError, RuntimeError) as error:
        if any(word in str(error) for word in TOO_LARGE):
            raise ConfigError(
                f"working directory {environment.get('working_dir')!r}: too large for a job:"
                f" {_first_line(error)} List what a run does not need in .rayignore; data and models"
                " belong on storage that the cluster sees, named by absolute paths"
            ) from error
        raise ConfigError(f"the cluster refused the job: {_first_line(error)}") from error
