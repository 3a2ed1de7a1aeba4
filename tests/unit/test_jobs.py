"""Jobs without a cluster: their metadata, their packages, and errors of clusters and requests."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from minimal import MINIMAL
from typer.testing import CliRunner

from raylearner import cli
from raylearner.config.loader import load
from raylearner.config.report import COMMIT_VARIABLE, config_hash, git_revision, job_metadata
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError, RaylearnerError
from raylearner.jobs import client as jobs_client
from raylearner.jobs import submission
from raylearner.observability import run_directory


class Answer:
    """One of a dashboard, of its nodes."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self._nodes = nodes

    def raise_for_status(self) -> None: ...

    def json(self) -> dict[str, Any]:
        return {"data": {"summary": [{"raylet": node} for node in self._nodes]}}


def node(hostname: str, address: str, *, is_head: bool = True) -> dict[str, Any]:
    names = {"nodeManagerHostname": hostname, "nodeManagerAddress": address}
    return {**names, "isHeadNode": is_head, "state": "ALIVE"}


WORKER_HERE = node(socket.gethostname(), "127.0.0.1", is_head=False)


class Client:
    """A Jobs API that takes or refuses a job; its dashboard is at `host`, its head node is `head`."""

    def __init__(
        self,
        error: Exception | None = None,
        host: str = "127.0.0.1",
        head: dict[str, Any] | None = None,
    ) -> None:
        self.error = error
        self.host = host
        self.head = head or node(socket.gethostname(), "127.0.0.1")
        self.jobs: list[dict[str, Any]] = []

    def get_address(self) -> str:
        return f"http://{self.host}:8265"

    def _do_request(self, method: str, endpoint: str, **_: Any) -> Answer:
        assert (method, endpoint) == ("GET", "/nodes?view=summary")
        return Answer(WORKER_HERE, self.head)

    def submit_job(self, **job: Any) -> str:
        if self.error is not None:
            raise self.error
        self.jobs.append(job)
        return str(job["submission_id"])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(MINIMAL)
    return lambda *overrides: load(["config.yaml"], list(overrides))


def submit(client: Client) -> str:
    return jobs_client.submit(
        client,
        ["train", "a b.yaml"],
        environment={"working_dir": "here"},
        about={},
        submission_id="x",
    )


def test_the_hash_of_a_configuration_ignores_the_run_directory(
    config: Callable[..., RunConfig],
) -> None:
    assert config_hash(config()) == config_hash(config("run.dir=elsewhere"))
    assert config_hash(config()) != config_hash(config("run.seed=1"))
    assert set(job_metadata(config())) == {"job_name", "run", "commit", "config"}


def test_a_job_runs_by_this_interpreter_here_and_by_its_own_elsewhere() -> None:
    here = Client(host="head.example.com")
    elsewhere = Client(head=node("head", "203.0.113.1"))  # by a tunnel that ends here
    assert submit(here) == submit(elsewhere) == "x"
    assert here.jobs[0]["entrypoint"] == f"{sys.executable} -m raylearner train 'a b.yaml'"
    assert elsewhere.jobs[0]["entrypoint"] == "python -m raylearner train 'a b.yaml'"


def test_a_machine_is_this_one_by_its_name_and_by_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = socket.gethostname()
    assert jobs_client.is_local(Client())
    assert not jobs_client.is_local(Client(head=node("another", "127.0.0.1")))
    assert not jobs_client.is_local(Client(head=node(ours, "203.0.113.1")))
    monkeypatch.setattr(jobs_client, "HEAD_TIMEOUT_S", 0.01)
    monkeypatch.setattr(jobs_client, "HEAD_PAUSE_S", 0.01)
    with pytest.raises(ConfigError, match="http://127"):
        jobs_client.is_local(Client(head=WORKER_HERE))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("Package size (600MiB) exceeds the maximum size of 512MiB."), r"\.rayignore"),
        (
            RuntimeError("Request failed with status code 413: Maximum request body size"),
            "too large",
        ),
        (RuntimeError("Request failed: submission id used"), "id used"),
        (ConnectionResetError("reset by peer"), "reset by peer"),
    ],
)
def test_a_refused_job_is_an_error_with_its_cause(error: Exception, message: str) -> None:
    with pytest.raises(RaylearnerError, match=message):
        submit(Client(error))


