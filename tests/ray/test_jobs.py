"""Runs as jobs of a cluster, by the Jobs API: submitted, watched, scraped, stopped, gone on with; a
sweep of four with one made to fail."""

import csv
import json
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from loop import ENVIRONMENT, ROOT, SCRIPTED, merged, pretrained, rows, run_cli, wait_for

from raylearner.jobs import client as jobs_client
from raylearner.observability.grafana import dashboard

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]

ONE_ACTOR: dict[str, Any] = {
    "actors": {"num_actors": 1},
    "observability": {"trajectories_every_steps": 0},
}


@pytest.fixture
def project(tmp_path: Path, model: Path) -> Path:
    """A user's working directory: the package and a configuration."""
    shutil.copytree(ROOT / "raylearner", tmp_path / "raylearner")
    shutil.copy(ROOT / "benchmarks" / "faults" / "scripts.py", tmp_path / "faults.py")
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(merged(SCRIPTED, ONE_ACTOR | {"model": pretrained(model)}))
    )
    return tmp_path


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Any]:
    before = dict(os.environ)
    try:
        yield jobs_client.connect(f"http://127.0.0.1:{cluster.dashboard_port}")
    finally:
        os.environ.clear()
        os.environ.update(before)


def cli(project: Path, *arguments: str, address: str, code: int = 0) -> str:
    environment = {**ENVIRONMENT, "PYTHONPATH": "", "RAY_ADDRESS": address}
    return run_cli(*arguments, timeout_s=240, code=code, folder=project, environment=environment)


def job_of(output: str) -> str:
    match = re.search(r"job (\S+) runs on", output)
    assert match is not None, output
    return match[1]


def ended(client: Any, job: str) -> bool:
    return client.get_job_status(job).is_terminal()


def test_a_job_is_submitted_watched_scraped_stopped_and_gone_on_with(
    project: Path, client: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = client.get_address()
    (project / "keys.py").write_text(
        "import os\ndef has_key(episode): return float(os.environ.get('DEMO_KEY') == 'hunter-2')\n"
    )
    reward = "rewards.functions=[{kind: keys:has_key}]"
    arguments = ("run.yaml", "run.dir=runs/a", "run.num_steps=2000", "run.name=watched", reward)
    monkeypatch.setitem(ENVIRONMENT, "DEMO_KEY", "hunter-2")
    job = job_of(cli(project, "submit", "--env", "DEMO_KEY", *arguments, address=address))
    monkeypatch.delitem(ENVIRONMENT, "DEMO_KEY")
    info = client.get_job_info(job)
    assert set(info.metadata) >= {"run", "commit", "config"}
    assert "hunter-2" not in str(info)
    metrics = project / "runs" / "a" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(rows(metrics)) >= 3, what="three steps")
    wait_for(
        lambda: drawn() - exported(cluster.metrics_port, run="watched") <= NOT_IN_THIS_RUN,
        what="the metrics of the dashboard's panels",
        pause_s=0.5,
    )
    client.stop_job(job)
    wait_for(lambda: ended(client, job), what="the stop")
    assert client.get_job_status(job) == "STOPPED"
    assert {row["rollout/reward/mean"] for row in rows(metrics)} == {1.0}
    log = client.get_job_logs(job)
    assert "hunter-2" not in log
    assert "stopped on request at step" in log
    assert "--resume" in log
    assert "\r" not in log
    assert "\x1b" not in log
    last = rows(metrics)[-1]["step"]
    assert [path.name for path in (project / "runs/a/checkpoints").iterdir()] == [
        f"step_{last:06d}"
    ]
    arguments = ("--resume", "runs/a", f"run.num_steps={last + 2}", "--follow")
    output = cli(project, "submit", *arguments, address=address)
    assert f"restored step {last}" in output
    assert [row["step"] for row in rows(metrics)] == list(range(1, last + 3))


NOT_IN_THIS_RUN = {
    f"ray_raylearner_{name}"
    for name in (
        *("evaluation", "learner_kl", "rollout_errors"),
        *("tools_calls", "tools_errors", "tools_latency_s", "tools_retries"),
    )
}
"""It has no evaluation, no reference policy, no failed episodes and no tools."""


def drawn() -> set[str]:
    """Names of the metrics on the Grafana dashboard."""
    targets = [target for panel in dashboard()["panels"] for target in panel["targets"]]
    return {target["expr"].partition("{")[0] for target in targets}


def exported(port: int, *, run: str) -> set[str]:
    """Names of one run's metrics, as Prometheus would read them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.partition("{")[0] for line in lines if f'run="{run}"' in line}


def test_a_sweep_of_four_goes_on_without_the_one_that_fails(
    project: Path, client: Any, cluster: Cluster
) -> None:
    sweep = {
        "name": "four",
        "base": ["run.yaml"],
        "overrides": {"run.num_steps": 2},
        "axes": [
            {
                "key": "actors.engine.script",
                "values": [
                    "raylearner.actors.engines.scripted:RandomTokens",
                    "faults:NeverStarts",
                ],
            },
            {"key": "learner.learning_rate", "values": [1e-3, 1e-2, 1e-1]},
        ],
        "exclude": [
            {
                "actors.engine.script": "faults:NeverStarts",
                "learner.learning_rate": 1e-2,
            },
            {
                "actors.engine.script": "faults:NeverStarts",
                "learner.learning_rate": 1e-1,
            },
        ],
        "metric": {"last_steps": 1},
    }
    (project / "four.yaml").write_text(yaml.safe_dump(sweep))
    output = cli(project, "sweep", "four.yaml", address=cluster.address, code=1)
    assert "1 of 4 trials failed" in output
    folder = project / "runs" / "sweeps" / "four"
    with (folder / "results.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [row["status"] for row in found] == ["done", "done", "done", "failed"]
    assert [row["attempts"] for row in found] == ["1", "1", "1", "2"]
    assert "faults:NeverStarts" in found[3]["error"]
    assert all(0 <= float(row["value"]) <= 1 for row in found[:3])
    assert len(list((folder / "plots").glob("*.png"))) == 3  # each axis, and the learning curves
    states = json.loads((folder / "sweep.json").read_text())["trials"]
    told = {client.get_job_info(state["submission_id"]).metadata["trial"] for state in states}
    assert told == {"000", "001", "002", "003"}
