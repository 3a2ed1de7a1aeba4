"""The Grafana dashboard: a list of panels with one or more queries each, written as JSON."""

from typing import Any

from raylearner.observability.metrics import METRICS, entry_of, gauge_names

Query = tuple[str, str]
"""A key or an entry of the metric table, and the legend of its lines."""

PANELS: tuple[tuple[str, str, str, tuple[Query, ...]], ...] = (
    ("Reward", "short", "Rewards of the trained trajectories.", (
        ("rollout/reward/mean", "mean {{run}}"),
        ("evaluation/reward/mean", "evaluation {{run}}"),
    )),
    ("Data sources", "short", "Rewards by data source.", (
        ("rollout/source/<source>/reward/mean", "{{source}} {{run}}"),
    )),
    ("Throughput", "short", "Tokens per second.", (
        ("rollout/tokens_per_s", "sampled {{run}}"),
        ("learner/tokens_per_s", "trained {{run}}"),
    )),
    ("Staleness", "short", "Versions between the sampling of the oldest token and its training.", (
        ("buffer/staleness/mean", "mean {{run}}"),
        ("buffer/staleness/max", "max {{run}}"),
    )),
    ("Idle", "percentunit", "Shares of time spent waiting for the other side.", (
        ("learner/idle_fraction", "learner {{run}}"),
        ("rollout/idle_fraction", "rollout {{run}}"),
    )),
    ("Weight pushes", "s", "Time from the learner's write to the last engine's acknowledgement.", (
        ("weights/publish_s", "publish {{run}}"),
        ("weights/pause_s", "engines paused {{run}}"),
        ("weights/write_s", "write {{run}}"),
    )),
    ("Engine vs. learner", "short", "Log-probabilities of learner and engine, in nats.", (
        ("weights/logprob_error", "probe {{run}}"),
        ("learner/logprob_gap/mean", "sampled tokens {{run}}"),
    )),
    ("Tool latency", "s", "Latency on the slowest actor.", (
        ("tools/<name>/latency_s/<aggregate>", "{{name}} {{aggregate}} {{run}}"),
    )),
    ("Tool calls and errors", "short", "Calls since the last step.", (
        ("tools/<name>/calls", "{{name}} calls {{run}}"),
        ("tools/<name>/errors", "{{name}} errors {{run}}"),
        ("tools/<name>/retries", "{{name}} retries {{run}}"),
    )),
    ("Failed episodes", "short", "Failed episodes by cause, since the run began.", (
        ("rollout/errors/<kind>", "{{kind}} {{run}}"),
        ("rollout/restarts", "actors replaced {{run}}"),
    )),
    ("Failed episodes by source", "short", "Failed episodes of each data source, since the run began.", (
        ("rollout/source/<source>/errors", "{{source}} {{run}}"),
    )),
    ("Dropped groups", "short", "Dropped groups by reason, since the run began.", (
        ("buffer/dropped/<why>", "{{why}} {{run}}"),
    )),
    ("Buffer", "short", "Groups by state, and trajectories.", (
        ("buffer/groups/<state>", "groups {{state}} {{run}}"),
        ("buffer/size", "trajectories {{run}}"),
    )),
    ("Lengths", "short", "Tokens of finished and of trained episodes; a large difference indicates bias.", (
        ("buffer/finished/tokens/<aggregate>", "finished {{aggregate}} {{run}}"),
        ("buffer/trained/tokens/<aggregate>", "trained {{aggregate}} {{run}}"),
    )),
    ("Loss and gradient", "short", "", (
        ("learner/loss", "loss {{run}}"),
        ("learner/grad_norm", "gradient norm {{run}}"),
    )),
    ("Policy", "short", "", (
        ("learner/entropy", "entropy {{run}}"),
        ("learner/kl", "KL to the reference {{run}}"),
        ("learner/clip_fraction", "clipped {{run}}"),
        ("learner/importance_weight/ess", "effective samples {{run}}"),
    )),
    ("Steps", "short", "", (
        ("step", "step {{run}}"),
        ("policy_version", "policy version {{run}}"),
        ("learner/skipped_steps", "skipped {{run}}"),
    )),
    ("Step time", "s", "", (
        ("learner/step_s", "learner {{run}}"),
        ("buffer/wait_s", "waiting for groups {{run}}"),
    )),
)  # fmt: skip
"""Title, unit, description and queries."""

WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def expression(key: str) -> str:
    """Return the PromQL query of a key, or of all keys of an entry, for the runs chosen on the dashboard."""
    entry, tags = (key, {}) if key in METRICS else entry_of(key) or (key, {})
    matchers = ['run=~"$run"', *(f'{name}="{value}"' for name, value in tags.items())]
    return f"ray_{gauge_names()[entry]}{{{','.join(matchers)}}}"


def dashboard() -> dict[str, Any]:
    """Return the content of launch/grafana/raylearner.json."""
    return {
        "title": "raylearner",
        "uid": "raylearner",
        "tags": ["ray", "raylearner"],
        "timezone": "browser",
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _runs()]},
        "panels": [_panel(index, *panel) for index, panel in enumerate(PANELS)],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _runs() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values(ray_{gauge_names()['step']}, run)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(
    index: int, title: str, unit: str, description: str, queries: tuple[Query, ...]
) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": index + 1,
        "title": title,
        "description": description,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {
            "x": index % COLUMNS * WIDTH,
            "y": index // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "expr": expression(entry),
                "legendFormat": legend,
                "datasource": source,
            }
            for number, (entry, legend) in enumerate(queries)
        ],
    }
