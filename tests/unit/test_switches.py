"""A section is switched off by its own name."""

from pathlib import Path
from typing import get_args

import pytest
import yaml
from minimal import MINIMAL
from pydantic import BaseModel

from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.config.report import resolved_yaml
from raylearner.config.schema import ObservabilitySection, RunConfig
from raylearner.config.section import section_types
from raylearner.jobs.sweep import plan

OPTIONAL = [
    "evaluation",
    "observability",
    "observability.wandb",
    "observability.completions",
    "observability.profile",
    "learner.lora",
    "learner.kl",
    "learner.critic",
    "learner.resampling",
    "model.vision",
    "model.warm_start",
]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(MINIMAL)
    return "base.yaml"


def value_at(config: BaseModel, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def nullable_sections(root: type[BaseModel], prefix: str = "") -> list[str]:
    """Keys of sections that may be null, beside those of lists and of sections by kind."""
    found: list[str] = []
    for name, field in root.model_fields.items():
        models = section_types(field.annotation)
        if models and type(None) in get_args(field.annotation):
            found.append(f"{prefix}{name}")
        if len(models) == 1:
            found += nullable_sections(models[0], f"{prefix}{name}.")
    return found


def test_every_optional_section_is_known_here() -> None:
    kinds = {"model.vision", "model.warm_start", "learner.kl.reference"}
    assert set(nullable_sections(RunConfig)) - kinds == set(OPTIONAL) - kinds


@pytest.mark.parametrize("key", OPTIONAL)
def test_null_switches_a_section_off_and_stays_in_the_dumped_configuration(
    base: str, key: str
) -> None:
    config = load([base], [f"{key}=null"])
    assert value_at(config, key) is None
    Path("saved.yaml").write_text(resolved_yaml(config))
    assert value_at(load(["saved.yaml"], []), key) is None


def test_a_later_file_switches_a_section_on_again(base: str) -> None:
    Path("off.yaml").write_text("evaluation: null\n")
    Path("on.yaml").write_text("evaluation: {num_prompts: 3}\n")
    config = load([base, "off.yaml", "on.yaml"], [])
    assert config.evaluation is not None
    assert config.evaluation.num_prompts == 3


def test_null_empties_a_list_whose_default_is_empty(base: str) -> None:
    Path("on.yaml").write_text("learner: {corrections: [{kind: icepop}]}\n")
    assert load([base, "on.yaml"], ["learner.corrections=null"]).learner.corrections == ()
    with pytest.raises(ConfigProblems, match=r"rewards\.functions"):
        load([base], ["rewards.functions=null"])


def test_without_observability_nothing_is_recorded_besides_metrics(base: str) -> None:
    recorded = load([base], ["observability=null"]).recorded
    assert recorded.completions is None
    assert recorded.wandb is None
    switches = [name for name, value in recorded if value is True]
    assert switches == []
    assert recorded.trajectories_every_steps == 0
    assert load([base], []).recorded == ObservabilitySection()


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("evaluation=false", "write null to switch it off"),
        ("evaluation=off", "write null to switch it off"),
        ("observability=none", "write null to switch it off"),
        ("learner.lora=true", "write {} for its defaults"),
    ],
)
def test_other_words_for_a_switch_are_answered_with_what_to_write(
    base: str, override: str, advice: str
) -> None:
    with pytest.raises(ConfigProblems) as refused:
        load([base], [override])
    (problem,) = refused.value.problems
    assert problem.key == override.partition("=")[0]
    assert problem.text.endswith(advice)


def test_an_axis_of_a_sweep_switches_a_section_off(base: str) -> None:
    axis = {"key": "evaluation", "values": [None, {"num_prompts": 3}]}
    Path("sweep.yaml").write_text(yaml.safe_dump({"name": "s", "base": [base], "axes": [axis]}))
    off, on = plan.read("sweep.yaml").trials
    assert off.config.evaluation is None
    assert "evaluation=null" in off.overrides
    assert off.label == "evaluation=null"
    assert on.config.evaluation is not None
