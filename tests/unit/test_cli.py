"""The command line: exit codes, one clear line each, and a quick start."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from minimal import MINIMAL
from typer.testing import CliRunner, Result

import raylearner.run
from raylearner import cli
from raylearner.config.report import resolved_yaml
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError, LearnerError, RunStopped


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(MINIMAL)
    return "config.yaml"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What trains, whose `run` is set by the test; the real one needs Ray."""
    module = types.ModuleType("raylearner.run.training")
    monkeypatch.setitem(sys.modules, "raylearner.run.training", module)
    monkeypatch.setattr(raylearner.run, "training", module, raising=False)
    return module


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def raising(error: BaseException) -> Callable[..., None]:
    def run(config: RunConfig, **_: object) -> None:
        raise error

    return run


def test_check_prints_derived_numbers_and_exits_0(config_file: str) -> None:
    result = invoke("check", config_file, "actors.num_actors=3")
    assert result.exit_code == 0
    assert "rollout actors" in result.stdout
    assert "3 x 1 CPUs" in result.stdout
    assert "worst staleness" in result.stdout


def test_check_prints_warnings(config_file: str) -> None:
    result = invoke(
        "check", config_file, "learner.compute_dtype=bfloat16", "learner.gpus_per_rank=0"
    )
    assert "warning: learner.compute_dtype" in result.stdout


@pytest.mark.parametrize("command", ["check", "train"])
def test_bad_input_exits_2_with_the_report_and_no_traceback(command: str, config_file: str) -> None:
    result = invoke(command, config_file, "run.sed=1")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "override  run.sed=1: unknown key; did you mean 'seed'?",
        "1 problem; nothing was started.",
    ]


