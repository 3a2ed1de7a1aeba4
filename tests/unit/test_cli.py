"""The command line: exit codes, one clear line each, and a quick start."""

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from minimal import MINIMAL
from typer.testing import CliRunner, Result

import raylearner.run
from raylearner import cli
from raylearner.config.loader import load
from raylearner.config.report import resolved_yaml
from raylearner.config.schema import RunConfig
from raylearner.errors import ConfigError, LearnerError, RunStopped, StoppedEarly


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(MINIMAL)
    return "config.yaml"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
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


def test_check_prints_derived_numbers_and_warnings_and_exits_0(config_file: str) -> None:
    Path("a=b.yaml").write_text("actors: {num_actors: 3}")  # a file despite its equals sign
    result = invoke(
        *("check", config_file, "a=b.yaml"),
        *("learner.compute_dtype=bfloat16", "learner.gpus_per_rank=0"),
    )
    assert result.exit_code == 0
    assert "rollout actors" in result.stdout
    assert "3 x 1 CPUs" in result.stdout
    assert "worst staleness" in result.stdout
    assert "warning: learner.compute_dtype" in result.stdout


@pytest.mark.parametrize("command", ["check", "train"])
def test_bad_input_exits_2_with_the_report_and_no_traceback(command: str, config_file: str) -> None:
    result = invoke(command, config_file, "run.sed=1")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "override  run.sed=1: unknown key; did you mean 'seed'?",
        "1 problem; nothing was started.",
    ]


@pytest.mark.parametrize("files", [[], ["config.yaml"], ["runs/first/config.yaml"]])
def test_eval_of_a_checkpoint_needs_no_files_and_writes_a_directory_of_its_own(
    config_file: str, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    run, seen = Path("runs/first"), []
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    config = load([config_file], [f"run.dir={run}", "run.name=first"])
    (run / "config.yaml").write_text(resolved_yaml(config))
    monkeypatch.setattr(
        "raylearner.run.evaluate_command.evaluate",
        lambda config, *, checkpoint: seen.append((config.run, checkpoint)),
    )
    place = f"checkpoint={run}/checkpoints/step_000002"
    assert invoke("eval", *files, place).exit_code == 0
    assert invoke("eval", *files, place, "run.dir=elsewhere").exit_code == 0
    (first, checkpoint), (second, _) = seen
    assert checkpoint == run / "checkpoints" / "step_000002"
    name = "run-eval" if files == ["config.yaml"] else "first-eval"
    assert first.name == name
    assert first.dir.startswith(f"runs/{name}-")
    assert second.dir == "elsewhere"


def test_eval_of_a_checkpoint_without_a_run_names_the_missing_file(tmp_path: Path) -> None:
    result = invoke("eval", f"checkpoint={tmp_path}/run/checkpoints/step_000002")
    assert result.exit_code == 2
    assert f"no config.yaml of a run in {tmp_path}/run" in result.output


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
        ("view . --port 80", "no runs"),
        ("view . --port 65536", "65535"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    config_file: str, training: Any, command: str, fragment: str
) -> None:
    training.run = raising(ConfigError("too late"))
    result = invoke(*command.split())
    assert result.exit_code == 2
    assert fragment in result.stderr
    assert "Traceback" not in result.stderr
    assert "too late" not in result.stderr
    assert "Ctrl-C" not in result.stderr


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_deadline_of_the_environment_is_checked(
    config_file: str, training: Any, command: str, monkeypatch: pytest.MonkeyPatch
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


def test_train_starts_and_resumes_runs_and_refuses_an_existing_directory(
    config_file: str, training: Any
) -> None:
    given: list[tuple[RunConfig, dict[str, Any]]] = []
    training.run = lambda config, **options: given.append((config, options))
    assert invoke("train", config_file, "run.name=x").exit_code == 0
    Path("old").mkdir()
    saved = load([config_file], ["run.dir=elsewhere", "run.seed=7"])
    Path("old/config.yaml").write_text(resolved_yaml(saved))
    assert invoke("train", "--resume", "old", "run.num_steps=9").exit_code == 0
    assert invoke("train", "--resume", "old", "--restart-if-no-checkpoint").exit_code == 0
    assert [options for _, options in given] == [
        {"resume": None, "restart_if_no_checkpoint": False},
        {"resume": Path("old"), "restart_if_no_checkpoint": False},
        {"resume": Path("old"), "restart_if_no_checkpoint": True},
    ]
    new, resumed = (config.run for config, _ in given[:2])
    assert new.dir is not None
    assert new.dir.startswith("runs/x-")
    assert (resumed.dir, resumed.seed, resumed.num_steps) == ("old", 7, 9)
    result = invoke("train", config_file, "run.dir=old")
    assert result.exit_code == 2
    assert result.stderr.startswith("run.dir: 'old'")
    assert "--resume old" in result.stderr


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
        (StoppedEarly("no checkpoint"), 130, "no checkpoint"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_a_run_becomes_one_line_and_an_exit_code(
    config_file: str, training: Any, error: BaseException, code: int, message: str
) -> None:
    training.run = raising(error)
    result = invoke("train", config_file)
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_our_own_bugs_show_their_trace(config_file: str, training: Any) -> None:
    training.run = raising(ZeroDivisionError("bug"))
    result = invoke("train", config_file)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == "failed: ZeroDivisionError: bug"


def run_python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
        check=False,
    )


def test_check_and_help_load_neither_torch_nor_ray_nor_vllm(config_file: str) -> None:
    code = (
        "import sys\n"
        "from raylearner.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
    )
    for arguments in (["check", config_file], ["--help"]):
        done = run_python("-c", code, *arguments)
        assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_is_no_failure(config_file: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "raylearner", "check", config_file],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_module_runs_as_a_program(config_file: str) -> None:
    done = run_python("-m", "raylearner", "check", config_file, "replay.group_size=x")
    assert done.returncode == 2
    assert done.stderr.startswith("override  replay.group_size=x: ")


def test_the_console_script_finds_modules_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["raylearner", "check", "config.yaml"])
    Path("rewards_here.py").write_text("def brief(episode):\n    return 1.0\n")
    Path("config.yaml").write_text(MINIMAL)
    sys.modules.pop("rewards_here", None)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "rewards.functions=[{kind: rewards_here:brief}]"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert sys.modules.pop("rewards_here")
