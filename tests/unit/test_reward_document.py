"""docs/rewards.md holds: every YAML loads over the quickstart, and the functions do what they say."""

import re
import sys
import types
from pathlib import Path

import pytest
from episodes import make_view

from raylearner.config.loader import load
from raylearner.config.rewards import RewardSection
from raylearner.rewards.scorer import Scorer
from raylearner.types import Message, Prompt

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "rewards.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def my_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_rewards")
    for block in PYTHON:
        exec(block, module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rewards", module)


def test_there_are_examples() -> None:
    assert (len(YAML), len(PYTHON)) == (8, 1)


@pytest.mark.parametrize("block", YAML)
def test_every_example_loads(block: str, tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(block)
    load([str(ROOT / "configs" / "quickstart.yaml"), str(overlay)], [])


async def test_the_functions_work_as_written() -> None:
    functions = [
        {"kind": "my_rewards:brief", "arguments": {"limit": 2}},
        {"kind": "my_rewards:solved"},
    ]
    prompt = Prompt(
        prompt_id="p",
        messages=(Message(role="user", content="q"),),
        answer="4",
        columns={"solution": "4"},
    )
    scorer = Scorer(RewardSection.model_validate({"functions": functions}))
    score = await scorer.score(make_view("it is 4", prompt=prompt))
    assert score.rewards == {"brief": 0.0, "solved": 1.0}
    assert score.columns == {"length": 3, "solution": "4"}
    assert score.metrics == {"brief/over": 1.0}