@pytest.mark.parametrize(
    ("command", "fragment"),
    [
        ("check config.yaml run.deadline=soon", "run.deadline: 'soon'"),
        ("train config.yaml run.dir=config.yaml/x", "config.yaml'"),
        ("train config.yaml --restart-if-no-checkpoint", "--resume"),
        ("submit config.yaml --restart-if-no-checkpoint", "--resume"),
        ("train --resume old --or-start-over", "--restart-if-no-checkpoint"),
        ("train --resume nowhere", "--resume nowhere"),
        ("check", "command line"),
        ("submit --sweep none.yaml", "none.yaml"),
        ("submit --sweep s.yaml run.seed=1", "--sweep s.yaml"),
        ("submit config.yaml --pip none.txt", "--pip none.txt"),
        ("submit config.yaml --address garbage", "garbage"),
        ("view . --port 80", "trajectories"),
        ("view . --port 65536", "65535"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    config_file: str, training: types.ModuleType, command: str, fragment: str
) -> None:
    training.run = raising(ConfigError("too late"))  # pyright: ignore[reportAttributeAccessIssue]
    result = invoke(*command.split())
    assert result.exit_code == 2
    assert fragment in result.stderr
    assert "Traceback" not in result.stderr
    assert "too late" not in result.stderr
    assert "Ctrl-C" not in result.stderr


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_deadline_of_the_environment_is_checked(
    config_file: str,
    training: types.ModuleType,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYLEARNER_DEADLINE", "soon")
    result = invoke(command, config_file)
    assert result.exit_code == 2
    assert "RAYLEARNER_DEADLINE: 'soon'" in result.stderr


def test_an_override_may_be_longer_than_a_files_name(config_file: str) -> None:
    assert invoke("check", config_file, f"data.system_prompt={'x' * 300}").exit_code == 0
    result = invoke("submit", config_file, f"data.system_prompt={'x' * 300}", "--pip", "none.txt")
    assert result.stderr.startswith("--pip none.txt: no such file")


def test_a_submission_reports_all_errors(config_file: str) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/model.safetensors").write_bytes(b"")
    result = invoke("submit", config_file, "run.num_steps=x", "--pip", "none.txt")
    assert result.stderr.splitlines()[0].startswith("--pip none.txt: no such file")
    assert "run.num_steps=x: must be a whole number" in result.stderr
    result = invoke("submit", config_file, "model={kind: pretrained, path: model}")
    assert result.exit_code == 2
    assert result.stderr.startswith("model.path: 'model'")
    assert result.stderr.endswith(f"such as {Path('model').absolute()}\n")


def test_a_file_whose_name_has_an_equals_sign_is_a_file(config_file: str) -> None:
    Path("a=b.yaml").write_text("actors: {num_actors: 5}")
    result = invoke("check", config_file, "a=b.yaml")
    assert "5 x 1 CPUs" in result.stdout


def test_train_gives_training_a_config_with_its_run_directory(
    config_file: str, training: types.ModuleType
) -> None:
    seen: list[tuple[RunConfig, Path | None]] = []
    training.run = lambda config, *, resume, **_: seen.append((config, resume))  # pyright: ignore[reportAttributeAccessIssue]
    assert invoke("train", config_file, "run.name=x").exit_code == 0
    ((config, resume),) = seen
    assert resume is None
    assert config.run.dir is not None
    assert config.run.dir.startswith("runs/x-")


def test_train_refuses_a_run_directory_that_exists(
    config_file: str, training: types.ModuleType
) -> None:
    Path("old").mkdir()
    result = invoke("train", config_file, "run.dir=old")
    assert result.exit_code == 2
    assert result.stderr.startswith("run.dir: 'old'")
    assert "--resume old" in result.stderr


def test_resume_reads_the_run_directory_and_takes_overrides(
    config_file: str, training: types.ModuleType
) -> None:
    seen: list[tuple[RunConfig, Path | None, bool]] = []
    training.run = lambda config, *, resume, restart_if_no_checkpoint: seen.append(  # pyright: ignore[reportAttributeAccessIssue]
        (config, resume, restart_if_no_checkpoint)
    )
    from raylearner.config.loader import load

    Path("old").mkdir()
    saved = load([config_file], ["run.dir=elsewhere", "run.seed=7"])
    Path("old/config.yaml").write_text(resolved_yaml(saved))
    assert invoke("train", "--resume", "old", "run.num_steps=9").exit_code == 0
    assert invoke("train", "--resume", "old", "--restart-if-no-checkpoint").exit_code == 0
    (config, resume, restart_if_no_checkpoint), (_, _, restart_asked) = seen
    assert resume == Path("old")
    assert (restart_if_no_checkpoint, restart_asked) == (False, True)
    assert (config.run.dir, config.run.seed, config.run.num_steps) == ("old", 7, 9)


class RayTaskError(LearnerError):
    """As Ray raises it: also of the cause's class, with a remote trace as its text."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("remote trace of many lines")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("data.train.path: row 3 has no prompt"), 2, "data.train.path: row 3"),
        (LearnerError("loss is NaN"), 1, "the run failed: loss is NaN"),
        (ExceptionGroup("tasks", [LearnerError("a"), LearnerError("a")]), 1, "the run failed: a"),
        (RayTaskError(LearnerError("rank 1 ran out of memory")), 1, "rank 1 ran out of memory"),
        (RunStopped("stopped at step 3"), 143, "stopped at step 3"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_a_run_becomes_one_line_and_an_exit_code(
    config_file: str, training: types.ModuleType, error: BaseException, code: int, message: str
) -> None:
    training.run = raising(error)  # pyright: ignore[reportAttributeAccessIssue]
    result = invoke("train", config_file)
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_our_own_bugs_show_their_trace(config_file: str, training: types.ModuleType) -> None:
    training.run = raising(ZeroDivisionError("bug"))  # pyright: ignore[reportAttributeAccessIssue]
    result = invoke("train", config_file)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == "failed: ZeroDivisionError: bug"


def test_check_and_help_load_neither_torch_nor_ray_nor_vllm(config_file: str) -> None:
    code = (
        "import sys\n"
        "from raylearner.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    root = str(Path(__file__).parents[2])
    for arguments in (["check", config_file], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_module_runs_as_a_program(config_file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raylearner", "check", config_file, "replay.group_size=x"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("override  replay.group_size=x: must be a whole number, got 'x'")
