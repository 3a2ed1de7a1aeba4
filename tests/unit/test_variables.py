"""Variables that a configuration names: missing ones are found first, `--env` hands them on unseen."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from minimal import MINIMAL, problems_of
from typer.testing import CliRunner

from raylearner import cli, job_variables
from raylearner.cli import exits
from raylearner.config.loader import load
from raylearner.config.schema import WandbSection
from raylearner.errors import ConfigError
from raylearner.jobs import client as jobs_client
from raylearner.jobs import submission
from raylearner.observability.sinks.wandb import ID_FILE, WandbRun

JUDGE = "{kind: judge, url: 'http://127.0.0.1:9/v1', model: m, api_key_variable: DEMO_KEY}"
SECRET = "hunter-2"


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(MINIMAL)
    return str(path)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands for the package; holds what `init` was called with."""
    calls: list[dict[str, Any]] = []

    def init(**given: Any) -> Any:
        calls.append(given)
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)

    module = SimpleNamespace(init=init, __spec__=SimpleNamespace(name="wandb"))
    monkeypatch.setitem(sys.modules, "wandb", module)  # pyright: ignore[reportArgumentType]
    return calls


def lacking(base: str, overrides: list[str], environment: dict[str, str]) -> set[str]:
    return set(problems_of(base, overrides, environment=environment))


def test_a_variable_that_is_not_set_is_a_problem_where_the_environment_is_known(base: str) -> None:
    overrides = [f"rewards.functions=[{{kind: exact_answer}}, {JUDGE}]"]
    key = "rewards.functions.1.api_key_variable"
    assert lacking(base, overrides, {}) == {key}
    assert lacking(base, overrides, {"DEMO_KEY": ""}) == {key}
    assert lacking(base, overrides, {"DEMO_KEY": SECRET}) == set()
    load([base], overrides)  # of a job, which runs elsewhere


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_the_command_line_ends_with_one_line(
    base: str, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DEMO_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, [command, base, f"rewards.functions=[{JUDGE}]"])
    assert done.exit_code == exits.BAD_INPUT
    assert "rewards.functions.0.api_key_variable: the environment variable DEMO_KEY" in done.output
    assert len(done.output.strip().splitlines()) == 2


def test_wandb_online_needs_a_key_before_anything_starts(
    base: str, wandb: list[dict[str, Any]], tmp_path: Path
) -> None:
    online = ["observability.wandb={}"]
    home = {"HOME": str(tmp_path)}
    assert lacking(base, online, home) == {"observability.wandb"}
    assert lacking(base, ["observability.wandb={mode: offline}"], home) == set()
    assert lacking(base, online, home | {"WANDB_API_KEY": SECRET}) == set()
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {SECRET}\n")
    assert lacking(base, online, home) == set()
    own = home | {"WANDB_BASE_URL": "https://wandb.example"}
    assert lacking(base, online, own) == {"observability.wandb"}


def test_a_wandb_id_lives_in_its_run_directory(wandb: list[dict[str, Any]], tmp_path: Path) -> None:
    def opened(folder: Path) -> str:
        WandbRun(WandbSection(), folder, hparams={})
        return wandb[-1]["id"]

    alice, bob = tmp_path / "alice" / "same", tmp_path / "bob" / "same"
    first = opened(alice)
    assert opened(bob) != first
    assert opened(alice) == first  # a resume
    moved = alice.rename(tmp_path / "moved")
    assert opened(moved) == first
    assert opened(alice) != first  # starts over under the name
    assert opened(moved) == first
    subprocess.run(["cp", "-r", str(bob), str(tmp_path / "copy")], check=True)
    assert opened(tmp_path / "copy") not in (first, opened(bob))
    (moved / ID_FILE).unlink()
    assert opened(moved) != first
    assert wandb[-1]["name"] == "moved"


def test_a_run_that_wandb_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init(**_: Any) -> Any:
        raise RuntimeError("run x was deleted\nand more")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as caught:
        WandbRun(WandbSection(), tmp_path, hparams={})
    assert "\n" not in str(caught.value)
    assert ID_FILE in str(caught.value)


def test_values_travel_in_a_package_and_in_nothing_that_is_shown() -> None:
    with job_variables.packed(["DEMO_KEY"], {"DEMO_KEY": SECRET, "OTHER": "x"}) as package:
        assert package is not None
        shown = jobs_client.runtime_env(".", variables=package)
        assert SECRET not in str(shown)
        assert shown["py_modules"] == [str(package)]
        file = package / job_variables.FILE
        assert file.stat().st_mode & 0o777 == 0o600
        program = (
            "import os; from raylearner import job_variables as h; h.take();"
            "print(os.environ['DEMO_KEY'], os.environ.get('OTHER'))"
        )
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(package.parent)])}
        environment.pop("DEMO_KEY", None)
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.stdout.split() == [SECRET, "None"], done.stderr
    assert not package.exists()


def test_submit_warns_of_what_a_job_would_not_have(
    base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[dict[str, Any]] = []

    def submit_job(**job: Any) -> str:
        (package,) = job["runtime_env"].get("py_modules") or [None]
        file = package and (Path(package) / job_variables.FILE).read_text()
        sent.append(job | {"file": file})
        return "job"

    client = SimpleNamespace(submit_job=submit_job, get_address=lambda: "http://127.0.0.1:8265")
    monkeypatch.setattr(jobs_client, "connect", lambda _: client)
    monkeypatch.setattr(jobs_client, "is_local", lambda _: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEMO_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "other")
    overrides = (
        f"rewards.functions=[{JUDGE}]",
        "observability.wandb={}",
        "model={kind: pretrained, path: a/b}",
    )

    def submitted(*names: str) -> str:
        caplog.clear()
        request = submission.Request(
            arguments=("base.yaml", *overrides), resume=None, sweep_file=None, variables=names
        )
        submission.submit(
            request,
            lambda: [load([base], overrides)],
            address=None,
            dependencies=None,
            should_follow=False,
        )
        return "\n".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")

    warned = submitted()
    assert all(f"--env {name}" in warned for name in ("DEMO_KEY", "WANDB_API_KEY", "HF_TOKEN"))
    warned = submitted("DEMO_KEY", "HF_TOKEN")
    assert "--env WANDB_API_KEY" in warned
    assert "--env DEMO_KEY" not in warned
    file = sent[-1].pop("file")
    assert SECRET in file
    assert SECRET not in str(sent) + caplog.text
    with pytest.raises(ConfigError, match="MISSING"):
        submitted("MISSING")


def test_names_are_checked_all_at_once() -> None:
    names = ["A=b", "not a name", "MISSING", "HERE"]
    with pytest.raises(ConfigError) as caught, job_variables.packed(names, {"HERE": "x"}):
        pass
    assert len(str(caught.value).splitlines()) == 3
    with job_variables.packed([], {}) as package:
        assert package is None
