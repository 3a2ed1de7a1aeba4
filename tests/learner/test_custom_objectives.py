"""Losses, advantages and corrections of a module outside the package, through the learner."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from learners import assert_same_weights, make_groups, make_learner, step, weights_of
from minimal import MINIMAL

from raylearner.config.loader import load
from raylearner.config.problems import ConfigProblems
from raylearner.errors import LearnerError
from raylearner.types import TrajectoryGroup

MODULE = """
    from typing import Literal

    import torch

    from raylearner.config.section import PositiveFloat, Section
    from raylearner.learner.batch.metric import Mean
    from raylearner.learner.objective.advantages import centered
    from raylearner.learner.objective.importance import Correction
    from raylearner.learner.objective.loss import LossOutput, weigh


    class Scaled(Section):
        scale: PositiveFloat
        form: Literal["plain", "other"] = "plain"


    def policy_gradient(inputs, config: Scaled):
        inputs = inputs.without_masked()
        values = -config.scale * inputs.advantages * inputs.logprobs
        metrics = {"my_scale": Mean.of(torch.full_like(values, config.scale), inputs.mask)}
        return LossOutput(values=weigh(values, inputs.weights), metrics=metrics)


    def mean_baseline(episodes, options):
        return options.get("scale", 1.0) * centered(episodes.rewards, episodes.groups, "zero")


    def mean_baseline_by_token(tokens, options):
        by_episode = centered(tokens.episodes.rewards, tokens.episodes.groups, "zero")
        return tokens.rows.spread(by_episode[tokens.row_episodes])


    def truncate(inputs, options):
        weights = inputs.log_ratio.exp().clamp(max=options["high"])
        return Correction(weights=weights, keep=inputs.mask, metrics={})


    def wrong_shape(inputs, options):
        tensor = torch.zeros(1)
        kind = options.get("kind")
        if kind == "loss":
            return LossOutput(values=tensor)
        return Correction(weights=tensor, keep=tensor, metrics={}) if kind else tensor


    def one_argument(inputs):
        return inputs
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that only this test can import."""
    name = f"objectives_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    return name


def custom(function: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "custom", "function": function, **keys}


def play(folder: Path, groups: list[TrajectoryGroup], **keys: Any) -> tuple[Any, dict[str, Any]]:
    base = {"compute_dtype": "float64", "learning_rate": 1e-2, "loss": {"kind": "gpg"}}
    learner = make_learner(folder, base | keys)
    return step(learner, groups).metrics, weights_of(learner)


def test_custom_objectives_train_as_the_built_in_ones_do(tiny_folder: Path, module: str) -> None:
    groups = make_groups(0)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"loss": custom(f"{module}:policy_gradient", options={"scale": 1.0})},
            {"loss": {"kind": "gpg"}},
        ),
        (
            {"advantage": custom(f"{module}:mean_baseline")},
            {"advantage": {"kind": "dr_grpo"}},
        ),
        (
            {"advantage": custom(f"{module}:mean_baseline_by_token", level="token")},
            {"advantage": {"kind": "dr_grpo"}},
        ),
        (
            {"corrections": [custom(f"{module}:truncate", options={"high": 1.5})]},
            {"corrections": [{"kind": "tis", "high": 1.5}]},
        ),
    ]
    for ours, built_in in pairs:
        metrics, weights = play(tiny_folder, groups, **ours)
        _, wanted = play(tiny_folder, groups, **built_in)
        if "loss" in ours:
            assert metrics["learner/my_scale"] == 1.0
        assert_same_weights(weights, wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("sort", "options"),
    [("loss", {"kind": "loss"}), ("advantage", {}), ("corrections", {"kind": "correction"})],
)
def test_outputs_of_a_wrong_shape_are_refused(
    tiny_folder: Path,
    module: str,
    sort: str,
    options: dict[str, Any],
) -> None:
    section: Any = custom(f"{module}:wrong_shape", options=options)
    keys = {sort: [section] if sort == "corrections" else section}
    with pytest.raises(LearnerError, match=rf"learner\.{sort}.*{module}:wrong_shape.*\(1,\)"):
        play(tiny_folder, make_groups(0), **keys)


def test_options_are_checked_with_the_section_of_the_function(tmp_path: Path, module: str) -> None:
    minimal = MINIMAL.replace("learner: {compute_dtype: float32}\n", "")
    first = minimal.count("\n") + 1
    path = tmp_path / "config.yaml"

    def problems(learner: str) -> list[tuple[str, int]]:
        path.write_text(minimal + textwrap.dedent(learner))
        try:
            load([str(path)], [])
        except ConfigProblems as error:
            return [(problem.key, problem.where.line - first) for problem in error.problems]
        return []

    assert problems(
        f"""\
        learner:
          loss:
            kind: custom
            function: {module}:policy_gradient
            options:
              scale: -1
              form: plane
              scales: 2
          advantage: {{kind: custom, function: "{module}:missing"}}
          corrections:
            - {{kind: custom, function: "{module}:one_argument"}}
        """
    ) == [
        ("learner.loss.options.scale", 5),
        ("learner.loss.options.form", 6),
        ("learner.loss.options.scales", 7),
        ("learner.advantage.function", 8),
        ("learner.corrections.0.function", 10),
    ]
    assert (
        problems(
            f"""\
        learner:
          loss: {{kind: custom, function: "{module}:policy_gradient", options: {{scale: 0.5}}}}
          advantage: {{kind: custom, function: "{module}:mean_baseline", options: {{any: [1, 2]}}}}
        """
        )
        == []
    )
