"""Jobs without a cluster: what is told of a run, what is packaged, what is refused and how."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from minimal import MINIMAL

from raylearner import jobs, submission
from raylearner.config.loader import load
from raylearner.config.report import COMMIT_VARIABLE, git_revision
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError
from raylearner.observability import run_directory


class Client:
    """A Jobs API that takes or refuses a job."""

    def __init__(self, error: Exception | None = None, host: str = "127.0.0.1") -> None:
        self.error = error
        self.host = host
        self.jobs: list[dict[str, Any]] = []

    def get_address(self) -> str:
        return f"http://{self.host}:8265"

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
    return jobs.submit(
        client,
        ["train", "a b.yaml"],
        environment={"working_dir": "here"},
        about={},
        submission_id="x",
    )


def test_the_hash_of_a_configuration_is_of_what_it_says_not_of_where_it_writes(
    config: Callable[..., RunConfig],
) -> None:
    assert jobs.config_hash(config()) == jobs.config_hash(config("run.dir=elsewhere"))
    assert jobs.config_hash(config()) != jobs.config_hash(config("run.seed=1"))
    assert set(jobs.metadata(config())) == {"job_name", "run", "commit", "config"}


def test_a_job_runs_by_this_interpreter_here_and_by_its_own_elsewhere() -> None:
    here, elsewhere = Client(), Client(host="head.example.com")
    assert submit(here) == submit(elsewhere) == "x"
    assert here.jobs[0]["entrypoint"] == f"{sys.executable} -m raylearner train 'a b.yaml'"
    assert elsewhere.jobs[0]["entrypoint"] == "python -m raylearner train 'a b.yaml'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("Package size (600MiB) exceeds the maximum size of 512MiB."), r"\.rayignore"),
        (
            RuntimeError("Request failed with status code 413: Maximum request body size"),
            "too large",
        ),
        (RuntimeError("Request failed: submission id used"), "refused the job: .*id used"),
    ],
)
def test_what_the_cluster_refuses_is_told_with_what_to_do(error: Exception, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        submit(Client(error))


def test_a_job_is_given_its_commit_and_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = jobs.runtime_env("here")["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert variables[COMMIT_VARIABLE] == git_revision()
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    assert git_revision() == "abc"


def test_runs_and_environments_stay_behind_and_sweep_files_do_not(tmp_path: Path) -> None:
    """The patterns are gitignore's, so git says what they match."""
    (tmp_path / ".gitignore").write_text("\n".join(jobs.EXCLUDES))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    behind = [
        "runs/a/log.txt",
        ".venv/bin/python",
        ".venv-2/x",
        "a/b.safetensors",
        "x/__pycache__/y",
    ]
    along = ["raylearner/cli.py", "configs/sweeps/a.yaml", "raylearner/sweep/plan.py"]
    command = ["git", "-C", str(tmp_path), "check-ignore", *behind, *along]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == behind


def test_a_cluster_that_nobody_answers_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: nothing answers"):
        jobs.connect(f"http://127.0.0.1:{port}")


def test_files_outside_the_working_directory_are_refused(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    for name in (str(tmp_path / "config.yaml"), "../other.yaml"):
        Path("../other.yaml").write_text("")
        request = submission.Request(arguments=(name,), resume=None, sweep_file=None)
        with pytest.raises(ConfigError, match="a job is given this directory"):
            submission.submit(request, config, address=None, dependencies=None, should_follow=False)


def test_a_relative_run_directory_outlives_the_files_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory.durable(Path("runs/x")) == Path("runs/x")
    package = tmp_path / run_directory.JOB_FILES / "_ray_pkg_1"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    assert run_directory.durable(Path("runs/x")) == Path.home() / "raylearner" / "runs" / "x"
    assert run_directory.durable(Path("/data/x")) == Path("/data/x")


def test_one_run_at_a_time_has_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = (
        "import sys; from pathlib import Path; from raylearner.observability import run_directory\n"
        "with run_directory.claimed(Path(sys.argv[1]), is_new=True): print('held', flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on"):
        run_directory.claimed(folder, is_new=False).__enter__()
    with pytest.raises(ConfigError, match="made by another run"):
        run_directory.claimed(folder, is_new=True).__enter__()
    process.kill()
    process.communicate()
    with run_directory.claimed(folder, is_new=False):
        pass
