"""Prompts: the generated split never leaks, and bad rows are named."""

import json
import re
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pytest
from episodes import make_view
from pyarrow import parquet
from rows import write_jsonl

from raylearner.config.data import (
    CalculatorData,
    ExampleMessage,
    FileData,
    HubData,
    ReasoningGymData,
)
from raylearner.config.rewards import RewardSection
from raylearner.data import load_prompts
from raylearner.data.cells import content_hash
from raylearner.errors import ConfigError
from raylearner.rewards.scorer import Scorer


def _operands(prompt_id: str) -> frozenset[str]:
    expression = prompt_id.removeprefix("calculator/")
    for sign in "+*-":
        if sign in expression:
            return frozenset(expression.split(sign))
    raise AssertionError(prompt_id)


def test_operand_pairs_of_evaluation_are_never_trained_on_in_either_order() -> None:
    train = load_prompts([CalculatorData(kind="calculator", num_prompts=3000)])
    held_out = load_prompts(
        [CalculatorData(kind="calculator", split="evaluation", num_prompts=500, seed=7)]
    )
    assert len(train) == 3000
    assert len(held_out) == 500
    seen = {_operands(p.prompt_id) for p in train}
    assert not [p.prompt_id for p in held_out if _operands(p.prompt_id) in seen]


def test_generated_answers_are_right_and_prompts_distinct() -> None:
    prompts = load_prompts([CalculatorData(kind="calculator", num_prompts=200)])
    assert len({p.prompt_id for p in prompts}) == 200
    for prompt in prompts:
        expression = prompt.columns["expression"]
        assert prompt.answer == str(eval(expression))


def test_system_prompt_is_put_first_where_there_is_none() -> None:
    source = CalculatorData(kind="calculator", num_prompts=3)
    prompts = load_prompts([source], system_prompt="be exact")
    assert {p.messages[0].role for p in prompts} == {"system"}


@pytest.mark.parametrize("system_prompt", ["be exact", None])
def test_worked_examples_stand_between_system_message_and_prompt(
    system_prompt: str | None,
) -> None:
    source = CalculatorData(kind="calculator", num_prompts=1)
    examples = [
        ExampleMessage(role="user", content="1+1="),
        ExampleMessage(role="assistant", content="2"),
    ]
    (plain,) = load_prompts([source])
    (prompt,) = load_prompts([source], system_prompt=system_prompt, examples=examples)
    head = [] if system_prompt is None else [("system", system_prompt)]
    assert [(m.role, m.content) for m in prompt.messages] == [
        *head,
        ("user", "1+1="),
        ("assistant", "2"),
        ("user", plain.messages[-1].content),
    ]


def test_jsonl_rows_keep_answer_doc_id_and_other_columns(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = write_jsonl(
        tmp_path / "d.jsonl",
        {"prompt": "one", "answer": 1, "level": 3, "doc_id": "d7"},
        {"prompt": messages},
    )
    first, second = load_prompts([source])
    assert (first.answer, first.doc_id, dict(first.columns)) == ("1", "d7", {"level": 3})
    assert [m.role for m in second.messages] == ["system", "user"]
    assert second.answer is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "x"}, "no prompt in column 'prompt'; the row has: question"),
        ("{not json", "not JSON"),
        ([1], "must be an object"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"prompt": 3}, "text or a list of messages"),
        (b'{"prompt": "\xff"}', ""),
        ({"prompt": "q", "answer": {"target": ["red"]}}, "answer"),
        ({"prompt": "q", "answer": [["red"]]}, "answer"),
        ({"prompt": "q", "answer": ["red", {"text": "blue"}]}, "answer"),
        ({"prompt": "q", "answer": float("nan")}, "answer"),
        ({"prompt": "q", "doc_id": ["a"]}, "doc_id"),
        ({"prompt": "q", "prompt_id": {"a": 1}}, "prompt_id"),
        ({"prompt": "q", "prompt_id": True}, "prompt_id"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, words: str) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=rf"d\.jsonl:2: .*{re.escape(words)}"):
        load_prompts([source])


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        *((answer, ()) for answer in (None, "", " ", [])),
        ([None, "red", "", "red"], ("red",)),
        (42, ("42",)),
        (42.0, ("42",)),
        (0.1, ("0.1",)),
        (1e-7, ("0.0000001",)),
        (-0.0, ("0",)),
        (2**63, (str(2**63),)),
        ("42.0", ("42.0",)),
        (True, ("true", "True")),
        (False, ("false", "False")),
    ],
)
def test_accepted_answers_of_a_row_are_those_that_are_there(
    tmp_path: Path, answer: object, accepted: tuple[str, ...]
) -> None:
    (prompt,) = load_prompts([write_jsonl(tmp_path / "x.jsonl", {"prompt": "q", "answer": answer})])
    assert prompt.answers == accepted


