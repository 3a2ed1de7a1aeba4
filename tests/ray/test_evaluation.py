"""Evaluation beside training: pinned to the version of its step while later steps are made."""

import re

import pytest
from loop import Launcher, rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]


def test_training_goes_on_while_one_actor_evaluates_an_older_version(launcher: Launcher) -> None:
    change = {
        "run": {"num_steps": 9},
        "data": {"evaluation": {"kind": "calculator", "split": "evaluation", "num_prompts": 64}},
        "evaluation": {"every_steps": 4, "num_prompts": 64},
        "actors": {"engine": {"arguments": {"delay_s": 0.02}}},
        "replay": {"max_staleness": 2},
    }
    output = launcher.run("run", change)
    evaluations = rows(launcher.folder / "run" / "eval.jsonl")
    assert [(e["step"], e["policy_version"]) for e in evaluations] == [
        (0, 0),
        (4, 4),
        (8, 8),
        (9, 9),
    ]
    assert all(e["num_prompts"] == e["calculator/num_prompts"] == 64 for e in evaluations)
    lines = [line for line in output.splitlines() if re.search(r"step +\d+/9|at step", line)]
    fifth = next(i for i, line in enumerate(lines) if re.search(r"step +5/9", line))
    fourth_evaluated = next(i for i, line in enumerate(lines) if "evaluation at step 4:" in line)
    assert fourth_evaluated > fifth, "\n".join(lines)
    assert "every engine (2) holds policy version 9" in output
    metrics = rows(launcher.folder / "run" / "metrics.jsonl")
    assert max(row["buffer/staleness/max"] for row in metrics) <= 2
    assert {row["weights/num_engines"] for row in metrics} >= {1.0, 2.0}
