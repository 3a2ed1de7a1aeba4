"""Examples in documents do what the text says, and tables of fields are complete."""

import dataclasses
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from episodes import make_view

from raylearner.config.environment import FunctionTool
from raylearner.config.loader import load
from raylearner.config.rewards import RewardSection
from raylearner.config.schema import RunConfig
from raylearner.config.section import dotted_keys
from raylearner.environments.protocol import Outcome, Reply
from raylearner.errors import ConfigError
from raylearner.learner.objective.loss import LossInputs
from raylearner.observability.metrics import METRICS, spec_of
from raylearner.rewards.functions import EpisodeView
from raylearner.rewards.scorer import Scorer
from raylearner.run import check_command
from raylearner.services.code import RunRequest
from raylearner.services.pages import BatchFetch, BatchSearch
from raylearner.services.search import RetrieveRequest, SearchRequest
from raylearner.tools import code_execution, search
from raylearner.tools.catalogue import make_tool
from raylearner.types import Message, Prompt, StopReason, Turn

ROOT = Path(__file__).parents[2]


def text_of(document: str) -> str:
    return (ROOT / "docs" / f"{document}.md").read_text()


def code_of(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The first Python file of the document that the test names; all of them can be imported."""
    made: list[types.ModuleType] = []
    for code in code_of(request.param, "python"):
        name = re.match(r"# (\w+)\.py", code)
        assert name
        made.append(types.ModuleType(name.group(1)))
        exec(code, made[-1].__dict__)
        monkeypatch.setitem(sys.modules, name.group(1), made[-1])
    return made[0]


@pytest.mark.parametrize("module", ["environments"], indirect=True)
async def test_the_game_answers_as_described(module: Any) -> None:
    prompt = Prompt(prompt_id="p", messages=(Message(role="user", content="Guess."),), answer="7")
    game = module.Guess(max_turns=4)
    assert await game.reset(prompt) == prompt.messages
    for text, hint, is_valid in (
        ("3", "higher", True),
        ("9", "lower", True),
        ("x", "Write", False),
    ):
        reply = await game.step(Message(role="assistant", content=text))
        assert reply.messages[0].content.startswith(hint)
        assert (reply.is_done, reply.is_valid) == (False, is_valid)
    reply = await game.step(Message(role="assistant", content="7\n"))
    assert (reply.is_done, reply.stop_reason) == (True, StopReason.ANSWER)
    assert game.outcome().metrics == {"won": 1.0, "guesses": 4.0}
    lost = module.Guess(max_turns=1)
    await lost.reset(prompt)
    reply = await lost.step(Message(role="assistant", content="8"))
    assert reply.stop_reason is StopReason.MAX_TURNS
    assert lost.outcome().metrics["won"] == 0.0


@pytest.mark.parametrize("module", ["environments"], indirect=True)
def test_the_game_plays_and_its_reward_reads_the_metric_of_its_own_name(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers.jsonl").write_text(code_of("environments", "json")[0])
    Path("number_game.yaml").write_text(code_of("environments", "yaml")[0])
    lines: list[str] = []
    config = load([str(ROOT / "configs" / "quickstart.yaml"), "number_game.yaml"], [])
    check_command.play_first_row(config, report=lines.append)
    assert "play: turn 1: 7" in lines
    assert "play: logged won: 1.0" in lines
    assert lines[-1].endswith("reward: 1.0")


def test_the_game_takes_about_thirty_lines() -> None:
    code = code_of("environments", "python")[0].partition("class Guess")[2].partition("def won")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 32


@pytest.mark.parametrize("module", ["rewards"], indirect=True)
async def test_the_rewards_work_as_written(module: Any) -> None:
    functions = [
        {"kind": "my_rewards:brief", "arguments": {"limit": 2}},
        {"kind": "trl_rewards:solved"},
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


@pytest.mark.parametrize("module", ["tools"], indirect=True)
async def test_the_function_is_a_tool(module: Any) -> None:
    tool = make_tool(
        FunctionTool(kind="function", function="shop:stock", arguments={"database": "shop.db"})
    )
    assert set(tool.schema["function"]["parameters"]["properties"]) == {"item", "size"}
    prompt = Prompt(prompt_id="p", messages=(), source="shop")
    found = await tool.call({"item": "boots"}, prompt=prompt)
    assert found.text == "3 pieces for shop"
    for text, number in (("boots", 3), ('{"item": "boots", "size": 41}', 0)):  # between tags
        assert (await tool.call(text, prompt=prompt)).text == f"{number} pieces for shop"
    refused = await tool.call({"thing": "boots"}, prompt=prompt)
    assert refused.is_refused


def test_wire_forms_are_those_of_services_and_tools() -> None:
    forms = [json.loads(code) for code in code_of("services", "json")]
    query, found, queries, retrieved, many, pages, fetch, page, program, result = forms
    SearchRequest.model_validate(query)
    RetrieveRequest.model_validate(queries)
    BatchSearch.model_validate(many)
    BatchFetch.model_validate(fetch)
    RunRequest.model_validate(program)
    assert search._SEARCH.validate_python(found)[0].contents
    assert search._RETRIEVE.validate_python(retrieved).result[0][0].document.contents
    reply = code_execution._REPLY.validate_python(result)
    assert reply.run_result is not None
    assert reply.run_result.stdout == "42\n"
    assert len(pages) == len(many["query"])
    assert {*pages[0][0], *page[0]} == {"id", "contents"}


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ("environments", Prompt),
        ("environments", Message),
        ("environments", Reply),
        ("environments", Outcome),
        ("rewards", EpisodeView),
        ("rewards", Turn),
        ("losses", LossInputs),
    ],
)
def test_tables_list_every_field(document: str, kind: Any) -> None:
    cells = re.findall(r"^\| (`[^|]*) \|", text_of(document), re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {field.name for field in dataclasses.fields(kind)} - listed == set()


@pytest.mark.parametrize("document", ["README.md", "docs/start.md"])
def test_errors_are_reported_as_shown(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("configs/my.yaml").write_text(
        "learner:\n  advantage: {kind: grpo, normalise: group}\nreplay:\n  max_staleness: -1\n"
    )
    with pytest.raises(ConfigError) as raised:
        load([str(ROOT / "configs/quickstart.yaml"), "configs/my.yaml"], ["replay.group_sise=16"])
    assert f"{raised.value}\n" in (ROOT / document).read_text()


LISTS = (
    "data.train.",
    "data.evaluation.",
    "evaluation.sets.",
    "environment.tools.",
    "rewards.functions.",
)
"""Sections in lists, whose keys have no dotted name."""
OWN_NAMES = {"learner/gain", "run.holder"}
"""A metric of the example of a loss, and a file."""


OF_OTHER_PROJECTS = {"migration"}
"""Pages that name keys of other projects."""
PAGES = [p for p in sorted((ROOT / "docs").glob("*.md")) if p.stem not in OF_OTHER_PROJECTS]


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_keys_and_metrics_named_in_the_text_exist(document: Path) -> None:
    keys = {key[:end] for key in dotted_keys(RunConfig) for end in (*ends(key, "."), len(key))}
    metrics = {key[:end] for key in METRICS for end in (*ends(key, "/"), len(key))}
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    areas = "|".join(sorted({key.partition("/")[0] for key in metrics if "/" in key}))
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    unknown: list[str] = []
    for span in re.findall(r"`([^`\n]+)`", prose):
        key = re.match(rf"((?:{sections})(?:\.[a-z_0-9]+)+)(?=$|[:= ])", span)
        if key and not key[1].startswith(LISTS) and not key[1].endswith((".py", ".yaml", ".jsonl")):
            unknown += {key[1]} - keys - OWN_NAMES
        is_path = (ROOT / "raylearner" / span).exists()
        if (
            re.fullmatch(rf"(?:{areas})/[\w/<>]+", span)
            and span not in metrics | OWN_NAMES
            and not is_path
        ):
            unknown += [span] * (spec_of(re.sub(r"<\w+>", "x", span)) is None)
    assert unknown == []


def ends(key: str, mark: str) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(mark), key)]
