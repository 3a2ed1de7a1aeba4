"""The report of a sweep: ranks, intervals, curves, commands, and folders that cannot be read."""

import csv
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from minimal import MINIMAL
from rows import write_jsonl
from typer.testing import CliRunner

import raylearner
from raylearner import cli
from raylearner.config.loader import load
from raylearner.config.report import resolved_yaml
from raylearner.errors import ConfigError
from raylearner.jobs.sweep import figures, plan, report, results
from raylearner.jobs.sweep.section import SweepMetric
from raylearner.jobs.sweep.state import Status, SweepState, read_progress

KEY = "rollout/reward/mean"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a sweep, which has four combinations with two seeds each."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(MINIMAL)
    return tmp_path / "runs" / "sweeps" / "s"


def make(folder: Path, **changes: Any) -> SweepState:
    axes = [
        {"key": "learner.learning_rate", "values": [1e-4, 1e-3]},
        {"key": "replay.group_size", "values": [4, 8]},
    ]
    sweep = {"name": "s", "base": ["base.yaml"], "axes": axes, "seeds": [0, 1], **changes}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    return SweepState(folder, plan.read("sweep.yaml"))


def finish(state: SweepState, *values: float | None) -> None:
    for trial, value in zip(state.trials, values, strict=True):
        trial.status = Status.FAILED if value is None else Status.DONE
        trial.value, trial.error = value, "it broke" if value is None else None
    state.save()


def write_curve(state: SweepState, number: int, *values: float) -> Path:
    run_dir = state.run_dir(number)
    run_dir.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, KEY: value} for step, value in enumerate(values, 1)]
    write_jsonl(run_dir / "metrics.jsonl", *rows)
    return run_dir


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def combinations_of(text: str) -> list[str]:
    table = text.partition("## Combinations")[2].partition("## Learning")[0]
    return [line for line in table.splitlines() if line.startswith("| 0.")]


def test_combinations_are_ranked_by_their_mean_with_its_interval(folder: Path) -> None:
    state = make(folder)
    finish(state, 0.1, 0.3, 0.8, 0.9, 0.5, 0.5, 0.2, None)
    text = report.write(folder)
    assert combinations_of(text) == [
        "| 0.0001 | 8 | 0.8500 ± 0.6353 | 2 of 2 | 002, 003 |",
        "| 0.001 | 4 | 0.5000 ± 0.0000 | 2 of 2 | 004, 005 |",
        "| 0.0001 | 4 | 0.2000 ± 1.2706 | 2 of 2 | 000, 001 |",
        "| 0.001 | 8 | 0.2000 | 1 of 2 | 006, 007 (failed) |",
    ]
    assert "007 (learning_rate=0.001, group_size=8, seed 1): it broke" in text
    assert "**Best trial**: 003 (learning_rate=0.0001, group_size=8, seed 1): 0.9000" in text
    assert "8 trials: 7 done, 1 failed" in text
    assert text == (folder / "results.md").read_text()
    best = rows_of(folder / "combinations.csv")[0]
    assert float(best["mean"]) == pytest.approx(0.85)
    assert float(best["low_95"]) == pytest.approx(0.85 - 0.6353, abs=1e-4)
    assert [row["value"] for row in rows_of(folder / "results.csv")][:2] == ["0.1", "0.3"]
    plots = sorted(path.name for path in (folder / "plots").iterdir())
    assert plots == ["learner_learning_rate.png", "replay_group_size.png"]


def test_an_interval_is_that_of_students_t() -> None:
    assert results.half_interval([0.5]) is None
    three = results.half_interval([1.0, 2.0, 3.0])
    assert three == pytest.approx(4.303 / math.sqrt(3))
    many = results.half_interval([0.0, 1.0] * 50)
    assert many == pytest.approx(1.984 * 0.5025 / 10, rel=0.02)


def test_where_smaller_is_better_the_smallest_is_the_best(folder: Path) -> None:
    state = make(folder, metric={"key": KEY, "goal": "min"})
    finish(state, 0.1, 0.3, 0.8, 0.9, 0.5, 0.5, 0.2, 0.7)
    assert "**Best trial**: 000" in report.write(folder)