def test_a_job_is_given_its_commit_and_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = jobs_client.runtime_env("here")["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert variables[COMMIT_VARIABLE] == git_revision()
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    assert git_revision() == "abc"


def test_runs_and_environments_stay_behind_and_sweep_files_do_not(tmp_path: Path) -> None:
    """The patterns are gitignore's, so git says what they match."""
    (tmp_path / ".gitignore").write_text("\n".join(jobs_client.EXCLUDES))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    behind = ["runs/a/log.txt", ".venv/bin/python", ".venv-2/x", "a/b.safetensors"]
    behind += ["x/__pycache__/y", ".env", "x/.env.local", ".ssh/id_rsa", "x/server.pem", ".netrc"]
    along = ["raylearner/cli/jobs.py", "configs/sweeps/a.yaml", "raylearner/jobs/sweep/plan.py"]
    command = ["git", "-C", str(tmp_path), "check-ignore", *behind, *along]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert message.splitlines() == behind


@pytest.fixture
def no_cluster_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*jobs_client.ADDRESSES, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.usefixtures("no_cluster_named")
def test_a_cluster_that_does_not_answer_is_named_at_once(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"http://127.0.0.1:{free_port}: no answer"):
        jobs_client.connect(f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"at 127.0.0.1:{free_port}: no answer"):
        jobs_client.connect()
    monkeypatch.delenv("RAY_ADDRESS")
    last = f"127.0.0.1:{free_port}"
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: last)
    with pytest.raises(ConfigError, match="at this machine: no answer"):
        jobs_client.connect()
    assert time.monotonic() - began_s < 5
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr("raylearner.network.CONNECT_TIMEOUT_S", 0.2)
        with pytest.raises(ConfigError, match="timed out"):
            jobs_client.connect(f"http://127.0.0.1:{silent.getsockname()[1]}")


class Dashboard(BaseHTTPRequestHandler):
    """Answers with `code` and Ray's version."""

    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.60.0"}')

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.usefixtures("no_cluster_named")
def test_an_address_argument_takes_precedence_and_must_be_a_dashboard(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in jobs_client.ADDRESSES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port}")
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert jobs_client.connect(address).get_address() == address
        assert jobs_client.read_address() == f"http://127.0.0.1:{free_port}"
        monkeypatch.setattr(Dashboard, "code", 500)
        with pytest.raises(ConfigError, match="500 Server Error"):
            jobs_client.connect(address)
        server.shutdown()
    with pytest.raises(ConfigError, match="json://x"):
        jobs_client.connect("json://x")


def test_a_missing_token_file_is_reported_before_ray_aborts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH"):
        jobs_client.connect()


def test_files_outside_the_working_directory_are_refused(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for name in (str(tmp_path / "config.yaml"), "../other.yaml"):
        Path("../other.yaml").write_text("")
        request = submission.Request(arguments=(name,), resume=None, sweep_file=None)
        with pytest.raises(ConfigError, match=name):
            submission.submit(request, list, address=None, dependencies=None, should_follow=False)


def submitted(
    client: Client,
    request: submission.Request,
    load_runs: Callable[[], Sequence[RunConfig]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    should_follow: bool = False,
) -> dict[str, Any]:
    """The job that `client` is given."""
    monkeypatch.setattr(jobs_client, "connect", lambda address: client)
    submission.submit(
        request, load_runs, address=None, dependencies=None, should_follow=should_follow
    )
    return client.jobs[-1]


def test_a_run_on_another_machine_is_resumed_without_reading_it_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = submission.Request(
        arguments=("run.seed=1",),
        resume=Path("runs/a b"),
        restart_if_no_checkpoint=True,
        sweep_file=None,
    )

    def not_here() -> Sequence[RunConfig]:
        raise ConfigError("--resume runs/a b: not a run directory")

    elsewhere = Client(head=node("head", "203.0.113.1"))
    job = submitted(elsewhere, request, not_here, monkeypatch)
    assert job["entrypoint"] == (
        "python -m raylearner train --resume 'runs/a b' --restart-if-no-checkpoint run.seed=1"
    )
    assert job["submission_id"].startswith("runs-a-b-2")
    assert job["metadata"]["run"] == "runs/a b"
    with pytest.raises(ConfigError, match="not a run directory"):
        submitted(Client(), request, not_here, monkeypatch)


def test_a_run_without_a_checkpoint_is_not_submitted_again(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    monkeypatch.setattr(jobs_client, "connect", lambda address: client)
    Path("old").mkdir()
    Path("old/config.yaml").write_text(MINIMAL)
    result = CliRunner().invoke(cli.app, ["submit", "--resume", "old"])
    assert (result.exit_code, client.jobs) == (2, [])
    assert "--resume old: " in result.stderr
    result = CliRunner().invoke(
        cli.app, ["submit", "--resume", "old", "--restart-if-no-checkpoint"]
    )
    assert (result.exit_code, len(client.jobs)) == (0, 1), result.stderr


def test_commands_for_a_job_can_be_pasted_also_after_following_was_interrupted(
    config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submission, "_follow", interrupt)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    request = submission.Request(arguments=("config.yaml",), resume=None, sweep_file=None)
    with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
        submitted(Client(), request, lambda: [config()], monkeypatch, should_follow=True)
    started, stopping, continuing = [record.getMessage() for record in caplog.records]
    prefix = "RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 RAY_AUTH_MODE=token ray job"
    assert f"{prefix} logs -f run-2" in started
    assert f"{prefix} stop run-2" in stopping
    assert f"{prefix} stop run-2" in continuing


def test_a_relative_run_directory_outlives_the_files_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory.resolve(Path("runs/x")) == Path("runs/x")
    package = tmp_path / run_directory.JOB_FILES / "_ray_pkg_1"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    assert run_directory.resolve(Path("runs/x")) == Path.home() / "raylearner" / "runs" / "x"
    assert run_directory.resolve(Path("/data/x")) == Path("/data/x")