def test_a_row_is_identified_by_what_it_holds(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "answer": ["4", 5], "level": {"a": [1, 2]}}
    (tmp_path / "b").mkdir()
    here = write_jsonl(tmp_path / "x.jsonl", row)
    there = write_jsonl(tmp_path / "b" / "y.jsonl", {"other": 1, "prompt": "z"}, row)
    (first,), (_, second) = load_prompts([here]), load_prompts([there])
    assert first.prompt_id != second.prompt_id
    assert content_hash(first) == content_hash(second)
    edits = [
        {"prompt": "q"},
        {"prompt": [{"role": "system", "content": "q"}]},
        {"prompt": [{"role": "user", "content": "q "}]},
        {"answer": ["4"]},
        {"answer": ["5", "4"]},
        {"level": {"a": [[1], 2]}},
        {"level": {"a": [1, 2.0]}},
        {"level": {"a": ["1", 2]}},
        {"doc_id": "d"},
        {"more": None},
    ]
    prompts = load_prompts(
        [write_jsonl(tmp_path / "z.jsonl", *[{**row, **edit} for edit in edits])]
    )
    hashes = {content_hash(prompt) for prompt in (first, *prompts)}
    assert len(hashes) == 1 + len(edits)


def test_an_empty_dataset_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'jsonl'"):
        load_prompts([write_jsonl(tmp_path / "empty.jsonl", "", "")])
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load_prompts([FileData(kind="jsonl", path=str(tmp_path / "none.jsonl"))])


def test_columns_have_the_names_that_the_user_gives(tmp_path: Path) -> None:
    row = {"question": "q", "solution": ["4", 4.0], "id": 7, "book": "b", "answer": "no"}
    names = {"prompt": "question", "answer": "solution", "prompt_id": "id", "doc_id": "book"}
    columns = {f"{key}_column": name for key, name in names.items()}
    (prompt,) = load_prompts([write_jsonl(tmp_path / "d.jsonl", row, **columns)])
    assert (prompt.prompt_id, prompt.doc_id, prompt.source) == ("7", "b", "d")
    assert prompt.answers == ("4",)
    assert prompt.columns["answer"] == "no"
    assert prompt.is_conversational is False


def test_a_named_column_that_a_row_lacks_is_an_error_with_those_that_are_there(
    tmp_path: Path,
) -> None:
    rows = ({"prompt": "q", "solution": 1}, {"prompt": "q", "sol": 1})
    with pytest.raises(ConfigError, match=r"d\.jsonl:2: .*'solution' .*: prompt, sol$"):
        load_prompts([write_jsonl(tmp_path / "d.jsonl", *rows, answer_column="solution")])


