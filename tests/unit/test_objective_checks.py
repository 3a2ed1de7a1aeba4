"""Objectives that make no sense are refused, with the reason and the nearest valid choice."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from minimal import MINIMAL

from raylearner.config.checks import check, warnings
from raylearner.config.schema import RunConfig
from raylearner.config.section import sections_by_kind
from raylearner.learner.objective.corrections import CORRECTIONS, CorrectionSection
from raylearner.learner.objective.estimate import (
    EPISODE_ADVANTAGES,
    TOKEN_ADVANTAGES,
    AdvantageSection,
)
from raylearner.learner.objective.losses import POLICY_LOSSES, LossSection

VTRACE = {"kind": "vtrace"}
PPO, GPG = {"kind": "ppo"}, {"kind": "gpg"}
TIS = {"kind": "tis"}

REFUSED = """\
learner.critic: {advantage: {kind: gae}}
learner.critic: {advantage: {kind: vtrace}, loss: {kind: gpg}}
learner.critic: {critic: {}}
learner.critic.warmup_steps: {advantage: {kind: gae}, critic: {trunk: shared, warmup_steps: 1}}
learner.critic.path: {advantage: {kind: gae}, critic: {trunk: shared, path: x}}
learner.critic.warmup_steps: {advantage: {kind: gae}, critic: {warmup_steps: 100}}
learner.kl.reference: {kl: {}}
learner.kl.reference.kind: {kl: {reference: {kind: adapter_off}}}
learner.kl.reference.kind: {kl: {reference: {kind: refreshed}}, lora: {}}
learner.kl.coefficient: {kl: {coefficient: 0, controller: {kind: adaptive}}}
learner.kl.straight_through: {kl: {place: reward, straight_through: true, reference: {kind: frozen}}}
learner.kl.weighted: {kl: {place: reward, weighted: true, reference: {kind: frozen}}}
learner.kl.place: {kl: {place: reward, reference: {kind: frozen}}, advantage: {kind: gigpo}}
learner.corrections.0: {corrections: [{kind: tis}]}
learner.corrections.1: {loss: {kind: reinforce}, corrections: [{kind: rejection}, {kind: icepop}]}
learner.corrections.0: {loss: {kind: topr}, corrections: [{kind: mis}]}
learner.corrections.1: {loss: {kind: ppo}, corrections: [{kind: tis}, {kind: icepop}]}
learner.corrections.0: {advantage: {kind: vtrace}, critic: {}, loss: {kind: gpg}, corrections: [{kind: tis}]}
learner.loss.kind: {advantage: {kind: vtrace}, critic: {}, loss: {kind: reinforce}}
learner.corrections.0: {loss: {kind: ppo}, proximal: behavior, corrections: [{kind: tis}]}
learner.proximal: {proximal: behavior}
learner.proximal: {proximal: behavior, advantage: {kind: vtrace}, critic: {}, loss: {kind: ppo}}
learner.corrections.0.normalize: {loss: {kind: ppo}, proximal: interpolated, corrections: [{kind: tis, normalize: token}]}
learner.count_rejected: {loss: {kind: ppo}, proximal: behavior, corrections: [{kind: rejection}], count_rejected: false}
learner.advantage.kind: {advantage: {kind: gdpo}}
learner.advantage.kind: {advantage: {kind: remax}}
learner.resampling: {resampling: {}, num_mini_batches: 2}
learner.aggregation_scale: {aggregation: sequence_mean_of_sums_scaled}
learner.aggregation_scale: {aggregation_scale: 5}
learner.loss.delta: {loss: {kind: ppo, delta: 1.1}}
learner.advantage.rho_bar: {advantage: {kind: vtrace, c_bar: 2}, critic: {}, loss: {kind: gpg}}
learner.corrections.0.low: {loss: {kind: ppo}, corrections: [{kind: icepop, low: 6}]}
learner.reward.clip_low: {reward: {clip_low: 1, clip_high: 0}}
learner.loss.ratio_min: {loss: {kind: cispo, ratio_min: 9}}
learner.corrections.0.estimator: {corrections: [{kind: rejection, level: sequence_max}]}
learner.corrections.0.low: {corrections: [{kind: rejection, estimator: k3, low: 0.1}]}
"""
"""By line, the key that is named and the learner section that is refused."""
ODD = """\
learner.loss: {loss: {kind: gpg}, num_epochs: 2}
learner.max_kl: {max_kl: 0.1}
learner.aggregation: {loss: {kind: gmpo}, aggregation: token_sum}
learner.aggregation: {loss: {kind: dro, form: sequence}, aggregation: token_sum}
learner.kl.estimator: {kl: {estimator: k1, reference: {kind: frozen}}}
"""


def cases(table: str) -> list[tuple[str, str]]:
    return [
        (key, learner) for key, _, learner in (line.partition(": ") for line in table.splitlines())
    ]


def make_config(learner: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(yaml.safe_load(MINIMAL) | {"learner": learner} | sections)


@pytest.mark.parametrize(("key", "learner"), cases(REFUSED))
def test_an_objective_that_makes_no_sense_is_refused(key: str, learner: str) -> None:
    assert [finding.key for finding in check(make_config(yaml.safe_load(learner)))] == [key]


def test_gdpo_has_no_sum_of_rewards_to_clip() -> None:
    functions = [{"kind": "exact_match"}, {"kind": "f1"}]
    learner = {"advantage": {"kind": "gdpo"}}
    assert not list(check(make_config(learner, rewards={"functions": functions})))
    rewards = {"functions": functions, "clip": [0.0, 1.0]}
    (finding,) = check(make_config(learner, rewards=rewards))
    assert finding.key == "rewards.clip"


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind, section in sections_by_kind(AdvantageSection).items()
        if section.compares_in_group and kind != "gdpo"
    ],
)
def test_a_group_baseline_needs_a_group(kind: str) -> None:
    replay = {"group_size": 1, "partial_groups": "drop"}
    (finding,) = check(make_config({"advantage": {"kind": kind}}, replay=replay))
    assert finding.key == "replay.group_size"
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


@pytest.mark.parametrize(("key", "learner"), cases(ODD))
def test_an_odd_objective_is_warned_of(key: str, learner: str) -> None:
    config = make_config(yaml.safe_load(learner))
    assert check(config) == []
    assert any(warning.startswith(f"{key}:") for warning in warnings(config))


def test_the_documented_configuration_is_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert check(make_config(yaml.safe_load(shown)["learner"])) == []


def test_every_section_has_its_formula() -> None:
    assert set(sections_by_kind(LossSection)) == set(POLICY_LOSSES)
    assert set(sections_by_kind(CorrectionSection)) == set(CORRECTIONS)
    for kind, section in sections_by_kind(AdvantageSection).items():
        if kind != "custom":
            table = TOKEN_ADVANTAGES if section.is_per_token else EPISODE_ADVANTAGES
            assert kind in table
