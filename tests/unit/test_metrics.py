"""Metric keys: each documented key is in the documentation."""

import re
from pathlib import Path

from raylearner.observability.metrics import METRICS, TABLE, markdown, spec_of, undocumented

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
# docs of the run directory promise these to whoever reads metrics.jsonl.
FIXED = [
    "step",
    "policy_version",
    "time_s",
    "rollout/reward/mean",
    "rollout/turns/mean",
    "rollout/tokens_per_s",
    "rollout/idle_fraction",
    "rollout/errors/tool",
    "buffer/size",
    "buffer/staleness/mean",
    "buffer/staleness/max",
    "buffer/dropped/late",
    "learner/loss",
    "learner/grad_norm",
    "learner/clip_fraction",
    "learner/entropy",
    "learner/logprob_gap/mean",
    "learner/importance_weight/ess",
    "learner/tokens_per_s",
    "learner/idle_fraction",
    "weights/publish_s",
    "weights/pause_s",
    "weights/logprob_error",
]


def test_the_fixed_keys_are_documented() -> None:
    assert undocumented(FIXED) == []


def test_patterns_cover_one_part_and_no_more() -> None:
    spec = spec_of("rollout/errors/tool")
    assert spec is METRICS["rollout/errors/<kind>"]
    assert spec_of("rollout/errors/tool/x") is None
    assert spec_of("evaluation/reward/mean") is not None
    assert undocumented(["learner/nonsense", "learner/loss"]) == ["learner/nonsense"]


def test_the_table_has_no_key_twice_and_every_key_reads_area_quantity() -> None:
    keys = [key for key, _, _ in TABLE]
    assert len(keys) == len(set(keys))
    for key in keys:
        assert re.fullmatch(r"[a-z_]+(/[a-z0-9_]*(<[a-z]+>)?)*", key), key
        assert METRICS[key].description.endswith(".")


def test_the_documentation_holds_the_table() -> None:
    assert markdown() in DOCUMENT.read_text()
