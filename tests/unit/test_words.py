"""Words that YAML reads as text where null was meant."""

from pathlib import Path

import pytest
import yaml

from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.config.report import resolved_yaml
from raylearner.jobs.sweep import plan

BASE = """\
model: {kind: tiny}
data: {train: {kind: calculator}}
environment: {kind: tool_use}
actors: {engine: {kind: scripted, script: "a:B", arguments: {}}}
learner: {advantage: {kind: grpo}}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


def refused(base: str, *overrides: str) -> set[str]:
    with pytest.raises(ConfigProblems) as caught:
        load([base], overrides)
    return {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize("word", ["None", "none", "NONE", "nil", '"None"', "'null'", '"~"'])
@pytest.mark.parametrize(
    "key",
    ["environment.observation_tag", "cluster.address", "data.system_prompt", "run.dir"],
)
def test_a_word_for_nothing_is_not_text_where_null_may_stand(
    base: str, key: str, word: str
) -> None:
    assert refused(base, f"{key}={word}") == {key}


def test_null_itself_is_taken_however_it_is_written(base: str) -> None:
    for word in ("null", "~", "Null", ""):
        assert load([base], [f"data.system_prompt={word}"]).data.system_prompt is None


def test_arguments_of_users_get_no_word_by_accident(base: str) -> None:
    key = "actors.engine.arguments"
    assert refused(base, f"{key}={{a: None, b: [none]}}") == {f"{key}.a", f"{key}.b.0"}
    engine = load([base], [f"{key}={{a: 'None', b: ['none'], c: null, d: off}}"]).actors.engine
    assert engine.model_dump()["arguments"] == {"a": "None", "b": ["none"], "c": None, "d": "off"}


def test_a_choice_that_is_called_none_stays_one(base: str) -> None:
    config = load([base], ["learner.advantage.normalize=none"])
    assert getattr(config.learner.advantage, "normalize", "") == "none"


def test_numbers_are_not_null_words_either(base: str) -> None:
    assert refused(base, "replay.max_concurrent_groups=None") == {"replay.max_concurrent_groups"}


def test_what_a_run_directory_keeps_is_read_back(base: str, tmp_path: Path) -> None:
    config = load([base], ["actors.engine.arguments={a: 'None', b: 'off', c: 'nil'}"])
    saved = tmp_path / "saved.yaml"
    saved.write_text(resolved_yaml(config))
    assert load([str(saved)], []) == config


def test_sweeps_refuse_the_word_too(base: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"name: s\nbase: [{base}]\naxes: [{{key: data.system_prompt, values: [None, hello]}}]\n"
    )
    with pytest.raises(ConfigProblems) as caught:
        plan.read(str(file))
    assert {problem.where.line for problem in caught.value.problems} == {3}
    file.write_text(
        yaml.safe_dump(
            {
                "name": "s",
                "base": [base],
                "axes": [
                    {"key": "learner.learning_rate", "values": [1e-6, 3e-6]},
                    {"key": "data.system_prompt", "values": [None, "hello"]},
                    {"key": "learner.advantage.normalize", "values": ["none"]},
                ],
            }
        )
    )
    assert [t.config.data.system_prompt for t in plan.read(str(file)).trials] == [
        *(None, "hello"),
        *(None, "hello"),
    ]
