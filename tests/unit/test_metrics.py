"""Metric keys: their combination, and that each documented key is in the documentation."""

import math
import re
from pathlib import Path

import pytest

from raylearner.observability.metric_table import TABLE, markdown
from raylearner.observability.metrics import METRICS, MetricLog, spec_of, undocumented

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
    "weights/proof_gap",
]


def test_values_of_one_key_combine_as_asked() -> None:
    log = MetricLog()
    log.mean("mean", 1.0, weight=3)
    log.mean("mean", 5.0)
    for value in (2.0, 7.0, 3.0):
        log.sum("sum", value)
        log.max("max", value)
        log.min("min", value)
        log.last("last", value)
    assert log.drain() == {"last": 3.0, "max": 7.0, "mean": 2.0, "min": 2.0, "sum": 12.0}
    assert log.drain() == {}


def test_a_mean_of_nothing_is_nan_and_an_unweighted_nan_does_no_harm() -> None:
    log = MetricLog()
    log.mean("a", math.nan, weight=0)
    assert math.isnan(log.drain()["a"])
    log.mean("a", math.nan, weight=0)
    log.mean("a", 2.0)
    assert log.drain() == {"a": 2.0}


def test_merging_equals_logging_in_one_place() -> None:
    one, parts = MetricLog(), [MetricLog(), MetricLog()]
    for index, value in enumerate([1.0, 4.0, 2.5]):
        for log in (one, parts[index % 2]):
            log.mean("mean", value, weight=index + 1)
            log.max("max", value)
    parts[0].merge(parts[1])
    assert parts[0].drain() == pytest.approx(one.drain())


def test_a_key_keeps_its_combination() -> None:
    log = MetricLog()
    log.mean("a", 1.0)
    with pytest.raises(AssertionError):
        log.max("a", 1.0)


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
