"""`check --play`: one episode through environment, tools and rewards, and where users' code failed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raylearner import cli

CODE = '''
from raylearner.environments.protocol import Outcome, Reply
from raylearner.types import StopReason


class Riddle:
    stop = ()
    tool_schemas = ()

    def __init__(self, key="secret"):
        self._key = key

    async def reset(self, prompt):
        self._prompt = prompt
        return prompt.messages

    async def step(self, message):
        told = self._prompt.columns[self._key]
        return Reply(is_done=True, stop_reason=StopReason.ANSWER)

    def outcome(self):
        return Outcome()

    async def close(self):
        pass


def half(episode, log_extra):
    log_extra("words", len(episode.turns[-1].content.split()))
    return 0.5 if "2" in episode.completion else 0.0


def broken(prompts, completions, **columns):
    return [columns["gold"][0]]


def lookup(word: str) -> str:
    """Look a word up."""
    return {"known": "yes"}[word]
'''


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "riddles_of_the_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "2"}) + "\n")

    def run(**changes: Any) -> tuple[int, str]:
        values: dict[str, Any] = {
            "model": {"kind": "tiny"},
            "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
            "renderer": {"max_prompt_tokens": 64},
            "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
            "learner": {"compute_dtype": "float32"},
            **changes,
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
        result = CliRunner().invoke(cli.app, ["check", "config.yaml", "--play"])
        return result.exit_code, result.output

    return run


def test_an_episode_with_tools_is_shown_turn_by_turn(check: Any) -> None:
    code, output = check(
        environment={"kind": "tool_use", "tools": [{"kind": "calculator"}]},
        rewards={"functions": [{"kind": "riddles_of_the_test:half", "weight": 2.0}]},
    )
    assert code == 0, output
    lines = [line for line in output.splitlines() if line.startswith("play: ")]
    assert lines[0] == "play: prompt: 1+1?"
    assert lines[1] == "play: turn 1: <calc>1 + 1</calc>"
    assert lines[2].startswith("play: tool calculator: ")
    assert "2" in lines[2]
    assert lines[3] == "play: turn 2: <answer>2</answer>"
    assert "play: logged words: 1" in lines
    assert "play: reward half: 0.5, weight 2.0" in lines
    assert lines[-1] == "play: reward: 1.0"


@pytest.mark.parametrize(
    ("changes", "named", "line"),
    [
        (
            {"environment": {"kind": "custom", "path": "riddles_of_the_test:Riddle"}},
            ("Riddle, step", "KeyError: 'secret'"),
            "self._prompt.columns[self._key]",
        ),
        (
            {
                "environment": {"kind": "single_turn"},
                "rewards": {"functions": [{"kind": "riddles_of_the_test:broken"}]},
            },
            ("reward 'broken'", "KeyError: 'gold'"),
            'columns["gold"][0]',
        ),
        (
            {
                "environment": {
                    "kind": "tool_use",
                    "tools": [
                        {
                            "kind": "function",
                            "function": "riddles_of_the_test:lookup",
                            "on_failure": "fail",
                        }
                    ],
                }
            },
            ("riddles_of_the_test:lookup", "KeyError: '1+1?'"),
            '{"known": "yes"}[word]',
        ),
    ],
    ids=["environment", "reward", "tool"],
)
def test_what_raises_is_named_with_its_line(
    check: Any, changes: dict[str, Any], named: tuple[str, ...], line: str
) -> None:
    code, output = check(**changes)
    assert code == 2
    said = output.replace("\n", " ")
    for part in named:
        assert part in said, output
    assert "riddles_of_the_test.py" in said
    assert line in said
    assert "Traceback" not in output


def test_a_column_that_no_row_has_fails_a_check(check: Any) -> None:
    data = {"train": {"kind": "jsonl", "path": "rows.jsonl", "prompt_column": "question"}}
    code, output = check(data=data, environment={"kind": "single_turn"})
    assert code == 2
    assert "question" in output
