"""The reward and data sections: what is refused, all at once, and how sources are written."""

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


def test_all_wrong_functions_are_named_at_once(base: str) -> None:
    kinds = "[{kind: exact_anser}, {kind: judge}, {kind: f1, wieght: 2}, {kind: ':x'}]"
    said = problems(base, f"rewards.functions={kinds}")
    assert len(said) == 5
    assert said[0].startswith("rewards.functions.0.kind: unknown kind 'exact_anser'")
    assert said[0].endswith("'module:name'; did you mean 'exact_answer'?")
    assert said[1:3] == [
        "rewards.functions.1.url: required, but missing",
        "rewards.functions.1.model: required, but missing",
    ]
    assert said[3] == "rewards.functions.2.wieght: unknown key; did you mean 'weight'?"
    assert said[4] == "rewards.functions.3.kind: must be written module:name, got ':x'"


def test_functions_that_cannot_be_imported_are_named_before_anything_starts(base: str) -> None:
    said = problems(base, "rewards.functions=[{kind: mine:reward}, {kind: mine:no}, {kind: nil:f}]")
    assert [line.partition(": ")[0] for line in said] == [
        "rewards.functions.1.kind",
        "rewards.functions.2.kind",
    ]
    assert "'mine:no' cannot be imported: AttributeError" in said[0]
    assert "'nil:f' cannot be imported: ModuleNotFoundError" in said[1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rewards.clip=[1, 1]"], "must rise, got 1 to 1"),
        (["rewards.functions=[]"], "no episode would have a reward"),
        (
            ["rewards.functions=[{kind: tool_use, min: 1, max: 0}]", "environment.kind=tool_use"],
            "rewards.functions.0.min: must be <= max = 0, got 1",
        ),
        (["rewards.functions=[{kind: tool_use}]"], "environment.kind is 'single_turn'"),
        (["rewards.functions=[{kind: retrieval_hit}]"], "give environment.tools a page_search"),
        (
            ["rewards.functions=[{kind: retrieval_hit}]", "environment.kind=tool_use"],
            "rewards.functions.0.kind: 'retrieval_hit' looks at pages",
        ),
        (["rewards.functions=[{kind: reasoning_gym}]"], "sources of that kind, and there is none"),
        (
            ["rewards.functions=[{kind: judge, url: 'http://h', model: m, min_score: 10}]"],
            "must be < max_score = 10, got 10",
        ),
        (
            ["rewards.functions=[{kind: judge, url: 'http://h', model: m, template: 'x {who}'}]"],
            "must hold {completion} and may hold {answer}, {prompt}",
        ),
        (
            [
                "rewards.functions=[{kind: judge, url: 'http://h', model: m,"
                " extra_arguments: {temperature: 1, stream: true}}]"
            ],
            "rewards.functions.0.extra_arguments: must not hold temperature, stream",
        ),
        (
            ["rewards.functions=[{kind: model, path: ./no/such}]"],
            "rewards.functions.0.path: no such directory './no/such'",
        ),
        (["rewards.functions=[{kind: f1, name: a/b}]"], "must be a name without a slash"),
        (
            [
                "rewards.functions=[{kind: mine:reward, per: group}]",
                "replay.play_greedy=true",
                "learner.advantage.kind=remax",
            ],
            "the greedy episode is in no group",
        ),
        (["data.sampler.kind=nil:Class"], "'nil:Class' cannot be imported"),
        (["data.sampler.kind=shufle"], "did you mean 'shuffle'?"),
        (["data.train=[]"], "is an empty list"),
        (
            ["data.train=[{kind: calculator}, {kind: calculator}]"],
            "2 sources are reported as 'calculator'",
        ),
        (["data.train.weight=0"], "must be > 0, got 0"),
        (
            ["data.train=[{kind: calculator}, {kind: parquet, path: no.parquet}]"],
            "data.train.1.path: no such file 'no.parquet'",
        ),
        (
            ["data.train={kind: reasoning_gym, task: x, parameters: {seed: 3}}"],
            "is set by data.train.0.seed",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(base: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigProblems) as error:
        load([base], overrides)
    assert words in str(error.value)


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
    with pytest.raises(ConfigError, match="reward models take 1 of 1 GPUs"):
        resolve(config, num_gpus=1.0)
