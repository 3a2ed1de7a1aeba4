"""Sources and reward functions of a configuration: mixtures, and the CPUs and GPUs of reward models."""

import sys
import types
from pathlib import Path

import pytest

from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.config.report import resolved_yaml
from raylearner.config.resources import resolve
from raylearner.errors import ConfigError

BASE = """\
model: {kind: tiny}
data: {train: {kind: calculator, num_prompts: 20}}
environment: {kind: single_turn}
actors: {engine: {kind: vllm, max_model_tokens: 512}}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return str(path)


@pytest.fixture(autouse=True)
def user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("mine")
    module.reward = lambda episode: 1.0
    monkeypatch.setitem(sys.modules, "mine", module)


def problems(base: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigProblems) as error:
        load([base], list(overrides))
    return [f"{problem.key}: {problem.text}" for problem in error.value.problems]


def test_a_single_source_is_a_list_of_one_and_its_keys_are_as_written(base: str) -> None:
    config = load([base], ["data.train.num_prompts=7"])
    assert [source.num_prompts for source in config.data.train] == [7]
    (said,) = problems(base, "data={train: {kind: calculator, num_promts: 7}}")
    assert said == "data.train.num_promts: unknown key; did you mean 'num_prompts'?"


def test_a_mixture_survives_being_written_out(base: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}')
    mixture = f"[{{kind: calculator, weight: 3}}, {{kind: jsonl, path: {rows}, source: mine}}]"
    config = load(
        [base],
        [
            f"data.train={mixture}",
            "data.sampler={kind: by_difficulty, keep_every: 2}",
            "rewards.functions=[{kind: mine:reward, arguments: {a: 1}}, {kind: math_verify}]",
        ],
    )
    assert config.data.weights == {"calculator": 3.0, "mine": 1.0}
    assert config.rewards.names == ("reward", "math_verify")
    written = tmp_path / "resolved.yaml"
    written.write_text(resolved_yaml(config))
    assert load([str(written)], []) == config


def test_reward_models_count_among_what_a_run_needs(base: str) -> None:
    plain = load([base], [])
    config = load([base], ["rewards.functions=[{kind: model, path: x, cpus: 2, gpus: 0.5}]"])
    assert config.cpus_needed == plain.cpus_needed + 2
    assert config.gpus_needed == plain.gpus_needed + 0.5


def test_reward_models_keep_their_gpus_from_what_auto_shares_out(base: str) -> None:
    config = load([base], ["rewards.functions=[{kind: model, path: x, gpus: 0.5}]"])
    resolved = resolve(config, num_gpus=4.0).config
    alone = resolve(load([base], []), num_gpus=3.0).config
    assert resolved.actors.gpus_per_actor == alone.actors.gpus_per_actor
    assert resolved.learner.gpus_per_rank == alone.learner.gpus_per_rank
    assert resolved.gpus_needed <= 4
    with pytest.raises(ConfigError, match=r"rewards\.functions"):
        resolve(config, num_gpus=1.0)
