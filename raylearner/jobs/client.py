"""Client of Ray's Jobs API: connecting to a cluster, and packaging and submitting jobs."""

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
from raylearner.errors import ConfigError, RaylearnerError

EXCLUDES = (
    *(".git", ".venv*", "venv", "__pycache__", ".*_cache", ".hypothesis"),
    *(".env", ".env.*", ".netrc", ".ssh", ".aws", ".ray", "*.pem", "id_rsa*", "id_ed25519*"),
    *("/runs", "checkpoints", "/wandb", "*.safetensors", "*.pt", "*.egg-info"),
)
"""Files never packaged with a working directory, in addition to .gitignore and .rayignore."""
STOP_WAIT_S = 180
"""Time from a stop to the kill; Ray's default of 3 seconds is too short for a step and a checkpoint."""
CHATTY = {
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray.dashboard.modules.job.sdk": logging.WARNING,
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,
}
"""Loggers that report every step of an upload; the last also warns of files excluded on purpose."""
TOO_LARGE = ("exceeds the maximum size", "Maximum request body size")
"""Messages of Ray for a working directory beyond 512 MiB, and of its job server beyond 100 MiB."""
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Environment variables with the address of the cluster for jobs; the first one set counts. Runs and
sweeps join the cluster in the second, as HOST:6379."""
NOT_READY = "No available agent"
"""Message of a cluster that is still starting."""
READY_TIMEOUT_S = 30.0
HEAD_TIMEOUT_S = 10.0
HEAD_PAUSE_S = 0.5
NOT_FOUND = 404


def use_token() -> None:
    """Authenticate with Ray's token if there is one, which Ray's client does not do by default."""
    network.refuse_bad_authentication()
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def has_token() -> bool:
    """Whether a token is available."""
    is_named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return is_named or (Path.home() / ".ray" / "auth_token").is_file()


def read_address() -> str | None:
    """Return the address of the cluster for jobs in the environment."""
    return next((os.environ[name] for name in ADDRESSES if os.environ.get(name)), None)


def connect(address: str | None = None) -> Any:
    """Return a client of the Jobs API at `address`, the environment's address, or on this machine.

    Raises `ConfigError` if no cluster answers or it rejects the token.
    """
    use_token()
    import requests
    from ray.exceptions import AuthenticationError, RpcError
    from ray.job_submission import JobSubmissionClient

    for name, level in CHATTY.items():
        logging.getLogger(name).setLevel(level)
    named = address or read_address()
    where = named or "this machine"
    try:
        _probe(named)
        with _without(ADDRESSES if address else ()):
            return JobSubmissionClient(address)
    except (
        *(ConnectionError, TimeoutError, socket.gaierror, RpcError),
        *(requests.ConnectionError, requests.Timeout),
    ) as error:
        raise _no_answer(where, error) from error
    except (AuthenticationError, RuntimeError) as error:
        if _is_unauthorised(error):
            raise ConfigError(unauthorised(where)) from error
        raise ConfigError(f"cluster at {where}: {_first_line(error)}") from error
    except (OSError, ValueError, AssertionError, LookupError, TypeError) as error:
        raise ConfigError(
            f"cluster at {where}: not a Ray dashboard ({_first_line(error)}); give the dashboard's"
            " address, http://HOST:8265"
        ) from error


def _no_answer(where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"cluster at {where}: no answer ({_first_line(error)}); start one with `ray start --head`, or"
        " give the dashboard's address, http://HOST:8265, with --address or in RAY_API_SERVER_ADDRESS"
    )


def _probe(named: str | None) -> None:
    """Raise `OSError` if the cluster does not answer soon; Ray's own client waits long or forever."""
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
    """Unset these variables within the context: Ray prefers them over an address."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def unauthorised(where: str) -> str:
    """Return the message for a missing or wrong token."""
    return (
        f"cluster at {where}: the token is missing or wrong; set RAY_AUTH_MODE=token and put the token"
        " of its head node into ~/.ray/auth_token or RAY_AUTH_TOKEN (`ray get-auth-token` prints it there)"
    )


def _is_unauthorised(error: Exception) -> bool:
    message = str(error).lower()
    return any(
        word in message for word in ("401", "403", "unauthorized", "unauthenticated", "token")
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@lru_cache(maxsize=1)
def is_local(client: Any) -> bool:
    """Whether jobs run on this machine, with its files and interpreter; asked once of a client.

    Jobs run on the head node, which is this machine if it has its name and one of its addresses: a
    dashboard on 127.0.0.1 may be the end of a tunnel, and a remote address may be this machine's. Raises
    `ConfigError` if the cluster does not report its head node.
    """
    head = _head_node(client)
    return head["nodeManagerHostname"] == socket.gethostname() and _is_ours(
        head["nodeManagerAddress"]
    )


def _head_node(client: Any) -> Mapping[str, str]:
    """Return the dashboard's entry for the head node, which is missing right after a start."""
    import requests

    problem = "no head node in its answer"
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
            problem = _first_line(error)
        time.sleep(HEAD_PAUSE_S)
    raise ConfigError(
        f"cluster at {client.get_address()}: cannot determine the machine of its jobs ({problem}); check the"
        " Cluster page of its dashboard, and that it runs the same version of Ray"
    )


def _is_ours(address: str) -> bool:
    """Whether an IP address belongs to this machine: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def runtime_env(
    folder: str, *, dependencies: Path | None = None, variables: Path | None = None
) -> dict[str, Any]:
    """Return the runtime environment of a job; `dependencies` is a requirements file that Ray installs.

    `variables` is a package of environment variables, whose values Ray does not show.
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
    """Return the command line, with this interpreter if the job runs on this machine."""
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
    """Start `python -m raylearner ARGUMENTS` as a job and return its id.

    Raises `ConfigError` if the working directory is too large or the cluster refuses the job, and
    `RaylearnerError` if the connection breaks.
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
                f" {_first_line(error)} List files that a run does not need in .rayignore; keep data and"
                " models on storage that the cluster can read, with absolute paths"
            ) from error
        raise ConfigError(f"the cluster refused the job: {_first_line(error)}") from error
    except OSError as error:
        raise RaylearnerError(f"the job could not be submitted: {_first_line(error)}") from error


def _submit_when_ready(client: Any, **job: Any) -> str:
    """Submit, again while the cluster is still starting; return the job's id."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            if NOT_READY not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(HEAD_PAUSE_S)


def read_status(client: Any, job: str) -> str | None:
    """Return the status of a job, None if the cluster does not have it. Raises `OSError` without an answer.

    The client's own method raises the same error for an unknown job as for a failing server.
    """
    response = client._do_request("GET", f"/api/jobs/{job}")
    if response.status_code == NOT_FOUND:
        return None
    response.raise_for_status()
    return str(response.json()["status"])


def stop(client: Any, job: str) -> None:
    """Ask a job to stop, if the cluster has it. Raises `OSError` without an answer."""
    response = client._do_request("POST", f"/api/jobs/{job}/stop")
    if response.status_code != NOT_FOUND:
        response.raise_for_status()
