"""Prompts: the generated split never leaks, and bad rows are named."""

import json
from pathlib import Path

import pytest

from raylearner.config.schema import CalculatorData, JsonlData
from raylearner.errors import ConfigError
from raylearner.prompts import load_prompts


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


def _write(path: Path, *rows: object) -> JsonlData:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))
    return JsonlData(kind="jsonl", path=str(path))


def test_jsonl_rows_keep_answer_doc_id_and_other_columns(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = _write(
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
        ({"prompt": [{"role": "robot", "content": "x"}]}, "needs a role"),
        ({"prompt": 3}, "text or a list of messages"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, words: str) -> None:
    source = _write(tmp_path / "d.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=r"d\.jsonl:2: ") as error:
        load_prompts([source])
    assert words in str(error.value)


def test_an_empty_dataset_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts([JsonlData(kind="jsonl", path=str(tmp_path / "empty.jsonl"))])
    with pytest.raises(ConfigError, match="does not exist"):
        load_prompts([JsonlData(kind="jsonl", path=str(tmp_path / "none.jsonl"))])
