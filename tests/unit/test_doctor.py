"""The doctor: what it finds, and that every problem comes with advice."""

import json
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raylearner import cli
from raylearner.errors import ConfigError
from raylearner.jobs import doctor
from raylearner.jobs.doctor import Finding
from raylearner.sandbox import host


def only(findings: Iterator[Finding]) -> Finding:
    (found,) = findings
    return found


def set_probe(monkeypatch: pytest.MonkeyPatch, is_fine: bool, output: str) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda code: (is_fine, output))


def test_a_module_that_does_not_import_is_a_problem_with_its_last_line() -> None:
    assert doctor._probe("print('x'); print('y')") == (True, "y")
    is_fine, output = doctor._probe("import no_such_module")
    assert not is_fine
    assert output == "ModuleNotFoundError: No module named 'no_such_module'"


def test_gpus_that_torch_does_not_see_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    set_probe(monkeypatch, True, json.dumps({"cuda": None, "gpus": [], "nccl": None}))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert only(doctor._torch()).verdict == "ok"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert only(doctor._torch()).verdict == "problem"


def test_gpus_and_nccl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"name": "H100", "gib": 80}]
    set_probe(monkeypatch, True, json.dumps({"cuda": "13.0", "gpus": gpus, "nccl": "2.29.7"}))
    assert [f.text for f in doctor._torch()] == ["H100 (80 GiB)", "2.29.7"]
    set_probe(monkeypatch, True, json.dumps({"cuda": "13.0", "gpus": gpus, "nccl": None}))
    assert [f.verdict for f in doctor._torch()] == ["ok", "problem"]


def test_little_shared_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(free=2**26, total=2**26)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    found = only(doctor._shared_memory())
    assert found.verdict == "problem"
    assert "--shm-size" in found.advice


@pytest.mark.parametrize(
    ("mode", "token", "verdict"),
    [
        ("token", "x", "ok"),
        ("disabled", "x", "problem"),
        ("bogus", "x", "problem"),
        (None, "x", "note"),
    ],
)
def test_authentication(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, token: str, verdict: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert only(doctor._token()).verdict == verdict


def test_a_missing_token_file_and_a_cluster_that_does_not_answer_are_problems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    for found in (only(doctor._token()), only(doctor._cluster())):
        assert found.verdict == "problem"
        assert found.text.startswith(f"RAY_AUTH_TOKEN_PATH={tmp_path / 'none'}")
    (tmp_path / "none").write_text("0" * 64)
    assert only(doctor._token()).verdict == "ok"
    assert "127.0.0.1:1" in only(doctor._cluster()).text


def test_problems_make_the_command_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("ok", "a", "fine"), Finding("problem", "b", "broken", "fix it")]
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "ok       a: fine",
        "problem  b: broken",
        "         -> fix it",
    ]
    assert result.stderr == "1 problem\n"


def write_proc(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "user", "advised"),
    [
        ({}, 1000, []),
        ({"sys/user/max_user_namespaces": "0\n"}, 0, ["user.max_user_namespaces"]),
        (
            {
                "sys/kernel/unprivileged_userns_clone": "0",
                "sys/kernel/apparmor_restrict_unprivileged_userns": "1",
            },
            1000,
            ["unprivileged_userns_clone=1", "apparmor_restrict_unprivileged_userns=0"],
        ),
        ({"sys/kernel/unprivileged_userns_clone": "0"}, 0, []),
        ({"self/status": "Name:\tx\nSeccomp:\t2\n"}, 0, ["seccomp=unconfined"]),
        (
            {"self/mountinfo": "1 2 0:5 / /proc/kcore rw - tmpfs tmpfs rw\n"},
            0,
            ["systempaths=unconfined"],
        ),
        ({"self/mountinfo": "1 2 0:5 / /proc rw - proc proc rw\n"}, 0, []),
    ],
)
def test_settings_that_prevent_the_sandbox_are_reported(
    tmp_path: Path, files: dict[str, str], user: int, advised: list[str]
) -> None:
    found = host.blockers(write_proc(tmp_path, files), user=user)
    assert len(found) == len(advised)
    assert all(setting in text for setting, text in zip(advised, found, strict=True))


def test_a_machine_without_isolation_gets_a_note_on_what_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert only(doctor._sandbox()).verdict == "ok"

    def refuse() -> None:
        raise ConfigError("no namespaces")

    monkeypatch.setattr(doctor, "Sandbox", refuse)
    found = only(doctor._sandbox())
    assert (found.verdict, found.text) == ("note", "no namespaces")
    assert "isolation" in found.advice