def test_of_equal_trials_the_one_with_fewer_failed_episodes_is_better(
    folder: Path, tmp_path: Path
) -> None:
    metric = SweepMetric(key="evaluation/reward/mean")
    for name, failed in (("a", 0.0), ("b", 0.75)):
        (tmp_path / name).mkdir()
        row = {"step": 1, "reward/mean": 0.25, "failed_fraction": failed}
        write_jsonl(tmp_path / name / "eval.jsonl", row)
        rows = [{"step": 1, "rollout/stop/error": failed}, {"step": 2}]
        write_jsonl(tmp_path / name / "metrics.jsonl", *rows)
    made = {name: read_progress(tmp_path / name, metric) for name in "ab"}
    assert [made[name].failed_fraction for name in "ab"] == [0.0, 0.75]
    assert read_progress(tmp_path / "b", SweepMetric()).failed_fraction == 0.75 / 2
    state = make(folder)
    for found in state.trials:
        found.status, found.value = Status.DONE, 0.25
        found.failed_fraction = made["a" if found.number == 5 else "b"].failed_fraction
    state.save()
    first = combinations_of(report.write(folder))[0]
    assert "004, 005" in first
    assert "37.5% of the episodes failed" in first


def test_curves_are_summarized_at_quarters_of_the_steps(folder: Path) -> None:
    metric = {"key": KEY, "last_steps": 1}
    state = make(folder, metric=metric, overrides={"run.num_steps": 8}, seeds=[0])
    finish(state, 0.8, None, None, None)
    write_curve(state, 0, *(step / 10 for step in range(1, 9)))
    write_curve(state, 1, 0.5, 0.5, 0.5, 0.5)  # it failed half-way
    text = report.write(folder)
    curves = text.partition("## Learning curves")[2]
    assert "| 0.0001 | 4 | 0.1000 | 0.2000 | 0.4000 | 0.6000 | 0.8000 |" in curves
    assert "| 0.0001 | 8 | 0.5000 | 0.5000 | 0.5000 | - | - |" in curves
    steps = [row for row in rows_of(folder / "curves.csv") if row["trial"] == "0"]
    assert [float(row["value"]) for row in steps] == [step / 10 for step in range(1, 9)]
    assert (folder / "plots" / "learning_curves.png").is_file()


def test_a_command_repeats_a_trial_with_the_configuration_that_it_ran_with(folder: Path) -> None:
    state = make(folder)
    trial = plan.read("sweep.yaml").trials[3]
    run_dir = state.run_dir(3)
    run_dir.mkdir(parents=True)
    in_place = trial.config.run.model_copy(update={"dir": str(run_dir)})
    ran = trial.config.model_copy(update={"run": in_place})
    (run_dir / "config.yaml").write_text(resolved_yaml(ran))
    Path("base.yaml").write_text(MINIMAL + "cluster: {num_cpus: 3}\n")  # changed since
    found = results.read(folder)
    words = shlex.split(found.trials[3].command)
    assert words == [
        *("raylearner", "train", "runs/sweeps/s/trials/003/config.yaml"),
        "run.dir=runs/sweeps/s/repeats/003",
    ]
    again = load([words[2]], words[3:])
    assert again.model_copy(update={"run": trial.config.run}) == trial.config
    assert again.run.seed == trial.seed
    not_started = shlex.split(found.trials[2].command)
    assert not_started[2] == "base.yaml"
    assert load([not_started[2]], not_started[3:]).run.seed == 0


def test_a_categorical_axis_is_not_joined_by_lines(folder: Path) -> None:
    axes = [
        {"key": "learner.loss", "values": [{"kind": "ppo"}, {"kind": "gspo"}]},
        {"key": "replay.group_size", "values": [4, 8]},
    ]
    finish(make(folder, axes=axes), *(number / 8 for number in range(8)))
    from matplotlib import pyplot

    joined: dict[str, bool] = {}
    for key in ("learner.loss", "replay.group_size"):
        figure, drawn = pyplot.subplots()
        figures._draw_axis(drawn, results.read(folder), key)
        means = [line for line in drawn.get_lines() if line.get_marker() == "o"]
        assert len(means) == 2
        joined[key] = any(line.get_linestyle() not in ("None", "") for line in means)
        pyplot.close(figure)
    assert joined == {"learner.loss": False, "replay.group_size": True}


