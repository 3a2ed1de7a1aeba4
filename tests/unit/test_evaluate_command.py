"""Evaluation alone: what it refuses before anything starts, and the table it prints."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raylearner.config.loader import load
from raylearner.errors import ConfigError
from raylearner.run import evaluate_command
from raylearner.run.evaluation_tables import make_tables

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def test_a_tiny_model_needs_the_checkpoint_of_its_run(tmp_path: Path) -> None:
    config = load([QUICKSTART], [f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match=r"checkpoint="):
        evaluate_command.evaluate(config, checkpoint=None)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    config = load([QUICKSTART], [])
    with pytest.raises(ConfigError, match="nowhere"):
        evaluate_command.evaluate(config, checkpoint=tmp_path / "nowhere")
    folder = tmp_path / "step_000001"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        evaluate_command.evaluate(config, checkpoint=folder)
    content = {"step": 1, "files": {"model/config.json": {"bytes": 1, "sha256": ""}}}
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"model/config\.json"):
        evaluate_command.evaluate(config, checkpoint=folder)


def test_held_out_prompts_are_required() -> None:
    config = load([QUICKSTART], ["data.evaluation=null"])
    with pytest.raises(ConfigError, match=r"data\.evaluation"):
        evaluate_command.evaluate(config, checkpoint=None)


def make_record() -> dict[str, Any]:
    record: dict[str, Any] = {"step": 3, "policy_version": 2}
    for prefix, reward in (("", 0.5), ("math/", 0.25), ("code/", None)):
        values = {"num_prompts": 4, "errors": 0, "turns/mean": 1.5, "sampled_tokens/mean": 7.0}
        record |= {f"{prefix}{key}": value for key, value in values.items()}
        record[f"{prefix}reward/mean"] = reward
        record[f"{prefix}reward/standard_error"] = 0.0668153
    return record


def printed(record: dict[str, Any]) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        for table in make_tables(record):
            console.print(table)
    assert "…" not in capture.get()
    return capture.get().splitlines()


def test_the_table_has_a_row_for_each_source() -> None:
    lines = printed(make_record())
    rows = [line.split() for line in lines if "4" in line]
    assert [row[0] for row in rows] == ["all", "code", "math"]
    assert [row[1] for row in rows] == ["0.5", "-", "0.25"]
    head = "\n".join(lines).split("all")[0]
    assert all(name in head for name in ("reward", "failed", "tokens"))
    assert "without" not in head
    assert "ended" not in head


def test_the_table_tells_rewards_without_failed_episodes_where_some_failed() -> None:
    head = "\n".join(printed(make_record() | {"errors": 1, "unfinished": 2})).split("all")[0]
    assert all(name in head for name in ("without", "failed", "ended"))


def test_several_samples_and_several_functions_have_tables() -> None:
    record = make_record() | {
        "samples_per_prompt": 4,
        "pass@1": 0.5,
        "pass@4": 0.875,
        "majority@4": 0.75,
        "math/pass@4": 0.6,
        "reward/exact_answer/mean": 0.5,
        "reward/tool_use/mean": 0.1,
    }
    text = "\n".join(printed(record))
    passes = text[text.index("pass@1") :]
    assert passes.split()[:3] == ["pass@1", "pass@4", "majority@4"]
    assert ["all", "0.5", "0.875", "0.75"] in [line.split() for line in text.splitlines()]
    assert ["math", "-", "0.6", "-"] in [line.split() for line in text.splitlines()]
    assert ["all", "0.5", "0.1"] in [line.split() for line in text.splitlines()]
