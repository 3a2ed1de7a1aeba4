"""Reward functions of verl and EasyR1 are called from their files as there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episodes import make_view

from raylearner.config.rewards import RewardSection
from raylearner.errors import ConfigError, RewardError
from raylearner.rewards.catalogue import check_rows
from raylearner.rewards.functions import EpisodeView
from raylearner.rewards.scorer import Scorer

COLUMNS = {
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": {"target": 46}},
    "extra_info": {"index": 3},
}


def view(**columns: Any) -> EpisodeView:
    episode = make_view("<think>12+34</think>", "46")
    return replace(episode, prompt=replace(episode.prompt, columns=columns))


async def score(kind: str, episode: EpisodeView, **arguments: Any) -> Any:
    function = {
        "kind": f"raylearner.rewards.foreign:{kind}",
        "name": "score",
        "arguments": arguments,
    }
    scorer = Scorer(RewardSection.model_validate({"functions": [function]}))
    return await scorer.score(episode)


async def test_verl_receives_the_row_and_the_whole_response(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "async def judge(data_source, solution_str, ground_truth, extra_info, scale=1):\n"
        "    assert (data_source, ground_truth, extra_info['index']) == ('gsm8k', {'target': 46}, 3)\n"
        "    assert solution_str == '<think>12+34</think>46'\n"
        "    return {'score': 0.5 * scale, 'acc': True, 'pred': '46'}\n"
    )
    found = await score(
        "verl_score", view(**COLUMNS), path=str(path), name="judge", options={"scale": 3}
    )
    assert found.reward == 1.5


@pytest.mark.parametrize("kind", ["batch", "sequential"])
async def test_easyr1_receives_a_batch_or_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.py"
    one = "{'overall': float(x['ground_truth'] == '46') + x['response_length'], 'format': 1.0}"
    result = f"[{one} for x in inputs]" if kind == "batch" else one.replace("x[", "inputs[")
    path.write_text(f"REWARD_TYPE = '{kind}'\ndef compute_score(inputs):\n    return {result}\n")
    found = await score("easyr1_score", view(), path=str(path))
    assert found.reward == 1.0 + 3


async def test_a_file_or_function_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("")
    for place, name in ((tmp_path / "away.py", "away.py"), (path, "compute_score")):
        with pytest.raises(RewardError, match=name):
            await score("verl_score", view(**COLUMNS), path=str(place))


def test_a_file_that_cannot_be_called_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_of_the_test")
    (tmp_path / "empty.py").write_text("")
    for name, words in (
        ("missing.py", "is not a Python file"),
        ("broken.py", "ModuleNotFoundError"),
        ("empty.py", "has no function 'compute_score'"),
    ):
        function = {
            "kind": "raylearner.rewards.foreign:verl_score",
            "arguments": {"path": str(tmp_path / name)},
        }
        section = RewardSection.model_validate({"functions": [function]})
        with pytest.raises(ConfigError, match=rf"rewards\.functions\.0: .*{name}.*{words}"):
            check_rows(section, ())
