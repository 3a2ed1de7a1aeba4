"""A run seen as a person sees it: a real Prometheus answers every query of the Grafana dashboard, whose
panels are drawn from the answers, and a browser takes pictures of Ray's dashboard, TensorBoard and the trajectory page.

    python -m benchmarks.dashboards CONFIG OUT_FOLDER [key=value..]

Needs `prometheus` and `chromium` on the path; starts a Ray of its own and ends it.
"""

import asyncio
import base64
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from raylearner.jobs import client as jobs_client
from raylearner.observability.grafana import COLUMNS, HEIGHT, WIDTH, dashboard

ROOT = Path(__file__).parents[1]
SIZE = (1500, 950)
SETTLE_S = 8.0
"""Time that a page has to fetch and draw."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def process(*command: str, log: Path, **variables: str) -> Iterator[None]:
    """Runs beside the block; ended with all that it started."""
    with log.open("w") as output:
        started = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=ROOT,
        )
    try:
        yield
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)


def wait_for_url(url: str, *, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def answers(prometheus: str) -> dict[str, int]:
    """How many series every query of the dashboard gives."""
    found: dict[str, int] = {}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            query = urllib.parse.urlencode({"query": target["expr"].replace("$run", ".*")})
            with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=10) as answer:
                said = json.load(answer)
            assert said["status"] == "success", said
            found[f"{panel['title']}: {target['expr']}"] = len(said["data"]["result"])
    return found


def draw(prometheus: str, path: Path, *, minutes: float = 5.0) -> None:
    """Draw the last minutes of every panel with its legend, from the answers of Prometheus, as Grafana lays
    them out."""
    from matplotlib.figure import Figure

    panels = dashboard()["panels"]
    num_rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(
        figsize=(4.6 * COLUMNS, 2.4 * num_rows), layout="constrained", facecolor="white"
    )
    grid = figure.subplots(num_rows, COLUMNS, squeeze=False)
    end_s = time.time()
    for axes in grid.flat:
        axes.set_visible(False)
    for panel in panels:
        place = panel["gridPos"]
        axes = grid[place["y"] // HEIGHT][place["x"] // WIDTH]
        axes.set_visible(True)
        axes.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
        for target in panel["targets"]:
            for series in _range(prometheus, target["expr"], end_s - 60 * minutes, end_s):
                label = re.sub(
                    r"\{\{(\w+)\}\}",
                    lambda found, series=series: series["metric"].get(found[1], ""),
                    target["legendFormat"],
                )
                points = [(float(t) - end_s, float(value)) for t, value in series["values"]]
                axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
            axes.yaxis.set_major_formatter("{x:.0%}")
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=6, ncols=2, loc="upper left", frameon=False)
        else:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    figure.savefig(path, dpi=100)


def _range(prometheus: str, query: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    arguments = {"query": query.replace("$run", ".*"), "start": start_s, "end": end_s, "step": 2}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(arguments)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]["result"]


async def pictures(pages: dict[str, str], folder: Path, *, token: str) -> None:
    """Each page as `NAME.png`, by Chromium's debugging protocol, with Ray's token as a header."""
    port = free_port()
    command = [
        *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
        *(f"--remote-debugging-port={port}", f"--window-size={SIZE[0]},{SIZE[1]}"),
        f"--user-data-dir={folder / 'browser'}",
    ]
    with process(*command, log=folder / "browser.txt"):
        await asyncio.to_thread(wait_for_url, f"http://127.0.0.1:{port}/json/version")
        async with aiohttp.ClientSession() as session:
            for name, url in pages.items():
                picture = await _picture(session, f"http://127.0.0.1:{port}", url, token=token)
                (folder / f"{name}.png").write_bytes(picture)


async def _picture(session: aiohttp.ClientSession, browser: str, url: str, *, token: str) -> bytes:
    async with session.put(f"{browser}/json/new?about:blank") as answer:
        tab = await answer.json(content_type=None)
    async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket_:
        number = 0

        async def call(method: str, **parameters: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            await socket_.send_json({"id": number, "method": method, "params": parameters})
            while True:
                said = await socket_.receive_json()
                if said.get("id") == number:
                    return said["result"]

        await call("Network.enable")
        await call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {token}"})
        await call("Page.navigate", url=url)
        await asyncio.sleep(SETTLE_S)
        return base64.b64decode((await call("Page.captureScreenshot", format="png"))["data"])


def main(config: str, out: Path, overrides: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    ray_port, ray_url = free_port(), f"http://127.0.0.1:{(board := free_port())}"
    prometheus = f"http://127.0.0.1:{(prometheus_port := free_port())}"
    tensorboard = f"http://127.0.0.1:{(tensorboard_port := free_port())}"
    viewer = f"http://127.0.0.1:{(viewer_port := free_port())}"
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_PROMETHEUS_HOST": prometheus}
    python, run_dir = sys.executable, out / "run"
    targets = "/tmp/ray/prom_metrics_service_discovery.json"
    scrape = {"job_name": "ray", "file_sd_configs": [{"files": [targets]}]}
    settings = {"global": {"scrape_interval": "2s"}, "scrape_configs": [scrape]}
    (out / "prometheus.yml").write_text(json.dumps(settings))
    head = [
        *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--port={ray_port}", f"--dashboard-port={board}", "--num-cpus=8"),
        *("--node-ip-address=127.0.0.1", "--object-store-memory=150000000"),
    ]
    watch = [
        *("prometheus", f"--config.file={out / 'prometheus.yml'}"),
        *(
            f"--storage.tsdb.path={out / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        ),
    ]
    with process(*head, log=out / "ray.txt"), process(*watch, log=out / "prometheus.txt"):
        wait_for_url(f"{ray_url}/api/version")
        client = jobs_client.connect(ray_url)
        arguments = ["train", config, *overrides, f"run.dir={run_dir}"]
        about = {"run": run_dir.name}
        job = jobs_client.submit(
            client, arguments, environment=jobs_client.runtime_env(str(ROOT)), about=about
        )
        metrics = run_dir / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert not client.get_job_status(job).is_terminal(), client.get_job_logs(job)[-2000:]
            time.sleep(1)
        time.sleep(20)  # Ray reports every few seconds, Prometheus scrapes every two
        found = answers(prometheus)
        lines = [f"{count:4d}  {query}" for query, count in found.items()]
        (out / "queries.txt").write_text("\n".join(lines) + "\n")
        draw(prometheus, out / "panels.png")
        pages = {
            "jobs": f"{ray_url}/#/jobs",
            "actors": f"{ray_url}/#/actors",
            "metrics": f"{ray_url}/#/metrics",
            "prometheus": f"{prometheus}/graph?g0.tab=0&g0.range_input=5m&g0.expr="
            + urllib.parse.quote("ray_raylearner_rollout_reward_mean"),
            "tensorboard_scalars": f"{tensorboard}/?darkMode=false#timeseries",
            "tensorboard_histograms": f"{tensorboard}/#histograms",
            "tensorboard_text": f"{tensorboard}/#text",
            "viewer": viewer,
        }
        board_of_run = [
            *(python, "-m", "tensorboard.main", f"--logdir={run_dir}", "--host=127.0.0.1"),
            f"--port={tensorboard_port}",
        ]
        view = [python, "-m", "raylearner", "view", str(run_dir), f"--port={viewer_port}"]
        with (
            process(*board_of_run, log=out / "tensorboard.txt"),
            process(*view, log=out / "viewer.txt"),
        ):
            wait_for_url(tensorboard)
            wait_for_url(viewer)
            token = (Path.home() / ".ray" / "auth_token").read_text().strip()
            asyncio.run(pictures(pages, out, token=token))
        client.stop_job(job)
        while not client.get_job_status(job).is_terminal():
            time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3:])
