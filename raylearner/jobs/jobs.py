"""Runs as Ray jobs: what is packaged, what the cluster is told about them, and who refuses what."""

import hashlib
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from raylearner import network
from raylearner.config.report import COMMIT_VARIABLE, git_revision
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError, RaylearnerError

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
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that name the cluster of jobs, the first one set counts. Runs and sweeps join that of the
second, as HOST:6379."""
NOT_READY = "No available agent"
"""What a cluster answers that started a moment ago."""
READY_TIMEOUT_S = 30.0
HEAD_TIMEOUT_S = 10.0
HEAD_PAUSE_S = 0.5


def use_token_where_there_is_one() -> None:
    """Makes this process present Ray's token: the command line leaves authentication off otherwise."""
    network.refuse_bad_authentication()
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def has_token() -> bool:
    """Whether there is a token to present."""
    is_named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return is_named or (Path.home() / ".ray" / "auth_token").is_file()


def named_address() -> str | None:
    """The cluster for jobs that the environment names."""
    return next((os.environ[name] for name in ADDRESSES if os.environ.get(name)), None)


def connect(address: str | None = None) -> Any:
    """A client of the Jobs API at `address`, else at that of the environment, else on this machine.

    Raises `ConfigError` where no cluster answers, or where it does not take our token.
    """
    use_token_where_there_is_one()
    import requests
    from ray.exceptions import AuthenticationError, RpcError
    from ray.job_submission import JobSubmissionClient

    for name, level in CHATTY.items():
        logging.getLogger(name).setLevel(level)
    named = address or named_address()
    where = named or "this machine"
    try:
        _probe(named)
        with _without(ADDRESSES if address else ()):
            return JobSubmissionClient(address)
    except (
        *(ConnectionError, TimeoutError, socket.gaierror, RpcError),
        *(requests.ConnectionError, requests.Timeout),
    ) as error:
        raise _silent(where, error) from error
    except (AuthenticationError, RuntimeError) as error:
        if _is_unauthorised(error):
            raise ConfigError(unauthorised(where)) from error
        raise ConfigError(f"cluster at {where}: {_first_line(error)}") from error
    except (OSError, ValueError, AssertionError, LookupError, TypeError) as error:
        raise ConfigError(
            f"cluster at {where}: no dashboard of Ray is there ({_first_line(error)}); name its"
            " address, http://HOST:8265"
        ) from error


def _silent(where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"cluster at {where}: nothing answers ({_first_line(error)}); start one with"
        " `ray start --head`, or name the dashboard's address, http://HOST:8265, by --address or in"
        " RAY_API_SERVER_ADDRESS"
    )


def _probe(named: str | None) -> None:
    """Raises `OSError` where a cluster does not answer soon: Ray itself waits for long, or without end."""
    import requests
    from ray._private.services import find_bootstrap_address  # of the last `ray start` here

    named = named or find_bootstrap_address(None)
    if named is None:
        return
    network.keep_direct(network.host_of(named))
    if named.startswith(("http://", "https://")):
        url = f"{named.rstrip('/')}/api/version"
        requests.get(url, timeout=network.CONNECT_TIMEOUT_S, stream=True).close()
    else:
        network.check_reachable(named)


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """These variables are unset meanwhile: to Ray they count for more than an address that is given."""
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


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


@lru_cache(maxsize=1)
def is_local(client: Any) -> bool:
    """Whether jobs run on this machine, and so see its files and interpreter; asked once of a client.

    They run on the head node. It is this machine where it bears the name and an address of it: a
    dashboard on 127.0.0.1 may be the end of a tunnel, and one elsewhere may be our own. Raises
    `ConfigError` where the cluster does not tell.
    """
    head = _head_node(client)
    return head["nodeManagerHostname"] == socket.gethostname() and _is_ours(
        head["nodeManagerAddress"]
    )


def _head_node(client: Any) -> Mapping[str, str]:
    """What the dashboard knows of the head node; at once after a start it knows none yet."""
    import requests

    said: object = "it names no head node"
    deadline_s = time.monotonic() + HEAD_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            answer = client._do_request("GET", "/nodes?view=summary", timeout=HEAD_TIMEOUT_S)
            answer.raise_for_status()
            nodes = [node["raylet"] for node in answer.json()["data"]["summary"]]
            heads = [n for n in nodes if n.get("isHeadNode") and n.get("state") == "ALIVE"]
            if heads and {"nodeManagerHostname", "nodeManagerAddress"} <= heads[0].keys():
                return heads[0]
        except (requests.RequestException, ValueError, LookupError, TypeError) as error:
            said = _first_line(error)
        time.sleep(HEAD_PAUSE_S)
    raise ConfigError(
        f"cluster at {client.get_address()}: it does not tell which machine its jobs run on ({said});"
        " look at the Cluster page of its dashboard, and whether it runs this machine's Ray"
    )


def _is_ours(address: str) -> bool:
    """Whether an IP address is one of this machine's: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


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


def runtime_env(
    folder: str, *, dependencies: Path | None = None, variables: Path | None = None
) -> dict[str, Any]:
    """The job's files and variables; with `dependencies`, a requirements file that Ray installs.

    `variables` is the package of those that are handed on. Ray shows everything else that is here.
    """
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
    if variables is not None:
        environment["py_modules"] = [str(variables)]
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

    Raises `ConfigError` where the working directory is too large or the cluster refuses, and
    `RaylearnerError` where the connection breaks.
    """
    try:
        return _submit_when_ready(
            client,
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
    except OSError as error:
        raise RaylearnerError(f"the job could not be handed over: {_first_line(error)}") from error


def _submit_when_ready(client: Any, **job: Any) -> str:
    """The job's id, asked for again while the cluster is still starting."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if NOT_READY not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(HEAD_PAUSE_S)
