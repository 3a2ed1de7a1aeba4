"""Programs and classes of the user's: what is wrong with them is told before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from kits import make_claim, make_kit, play_one

from raylearner.config import schema
from raylearner.config.episode_checks import check_environment
from raylearner.config.schema import RunConfig
from raylearner.environments.catalogue import EnvironmentFactory
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Message, Prompt

MODULE = """
from raylearner.environments.protocol import Outcome, Reply
from raylearner.types import StopReason

class Echo:
    stop = ()
    tool_schemas = ()
    def __init__(self, *, turns=1):
        if turns < 1:
            raise ValueError("no turns")
        self.left = turns
    async def reset(self, prompt):
        return prompt.messages
    async def step(self, message):
        self.left -= 1
        return Reply(is_done=self.left == 0, stop_reason=StopReason.ANSWER)
    def outcome(self):
        return Outcome(metrics={"left": float(self.left)})
    async def close(self):
        pass

class Half:
    stop = ()
    async def reset(self, prompt):
        return ()

class Sync(Echo):
    def step(self, message):
        return None

def play():
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"of_the_user_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def make_config(environment: dict[str, Any]) -> RunConfig:
    sections = {
        "model": {"kind": "tiny"},
        "data": {"train": {"kind": "calculator"}},
        "environment": environment,
        "actors": {"engine": {"kind": "vllm", "max_model_tokens": 512}},
    }
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("path", "arguments", "fragment"),
    [
        ("no_such_module:X", {}, "ModuleNotFoundError"),
        ("M:Missing", {}, "AttributeError"),
        ("M:play", {}, "class"),
        ("M:Half", {}, "step, close, outcome, tool_schemas"),
        ("M:Sync", {}, "async def"),
        ("M:Echo", {"rounds": 2}, "rounds"),
        ("M:Echo", {"turns": 2}, None),
    ],
)
def test_a_class_that_is_no_environment_is_refused(
    module: str, path: str, arguments: dict[str, Any], fragment: str | None
) -> None:
    environment = {"path": path.replace("M:", f"{module}:"), "arguments": arguments}
    findings = check_environment(make_config({"kind": "custom", **environment}))
    assert [f.key for f in findings] == ([] if fragment is None else ["environment.path"])
    assert all(str(fragment) in finding.text for finding in findings)


def test_tools_that_a_turn_could_not_tell_apart_are_refused() -> None:
    search = {"kind": "search", "url": "http://127.0.0.1:8000"}
    tools = [{"kind": "calculator"}, search, search | {"name": "find"}]
    assert check_environment(make_config({"kind": "tool_use", "tools": tools})) == []
    pages = search | {"kind": "page_search"}
    (finding,) = check_environment(make_config({"kind": "tool_use", "tools": [*tools, pages]}))
    assert finding.key == "environment.tools.3.name"
    assert "environment.tools.1" in finding.text


async def test_an_environment_of_the_users_plays(module: str, renderer: Renderer) -> None:
    def factory(turns: int) -> EnvironmentFactory:
        section = schema.CustomEnvironment(
            kind="custom", path=f"{module}:Echo", arguments={"turns": turns}
        )
        return EnvironmentFactory(section)

    message = Message(role="user", content="1+1=")
    claim = make_claim(Prompt(prompt_id="p", messages=(message,), answer="2"))
    kit = make_kit(renderer, make_environment=factory(2).make)
    trajectory = await play_one(kit, claim, max_tokens=8, seed=1)
    assert (len(trajectory.turns), trajectory.metrics["left"]) == (2, 0.0)
    kit = make_kit(renderer, make_environment=factory(0).make)
    failed = await play_one(kit, claim, max_tokens=8, seed=1)
    assert failed.error is not None
    head, *frames = failed.error.splitlines()
    assert head == f"environment: environment {module}:Echo, reset raised ValueError: no turns"
    assert f"{module}.py" in frames[0]
