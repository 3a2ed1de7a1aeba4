"""Objectives that make no sense are refused, with the reason and the nearest valid choice."""

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from raylearner.config.advantage import (
    CRITIC_ESTIMATORS,
    GROUP_BASELINES,
    TOKEN_ESTIMATORS,
    AdvantageSection,
)
from raylearner.config.checks import check, notes
from raylearner.config.correction import WEIGHING, CorrectionSection
from raylearner.config.loss import (
    BEHAVIOR_WEIGHTED,
    SELECTS_TOKENS,
    WITHOUT_PROXIMAL,
    Aggregation,
    LossSection,
)
from raylearner.config.schema import RunConfig
from raylearner.config.section import sections_by_kind
from raylearner.learner.objective.aggregation import AggregationMode
from raylearner.learner.objective.losses import POLICY_LOSSES

MINIMAL: dict[str, Any] = {
    "model": {"kind": "tiny"},
    "data": {"train": {"kind": "calculator"}},
    "environment": {"kind": "single_turn"},
    "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
}
GAE, VTRACE = {"kind": "gae"}, {"kind": "vtrace"}
PPO, GPG = {"kind": "ppo"}, {"kind": "gpg"}
TIS, ICEPOP, REJECTION = {"kind": "tis"}, {"kind": "icepop"}, {"kind": "rejection"}
FROZEN = {"kind": "frozen"}


def make_config(learner: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(MINIMAL | {"learner": learner} | sections)


@pytest.mark.parametrize(
    ("learner", "key", "words"),
    [
        ({"advantage": GAE}, "learner.critic", "required with learner.advantage.kind 'gae'"),
        ({"advantage": VTRACE, "loss": GPG}, "learner.critic", "add `critic: {}`"),
        ({"critic": {}}, "learner.critic", "'grpo' has no use for values; remove"),
        (
            {"advantage": GAE, "critic": {"trunk": "shared", "warmup_steps": 1}},
            "learner.critic.warmup_steps",
            "must be 0 with trunk 'shared'",
        ),
        (
            {"advantage": GAE, "critic": {"trunk": "shared", "path": "x"}},
            "learner.critic.path",
            "take 'own'",
        ),
        (
            {"advantage": GAE, "critic": {"warmup_steps": 100}},
            "learner.critic.warmup_steps",
            "must be < run.num_steps = 100",
        ),
        ({"kl": {}}, "learner.kl.reference", "use `reference: {kind: frozen}`"),
        (
            {"kl": {"reference": {"kind": "adapter_off"}}},
            "learner.kl.reference.kind",
            "without its LoRA adapter",
        ),
        (
            {"kl": {"reference": {"kind": "refreshed"}}, "lora": {}},
            "learner.kl.reference.kind",
            "use 'adapter_off' or 'frozen'",
        ),
        (
            {"kl": {"coefficient": 0, "controller": {"kind": "adaptive"}}},
            "learner.kl.coefficient",
            "0.001 will do",
        ),
        (
            {"kl": {"place": "reward", "straight_through": True, "reference": FROZEN}},
            "learner.kl.straight_through",
            "learner.kl.place to 'loss'",
        ),
        (
            {"kl": {"place": "reward", "weighted": True, "reference": FROZEN}},
            "learner.kl.weighted",
            "set it to false",
        ),
        (
            {
                "kl": {"place": "reward", "reference": FROZEN},
                "advantage": {"kind": "gigpo"},
            },
            "learner.kl.place",
            "must be 'loss'",
        ),
        ({"corrections": [TIS]}, "learner.corrections.0", "'decoupled_ppo' does so itself"),
        (
            {"loss": {"kind": "reinforce"}, "corrections": [REJECTION, ICEPOP]},
            "learner.corrections.1",
            "take 'rejection'",
        ),
        (
            {"loss": {"kind": "topr"}, "corrections": [{"kind": "mis"}]},
            "learner.corrections.0",
            "set learner.loss.kind to 'ppo' or 'gpg'",
        ),
        (
            {"loss": PPO, "corrections": [TIS, ICEPOP]},
            "learner.corrections.1",
            "that 'tis' weighs by already",
        ),
        (
            {"advantage": VTRACE, "critic": {}, "loss": GPG, "corrections": [TIS]},
            "learner.corrections.0",
            "V-trace's advantage does",
        ),
        (
            {"advantage": VTRACE, "critic": {}, "loss": {"kind": "reinforce"}},
            "learner.loss.kind",
            "take 'gpg'",
        ),
        (
            {"loss": PPO, "proximal": "behavior", "corrections": [TIS]},
            "learner.corrections.0",
            "the ratio of learner.loss.kind 'ppo' is that weight",
        ),
        ({"proximal": "behavior"}, "learner.proximal", "nothing to decouple"),
        (
            {"proximal": "behavior", "advantage": VTRACE, "critic": {}, "loss": PPO},
            "learner.proximal",
            "set this to 'recomputed', or take loss 'gpg'",
        ),
        (
            {
                "loss": PPO,
                "proximal": "interpolated",
                "corrections": [{"kind": "tis", "normalize": "token"}],
            },
            "learner.corrections.0.normalize",
            "set that to 'recomputed'",
        ),
        (
            {
                "loss": PPO,
                "proximal": "behavior",
                "corrections": [REJECTION],
                "count_rejected": False,
            },
            "learner.count_rejected",
            "before its first update",
        ),
        (
            {"advantage": {"kind": "gdpo"}},
            "learner.advantage.kind",
            "rewards.functions has 1; with one it is 'grpo'",
        ),
        (
            {"advantage": {"kind": "remax"}},
            "learner.advantage.kind",
            "set replay.play_greedy to true",
        ),
        (
            {"resampling": {}, "num_mini_batches": 2},
            "learner.resampling",
            "set learner.num_mini_batches to 1",
        ),
        (
            {"aggregation": "sequence_mean_of_sums_scaled"},
            "learner.aggregation_scale",
            "renderer.max_response_tokens = 256",
        ),
        ({"aggregation_scale": 5}, "learner.aggregation_scale", "remove it, or take"),
        ({"loss": PPO | {"delta": 1.1}}, "learner.loss.delta", "must be > 1 + clip_high = 1.2"),
        (
            {"advantage": VTRACE | {"c_bar": 2}, "critic": {}, "loss": GPG},
            "learner.advantage.rho_bar",
            "must be >= c_bar = 2",
        ),
        (
            {"loss": PPO, "corrections": [ICEPOP | {"low": 6}]},
            "learner.corrections.0.low",
            "must be < high = 5, got 6",
        ),
        ({"reward": {"clip_low": 1, "clip_high": 0}}, "learner.reward.clip_low", "nothing lies"),
        (
            {"loss": {"kind": "cispo", "ratio_min": 9}},
            "learner.loss.ratio_min",
            "must be < ratio_max = 5",
        ),
        (
            {"corrections": [REJECTION | {"level": "sequence_max"}]},
            "learner.corrections.0.estimator",
            "take 'k2' or 'k3'",
        ),
        (
            {"corrections": [REJECTION | {"estimator": "k3", "low": 0.1}]},
            "learner.corrections.0.low",
            "never negative",
        ),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused(
    learner: dict[str, Any], key: str, words: str
) -> None:
    findings = check(make_config(learner))
    assert [finding.key for finding in findings] == [key]
    assert words in findings[0].text


def test_gdpo_has_no_sum_of_rewards_to_clip() -> None:
    functions = [{"kind": "exact_match"}, {"kind": "f1"}]
    learner = {"advantage": {"kind": "gdpo"}}
    assert not list(check(make_config(learner, rewards={"functions": functions})))
    rewards = {"functions": functions, "clip": [0.0, 1.0]}
    (finding,) = check(make_config(learner, rewards=rewards))
    assert finding.key == "rewards.clip"


@pytest.mark.parametrize("kind", sorted(GROUP_BASELINES - {"gdpo"}))
def test_a_group_baseline_needs_a_group(kind: str) -> None:
    replay = {"group_size": 1, "partial_groups": "drop"}
    (finding,) = check(make_config({"advantage": {"kind": kind}}, replay=replay))
    assert finding.key == "replay.group_size"
    assert "'reinforce_plus_plus' and 'gae' need none" in finding.text
    if kind not in ("pass_at_k", "gigpo"):
        raw = {"advantage": {"kind": kind, "group_of_one": "raw"}}
        assert check(make_config(raw, replay=replay)) == []


def test_a_greedy_episode_needs_remax() -> None:
    replay = {"play_greedy": True}
    (finding,) = check(make_config({}, replay=replay))
    assert finding.key == "replay.play_greedy"
    assert check(make_config({"advantage": {"kind": "remax"}}, replay=replay)) == []


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"loss": PPO, "corrections": [TIS]},
        {"advantage": VTRACE, "critic": {}, "loss": GPG},
        {"loss": PPO, "proximal": "interpolated"},
    ],
)
def test_truncated_sampling_is_refused_where_engine_probabilities_count(
    learner: dict[str, Any],
) -> None:
    is_compared = check(make_config(learner, sampling={"top_p": 0.9}))
    expected = [] if learner.get("loss") == PPO and len(learner) == 1 else ["sampling.top_p"]
    assert [finding.key for finding in is_compared] == expected