def test_values_that_were_drawn_are_a_cloud_without_lines_or_legend(folder: Path) -> None:
    drawn_axes = [
        {"key": key, "sample": {"kind": "log_uniform", "low": 1e-5, "high": 1e-2}}
        for key in ("learner.learning_rate", "learner.max_grad_norm")
    ]
    finish(make(folder, axes=drawn_axes, num_samples=20, seeds=[0]), *[0.5] * 20)
    from matplotlib import pyplot

    figure, drawn = pyplot.subplots()
    figures._draw_axis(drawn, results.read(folder), "learner.learning_rate")
    assert drawn.get_legend() is None
    assert {line.get_linestyle() for line in drawn.get_lines()} == {"None"}
    assert drawn.get_xscale() == "log"
    pyplot.close(figure)


def test_many_combinations_get_a_panel_for_each_value_of_an_axis(folder: Path) -> None:
    axes = [
        {"key": "learner.loss", "values": [{"kind": "ppo"}, {"kind": "gspo"}]},
        {"key": "replay.group_size", "values": [2, 3, 4, 5, 6]},
    ]
    state = make(folder, axes=axes, seeds=[0])
    for number in range(10):
        write_curve(state, number, 0.1, 0.2)
    panels = figures._panels(results.read(folder))
    assert list(panels) == [f"group_size={size}" for size in (2, 3, 4, 5, 6)]
    assert [[name for name, _ in lines] for lines in panels.values()] == [
        ["loss=ppo", "loss=gspo"]
    ] * 5


def invoke(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, ["sweep", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_the_report_of_a_sweep_that_is_running(folder: Path) -> None:
    state = make(folder)
    code, _, error = invoke("sweep.yaml", "--report", "--dry-run")
    assert (code, error.startswith("--dry-run and --report")) == (2, True)
    state.trials[0].status = Status.RUNNING
    state.save()
    run_dir = write_curve(state, 0, 0.25, 0.5)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "roll')  # being written
    code, _, error = invoke("runs/sweeps/s")
    assert (code, "--report" in error) == (2, True)
    for named in ("sweep.yaml", "runs/sweeps/s"):
        code, text, _ = invoke(named, "--report")
        assert code == 0
        assert "8 trials: 7 waiting, 1 running" in text
        assert "| 0.0001 | 4 | 0.3750 | 1 of 2 | 000 (running), 001 (waiting) |" in text
        assert "No trial has completed" in text


def test_hostile_text_stays_in_its_cell_and_line(folder: Path) -> None:
    axes = [{"key": "data.system_prompt", "values": ["a|b\nc$d", "\x1b[2J" + "x" * 300]}]
    state = make(folder, axes=axes, seeds=[0])
    finish(state, 0.5, None)
    state.trials[1].error = "line\nbreak\x1b[2J"
    state.save()
    text = report.write(folder)
    assert "\x1b" not in text
    assert "a\\|b" in text
    rows = combinations_of(text.replace("| a", "| 0.a"))
    assert len(rows) == 1
    assert any(line.startswith("- 001 ") and "line break" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "not the folder of a sweep"),
        ("{", "is damaged"),
        ('{"name": "s", "trials": []}', "'metric'"),
        ('{"name": "s", "metric": {}, "points": [], "trials": [1]}', "0 of list[TrialState]"),
        ("[]", "another version"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(
    folder: Path, content: str | None, fragment: str
) -> None:
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "sweep.json").write_text(content)
    code, _, error = invoke("runs/sweeps/s", "--report")
    assert code == 2
    assert len(error.splitlines()) == 1
    assert fragment in error


def test_a_sweep_without_results_and_one_of_another_version_are_refused(folder: Path) -> None:
    Path("other.yaml").write_text(
        yaml.safe_dump(
            {"name": "t", "base": ["base.yaml"], "axes": [{"key": "run.keep_last", "values": [1]}]}
        )
    )
    code, _, error = invoke("other.yaml", "--report")
    assert (code, error.startswith("other.yaml: has no results yet")) == (2, True)
    state = make(folder)
    record = json.loads((folder / "sweep.json").read_text())
    for point in record["points"]:
        del point["arguments"]
    (folder / "sweep.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="another version"):
        results.read(folder)
    assert len(results.read(make(folder).folder).trials) == len(state.trials)


def test_page_and_report_have_the_same_quantiles() -> None:
    page = Path(raylearner.__file__).parent / "observability/viewer/static/statistics.js"
    found = re.search(r"const T_95 = \[(.*?)\], T_95_OF_MANY = (.*?);", page.read_text())
    assert found is not None
    assert tuple(float(number) for number in found[1].split(",")) == results.T_95
    assert float(found[2]) == results.T_95_OF_MANY
