"""Sweeps without a cluster: their trials, and the state of a sweep on disk."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from minimal import MINIMAL
from rows import write_jsonl

from raylearner.config.document import parse
from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems, Where
from raylearner.errors import ConfigError
from raylearner.jobs.sweep import plan
from raylearner.jobs.sweep.early_stopping import Asha
from raylearner.jobs.sweep.section import AshaSection, SweepMetric, SweepSection
from raylearner.jobs.sweep.state import Status, SweepState, read_progress

ROOT = Path(__file__).parents[2]


RATE = {
    "key": "learner.learning_rate",
    "sample": {"kind": "log_uniform", "low": 1e-4, "high": 1e-2},
}
ONE = {"key": "a.b", "values": [1]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(MINIMAL)
    return tmp_path


def make_sweep(**changes: Any) -> dict[str, Any]:
    axes = [
        {"key": "learner.learning_rate", "values": [1e-4, 1e-3]},
        {"key": "replay.group_size", "values": [4, 8]},
    ]
    return {"name": "s", "base": ["base.yaml"], "axes": axes, "seeds": [0, 1], **changes}


def read(**changes: Any) -> plan.Plan:
    Path("sweep.yaml").write_text(yaml.safe_dump(make_sweep(**changes)))
    return plan.read("sweep.yaml")


def problems(**changes: Any) -> str:
    with pytest.raises(ConfigProblems) as refused:
        read(**changes)
    return str(refused.value)


def test_a_grid_crosses_its_axes_and_repeats_each_point_by_seed(folder: Path) -> None:
    trials = read().trials
    assert [
        (t.values["learner.learning_rate"], t.values["replay.group_size"], t.seed) for t in trials
    ] == [(rate, size, seed) for rate in (1e-4, 1e-3) for size in (4, 8) for seed in (0, 1)]
    assert [t.number for t in trials] == list(range(8))
    last = trials[-1].config
    assert (last.learner.learning_rate, last.replay.group_size, last.run.seed) == (1e-3, 8, 1)
    assert last.run.name == "s-007"


def test_excluded_values_and_axes_that_do_not_apply_are_left_out(folder: Path) -> None:
    axes = [
        {"key": "learner.loss", "values": [{"kind": "ppo"}, {"kind": "cispo"}]},
        {
            "key": "learner.loss.clip_low",
            "values": [0.1, 0.2],
            "when": {"learner.loss": [{"kind": "ppo"}]},
        },
        {"key": "replay.group_size", "values": [4, 8]},
    ]
    exclude = [{"learner.loss": {"kind": "cispo"}, "replay.group_size": 8}]
    trials = read(axes=axes, exclude=exclude, seeds=[0]).trials
    assert [t.label for t in trials] == [
        "loss=ppo  clip_low=0.1  group_size=4",
        "loss=ppo  clip_low=0.1  group_size=8",
        "loss=ppo  clip_low=0.2  group_size=4",
        "loss=ppo  clip_low=0.2  group_size=8",
        "loss=cispo  group_size=4",
    ]


def test_draws_are_within_bounds_and_the_same_every_time(folder: Path) -> None:
    axes = [
        {"key": "replay.group_size", "values": [4, 8]},
        RATE,
        {"key": "replay.max_staleness", "sample": {"kind": "int_uniform", "low": 1, "high": 3}},
        {"key": "learner.max_grad_norm", "sample": {"kind": "uniform", "low": 0.5, "high": 2}},
        {"key": "learner.schedule", "sample": {"kind": "choice", "values": ["linear", "cosine"]}},
    ]
    drawn = [t.values for t in read(axes=axes, num_samples=20, seeds=[0]).trials]
    assert drawn == [t.values for t in read(axes=axes, num_samples=20, seeds=[0]).trials]
    rates = [values["learner.learning_rate"] for values in drawn]
    assert len(drawn) == 40
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 0.25 < sum(math.log10(rate) < -3 for rate in rates) / 40 < 0.75
    assert {values["replay.max_staleness"] for values in drawn} == {1, 2, 3}


def test_conditions_and_exclusions_apply_to_drawn_values(folder: Path) -> None:
    drawn = {"kind": "choice", "values": ["linear", "cosine"]}
    axes = [
        {"key": "learner.schedule", "sample": drawn},
        {"key": "replay.group_size", "values": [4, 8], "when": {"learner.schedule": ["cosine"]}},
        {"key": "replay.max_staleness", "sample": {"kind": "int_uniform", "low": 0, "high": 4}},
    ]
    exclude = [{"learner.schedule": "linear", "replay.max_staleness": 2}]
    changes = {"num_samples": 40, "seeds": [0]}
    found = [t.values for t in read(axes=axes, exclude=exclude, **changes).trials]
    sizes = {(v["learner.schedule"], v.get("replay.group_size")) for v in found}
    assert sizes == {("linear", None), ("cosine", 4), ("cosine", 8)}
    at_two = {v["learner.schedule"] for v in found if v["replay.max_staleness"] == 2}
    assert at_two == {"cosine"}
    without = [t.values for t in read(axes=axes, **changes).trials]
    assert [v for v in without if v in found] == found
    axes[1]["values"] = [2, 4]
    again = [t.values for t in read(axes=axes, **changes).trials]
    of_four = [v for v in without if v.get("replay.group_size") == 4]
    assert [v for v in again if v.get("replay.group_size") == 4] == of_four


def test_problems_of_the_file_and_of_trials_stand_at_its_lines_together(folder: Path) -> None:
    Path("sweep.yaml").write_text(
        "name: s\n"
        "base: [base.yaml]\n"
        "metric: {key: rollout/reward/man}\n"
        "axes:\n"
        "  - key: learner.lr\n"
        "    values:\n"
        "      - 1\n"
        "      - 2\n"
        "  - key: replay.group_size\n"
        "    values: [4]\n"
        "    sample: {kind: int_uniform, low: 1, high: 2}\n"
    )
    with pytest.raises(ConfigProblems) as refused:
        plan.read("sweep.yaml")
    assert [line.split(" ", 1)[0] for line in str(refused.value).splitlines()] == [
        "sweep.yaml:3",
        "sweep.yaml:7",
        "sweep.yaml:9",
        "3",
    ]
    assert "sweep.yaml:7  axes.0: learner.lr=1: unknown key" in str(refused.value)


def test_a_job_takes_no_base_from_outside_of_its_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = str(folder / "base.yaml")
    assert len(read(base=[outside]).trials) == 8
    package = folder / "working_dir_files" / "_ray_pkg"
    package.mkdir(parents=True)
    monkeypatch.chdir(package)
    assert "base.0: " in problems(base=[outside])


def test_all_problems_of_all_trials_are_reported_together(folder: Path) -> None:
    axes = [
        {"key": "learner.learning_rat", "values": [1]},
        {"key": "replay.group_size", "values": [0, 4]},
    ]
    message = problems(axes=axes)
    assert "learner.learning_rat=1: unknown key; did you mean 'learning_rate'?" in message
    assert "replay.group_size=0: must be >= 1, got 0" in message
    assert message.endswith("2 problems; nothing was started.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": [{"key": "data.system_prompt", "values": ["None", "x"]}]}, "axes.0.values.0: "),
        ({"metrik": 1}, "metrik: unknown key; did you mean 'metric'?"),
        ({"axes": [{"key": "run.seed", "values": [1]}]}, "'run.seed' is set by the sweep"),
        ({"axes": [{"key": "replay.extra"}]}, "must have either values or sample"),
        ({"axes": [{"key": "replay.extra", "values": []}]}, "has no values"),
        ({"axes": [{"key": "", "values": [1]}]}, "must read section.key, got ''"),
        (
            {"axes": [{"key": "a.b", "values": [1, 2]}], "exclude": [{"a.b": 9}]},
            "exclude.0: 'a.b' is never 9; its values: 1, 2",
        ),
        (
            {"axes": [ONE, {"key": "a.c", "values": [1], "when": {"a.b": [2]}}]},
            "axes.1.when.a.b: 'a.b' is never 2; its values: 1",
        ),
        (
            {"axes": [RATE, {"key": "a.c", "values": [1], "when": {RATE["key"]: [1e-3]}}]},
            "drawn from 0.0001 to 0.01",
        ),
        ({"axes": [RATE], "num_samples": 10**9}, "2000000000 trials"),
        ({"axes": [RATE], "num_samples": 900}, "1002 trials"),
        ({"base": ["../base.yaml"]}, "base.0: "),
        (
            {
                "early_stopping": {"kind": "asha", "grace_steps": 10},
                "overrides": {"run.num_steps": 10},
            },
            "early_stopping.grace_steps: must be < run.num_steps = 10, got 10",
        ),
        ({"axes": []}, "axes: must have at least 1, got []"),
        ({"base": []}, "base: must have at least 1, got []"),
        ({"name": "../s"}, "name: must be a name"),
        ({"seeds": [1, 1]}, "seeds: "),
        ({"overrides": {"run.dir": "x"}}, "overrides.run.dir: is set by the sweep"),
        ({"overrides": {"replay.group_size": 2}}, "overrides.replay.group_size: "),
        ({"metric": {"key": "rollout/reward/man"}}, "did you mean 'rollout/reward/mean'?"),
        (
            {"metric": {"key": "evaluation/reward/mean_without_failed"}},
            "'evaluation/reward/mean', which",
        ),
        ({"exclude": [{"replay.extra": 1}]}, "exclude.0: 'replay.extra'"),
        ({"exclude": [{"replay.group_size": 4}, {"replay.group_size": 8}]}, "leaves no trial"),
        (
            {"axes": [{"key": "replay.extra", "values": [0], "when": {"x": [1]}}]},
            "axes.0.when.x: ",
        ),
        (
            {"axes": [{"key": "a.b", "sample": {"kind": "uniform", "low": 2, "high": 1}}]},
            "low must be < high",
        ),
        ({"seeds": [-1]}, "seeds.0: must be >= 0, got -1\n1 problem; nothing was started."),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    assert message in problems(**changes)


def test_a_printed_command_gives_the_trial_again_in_its_directory(folder: Path) -> None:
    axes = [{"key": "learner.loss", "values": [{"kind": "ppo", "clip_low": 0.1}]}]
    swept = read(axes=axes, overrides={"sampling.top_p": 0.9, "learner.schedule": "cosine"})
    for trial, command in zip(swept.trials, plan.commands(swept).values(), strict=True):
        words = shlex.split(command)
        assert words[:2] == ["raylearner", "train"]
        again = load([words[2]], words[3:])
        assert again.model_copy(update={"run": trial.config.run}) == trial.config
        assert again.run.seed == trial.seed
        assert again.run.dir == f"runs/sweeps/s/trials/{trial.number:03d}"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_sweep_that_ships_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    swept = plan.read(str(path))
    assert len(swept.trials) >= 8
    assert swept.sweep.name == path.stem


def test_a_sweep_resumes_from_its_folder_and_refuses_that_of_another(folder: Path) -> None:
    state = SweepState(folder / "sweep", read())
    state.trials[2].status, state.trials[2].value = Status.DONE, 0.5
    state.save()
    again = SweepState(folder / "sweep", read())
    assert again.is_resumed
    assert (again.trials[2].status, again.trials[2].value) == (Status.DONE, 0.5)
    SweepState(folder / "sweep", read(max_concurrent=2))
    record = json.loads((folder / "sweep" / "sweep.json").read_text())
    assert record["metric"]["goal"] == "max"
    points = [(point["values"], point["seed"]) for point in record["points"]]
    assert points == [(trial.values, trial.seed) for trial in read().trials]
    with pytest.raises(ConfigError, match="another name"):
        SweepState(folder / "sweep", read(seeds=[0, 1, 2]))
    Path("base.yaml").write_text(MINIMAL + "run: {num_steps: 7}\n")
    with pytest.raises(ConfigError, match="another name"):
        SweepState(folder / "sweep", read())


def test_a_record_that_is_damaged_or_in_the_place_of_the_folder_is_refused(folder: Path) -> None:
    path = folder / "sweep" / "sweep.json"
    SweepState(path.parent, read())
    whole = json.loads(path.read_text())
    for text, message in (
        ("{", "Expecting property name"),
        ('{"trials": [1]}', "'plan'"),
        (json.dumps({**whole, "trials": [1]}), r"trials\.0: "),
        (json.dumps({**whole, "trials": whole["trials"][:-1]}), "7 trials, expected 8"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            SweepState(path.parent, read())
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="/file: "):
        SweepState(folder / "file", read())


def test_a_value_is_the_mean_of_the_last_steps_or_the_last_evaluation(tmp_path: Path) -> None:
    rows = [{"step": s, "r": float(s)} for s in (1, 2, 3)] + [{"step": 4, "r": None}]
    write_jsonl(tmp_path / "metrics.jsonl", *rows)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    evaluations = [{"step": 0, "reward/mean": 0.1}, {"step": 4, "reward/mean": 0.7}]
    write_jsonl(tmp_path / "eval.jsonl", *evaluations)
    read = read_progress(tmp_path, SweepMetric(key="r", last_steps=2))
    assert read.curve == [(1, 1.0), (2, 1.5), (3, 2.5)]
    assert (read.num_steps, read.num_damaged) == (4, 0)
    evaluated = read_progress(tmp_path, SweepMetric(key="evaluation/reward/mean"))
    assert evaluated.curve[-1] == (4, 0.7)
    assert read_progress(tmp_path / "none", SweepMetric()).curve == []


def test_damaged_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    lines = [b'{"step": 1, "r": 1}', b'{"step": 2, "r"', b"\xff", b"[3]", b'{"step": 4, "r": 4}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b""]))
    read = read_progress(tmp_path, SweepMetric(key="r", last_steps=1))
    assert (read.num_steps, read.curve, read.num_damaged) == (4, [(1, 1.0), (4, 4.0)], 3)


def make_asha() -> Asha:
    section = AshaSection(kind="asha", grace_steps=4, reduction_factor=2)
    return Asha(section, SweepMetric(), max_steps=16)


def curve(value: float, num_steps: int) -> list[tuple[int, float]]:
    return [(step, value) for step in range(1, num_steps + 1)]


def test_asha_stops_the_worse_at_a_rung_and_nobody_before_or_at_the_end() -> None:
    asha = make_asha()
    assert not asha.should_stop(0, curve(0.9, 8))
    assert not asha.should_stop(1, curve(0.1, 3))
    assert asha.should_stop(1, curve(0.1, 4))
    assert not asha.should_stop(0, curve(0.9, 16))


def test_asha_compares_with_all_that_a_stopped_trial_had_written() -> None:
    asha = make_asha()
    assert not asha.should_stop(0, curve(0.9, 4))
    assert asha.should_stop(1, curve(0.1, 8))
    assert asha.should_stop(0, curve(0.05, 8))


def test_an_axis_takes_null_and_a_choice_named_none(folder: Path) -> None:
    axes = [
        {"key": "data.system_prompt", "values": [None, "hello"]},
        {"key": "learner.advantage.normalize", "values": ["none"]},
    ]
    trials = read(axes=axes, seeds=[0]).trials
    assert [trial.config.data.system_prompt for trial in trials] == [None, "hello"]


def test_a_sweep_of_one_axis_needs_no_more() -> None:
    sweep = SweepSection.model_validate(make_sweep(axes=[{"key": "a.b", "values": [1, 1, 2]}]))
    assert plan.make_points(sweep) == [{"a.b": 1}, {"a.b": 2}]


@pytest.mark.parametrize(
    ("text", "is_bare"),
    [
        ("s-003", True),
        ("configs/a_b.yaml", True),
        ("2026-11-29", True),
        ("1e3", False),
        ("007", False),
        ("0x1f", False),
        ("true", False),
        ("None", False),
        ("a b", False),
        ("-", False),
    ],
)
def test_text_is_an_override_without_quotes_where_that_reads_the_same(
    text: str, is_bare: bool
) -> None:
    override = plan.to_override(text)
    assert (override == text) == is_bare
    tree, _ = parse(override, Where(0, 0, ""))
    assert tree is not None
    assert tree.plain() == text