def test_what_uses_no_engine_probability_may_truncate_but_not_be_greedy() -> None:
    assert check(make_config({"loss": PPO}, sampling={"top_p": 0.9})) == []
    findings = check(make_config({"loss": PPO}, sampling={"temperature": 0.0}))
    assert [finding.key for finding in findings] == ["sampling.temperature"]


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"loss": GPG, "num_epochs": 2}, "'gpg' knows no ratio"),
        ({"max_kl": 0.1}, "no effect with a single update"),
        ({"loss": {"kind": "gmpo"}, "aggregation": "token_sum"}, "always aggregated by its mean"),
        (
            {"kl": {"estimator": "k1", "reference": FROZEN}},
            "the gradient of 'k1' is 0 in expectation",
        ),
    ],
)
def test_what_is_allowed_and_odd_is_noted(learner: dict[str, Any], words: str) -> None:
    config = make_config(learner)
    assert check(config) == []
    assert any(words in note for note in notes(config))


def test_the_documented_configuration_is_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert check(make_config(yaml.safe_load(shown)["learner"])) == []


def test_the_options_of_a_loss_are_those_of_its_function() -> None:
    sections = sections_by_kind(LossSection)
    assert set(sections) == set(POLICY_LOSSES)
    internal = {"inputs", "count_empty_rows", "log_ratio_limit", "generator", "chosen"}
    for kind, section in sections.items():
        parameters = set(inspect.signature(POLICY_LOSSES[kind]).parameters)
        assert set(section.model_fields) - {"kind"} == parameters - internal, kind


def test_every_set_of_kinds_names_kinds() -> None:
    advantages, losses = set(sections_by_kind(AdvantageSection)), set(sections_by_kind(LossSection))
    assert advantages >= GROUP_BASELINES | CRITIC_ESTIMATORS | TOKEN_ESTIMATORS
    assert losses >= BEHAVIOR_WEIGHTED | WITHOUT_PROXIMAL | SELECTS_TOKENS
    assert set(sections_by_kind(CorrectionSection)) >= WEIGHING
    assert get_args(Aggregation) == get_args(AggregationMode)