def test_all_sources_that_cannot_be_read_are_named_at_once(tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", "{")
    missing = FileData(kind="jsonl", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError) as error:
        load_prompts([bad, CalculatorData(kind="calculator", num_prompts=2), missing])
    first, second = str(error.value).splitlines()
    assert "bad.jsonl:1: not JSON" in first
    assert "none.jsonl" in second


def test_parquet_rows_are_read_as_jsonl_rows_are(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    messages = [[{"role": "user", "content": f"q{i}"}] for i in range(3)]
    table = pyarrow.table({"messages": messages, "answer": ["a", None, "c"], "level": [1, 2, 3]})
    parquet.write_table(table, path)
    source = FileData(kind="parquet", path=str(path), prompt_column="messages", max_prompts=2)
    prompts = load_prompts([source])
    assert [p.messages[0].content for p in prompts] == ["q0", "q1"]
    assert [p.answer for p in prompts] == ["a", None]
    assert prompts[1].columns == {"level": 2}
    assert prompts[0].is_conversational
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"bad\.parquet"):
        load_prompts([FileData(kind="parquet", path=str(tmp_path / "bad.parquet"))])


def test_a_directory_is_read_as_a_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "train.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    source = HubData(kind="hub", path=str(tmp_path / "tasks"), split="train[1:]")
    (prompt,) = load_prompts([source])
    assert (prompt.messages[0].content, prompt.source) == ("two", "tasks")


def test_a_dataset_that_cannot_be_had_says_what_to_do_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"nobody/nothing.*main"):
        load_prompts([HubData(kind="hub", path="nobody/nothing", config="main")])


def test_sources_are_mixed_by_weight_from_the_start(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(30)]
    one, other = (write_jsonl(tmp_path / f"{n}.jsonl", *rows) for n in ("one", "other"))
    prompts = load_prompts([one, other.model_copy(update={"weight": 2.0})])
    assert Counter(p.source for p in prompts[:30]) == {"one": 10, "other": 20}
    assert Counter(p.source for p in prompts) == {"one": 30, "other": 30}


def test_reasoning_gym_splits_share_no_question_whatever_the_seed() -> None:
    common = {"kind": "reasoning_gym", "task": "leg_counting", "num_prompts": 60}
    train, held_out = (
        load_prompts([ReasoningGymData.model_validate({**common, "split": split, "seed": seed})])
        for split, seed in (("train", 1), ("evaluation", 1))
    )
    other = load_prompts([ReasoningGymData.model_validate({**common, "seed": 9})])
    assert (len(train), len(held_out)) == (60, 60)
    questions = {p.messages[0].content for p in [*train, *other]}
    assert questions.isdisjoint(p.messages[0].content for p in held_out)
    again = load_prompts([ReasoningGymData.model_validate({**common, "seed": 1})])
    assert [p.prompt_id for p in again] == [p.prompt_id for p in train]
    assert train[0].source == "leg_counting"


async def test_a_reasoning_gym_prompt_is_scored_by_its_task() -> None:
    source = ReasoningGymData(
        kind="reasoning_gym",
        task="countdown",
        parameters={"min_numbers": 3, "max_numbers": 3},
        num_prompts=2,
    )
    prompt = load_prompts([source])[0]
    scorer = Scorer(
        RewardSection.model_validate({"functions": [{"kind": "reasoning_gym"}, {"kind": "f1"}]})
    )
    entry = prompt.columns["reasoning_gym"]["entry"]
    right = entry["metadata"]["expression"]
    try:
        good = await scorer.score(make_view(f"<answer>{right}</answer>", prompt=prompt))
        wrong = await scorer.score(make_view("<answer>1+1</answer>", prompt=prompt))
        other = await scorer.score(make_view("<answer>46</answer>"))
    finally:
        await scorer.close()
    assert good.rewards["reasoning_gym"] == 1.0
    assert wrong.rewards["reasoning_gym"] is not None
    assert wrong.rewards["reasoning_gym"] < 0.1
    assert other.rewards == {"reasoning_gym": None, "f1": 1.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "leg_countin"}, "'leg_counting'"),
        ({"parameters": {"legs": 4}}, "legs"),
        ({"parameters": {"min_animals": -1}}, "min_animals"),
    ],
)
def test_a_task_that_cannot_be_made_is_a_config_error(change: dict, words: str) -> None:
    source = {"kind": "reasoning_gym", "task": "leg_counting", **change}
    with pytest.raises(ConfigError, match=words):
        load_prompts([ReasoningGymData.model_validate(source)])


def test_a_column_may_be_a_field_of_one_as_in_rows_of_verl(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["2", "two"]}},
        "extra_info": {"index": 3},
    }
    path.write_text(json.dumps(row))
    source = {
        "kind": "jsonl",
        "path": str(path),
        "answer_column": "reward_model.ground_truth.target",
    }
    (prompt,) = load_prompts([FileData.model_validate(source)])
    assert (prompt.answer, prompt.other_answers) == ("2", ("two",))
    assert prompt.columns == {
        name: row[name] for name in ("data_source", "reward_model", "extra_info")
    }
    with pytest.raises(ConfigError, match=r"ground_truth\.none"):
        load_prompts(
            [FileData.model_validate(source | {"answer_column": "reward_model.ground_truth.none"})]
        )
