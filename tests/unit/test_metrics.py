"""Metrics: each key matches one entry of the table, Ray's names are unique, the dashboard's queries exist."""

import math
import re
import time
from typing import Any, ClassVar

import pytest

from raylearner.observability.grafana import dashboard, expression
from raylearner.observability.metrics import (
    METRICS,
    TABLE,
    entry_of,
    gauge_names,
    placeholders,
    spec_of,
    undocumented,
)
from raylearner.observability.sinks import ray_metrics
from raylearner.observability.sinks.sink import StepRecord


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


def targets() -> list[dict[str, Any]]:
    return [target for panel in dashboard()["panels"] for target in panel["targets"]]


def test_every_entry_of_the_table_has_a_name_of_its_own() -> None:
    names = gauge_names()
    assert set(names) == set(METRICS)
    assert len(set(names.values())) == len(names)
    assert all(re.fullmatch(r"raylearner_[a-z0-9_]+", name) for name in names.values())
    assert all(
        not name.endswith(("_total", "_bucket", "_sum", "_count")) or "/" in key
        for key, name in names.items()
    )


def test_placeholders_become_tags() -> None:
    names = gauge_names()
    assert entry_of("tools/search/latency_s/p99") == (
        "tools/<name>/latency_s/<aggregate>",
        {"name": "search", "aggregate": "p99"},
    )
    assert names["tools/<name>/latency_s/<aggregate>"] == "raylearner_tools_latency_s"
    assert names["rollout/errors/<kind>"] == "raylearner_rollout_errors"
    assert names["rollout/reward/mean"] == "raylearner_rollout_reward_mean"
    assert names["rollout/reward/<part>/mean"] == "raylearner_rollout_reward_mean_by_part"
    assert entry_of("no/such/key") is None


def test_every_query_of_the_dashboard_names_a_metric_and_tags_that_exist() -> None:
    entries = {f"ray_{name}": entry for entry, name in gauge_names().items()}
    for target in targets():
        match = re.fullmatch(r'(ray_[a-z0-9_]+)\{run=~"\$run"((?:,\w+="[^"]+")*)\}', target["expr"])
        assert match is not None, target["expr"]
        assert match[1] in entries, f"{match[1]} is no metric"
        tags = {"run", *placeholders(entries[match[1]])}
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= tags, target
        assert set(re.findall(r'(\w+)="', match[2])) <= tags, target


def test_lines_of_one_panel_can_be_told_apart() -> None:
    entries = {f"ray_{name}": entry for entry, name in gauge_names().items()}
    for target in targets():
        entry = entries[target["expr"].partition("{")[0]]
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        shown |= set(re.findall(r'(\w+)="', target["expr"]))  # only one value
        assert {"run", *placeholders(entry)} <= shown, target


def test_panels_do_not_overlap() -> None:
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard()["panels"]]
    assert len(set(cells)) == len(cells)


def test_a_panel_can_select_one_of_many_keys() -> None:
    assert expression("evaluation/reward/mean") == (
        'ray_raylearner_evaluation{run=~"$run",key="reward/mean"}'
    )


class FakeGauge:
    """Keeps what was set last by tags, and how often."""

    made: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, **_: Any) -> None:
        self.values: dict[str, list[float]] = {}
        self.made[name] = self

    def set(self, value: float, *, tags: dict[str, str]) -> None:
        self.values.setdefault(" ".join(tags.values()), []).append(value)


def test_values_are_repeated_between_steps_until_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray drops a gauge that is not set again, as during a step of minutes."""
    monkeypatch.setattr(ray_metrics, "Gauge", FakeGauge)
    monkeypatch.setattr(ray_metrics, "REPEAT_S", 0.001)
    sink = ray_metrics.RayMetrics(run_name="first")
    sink.write(StepRecord(step=0, scalars={"evaluation/reward/mean": 0.5}))
    sink.write(StepRecord(step=1, scalars={"learner/loss": 1.0, "learner/kl": 2.0}, is_whole=True))
    sink.write(StepRecord(step=2, scalars={"learner/loss": 3.0}, is_whole=True))
    loss = FakeGauge.made["raylearner_learner_loss"].values["first"]
    count = len(loss)
    deadline_s = time.monotonic() + 5
    while len(loss) < count + 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert loss[-3:] == [3.0] * 3
    assert FakeGauge.made["raylearner_evaluation"].values["first reward/mean"][-1] == 0.5
    assert math.isnan(FakeGauge.made["raylearner_learner_kl"].values["first"][-1])
    sink.close()
    assert all(
        math.isnan(values[-1])
        for gauge in FakeGauge.made.values()
        for values in gauge.values.values()
    )
