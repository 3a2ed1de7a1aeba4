"""A sweep's loop over simulated jobs: which are started, followed, stopped and retried."""

import json
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import requests
import yaml
from minimal import MINIMAL
from rows import write_jsonl

from raylearner.errors import RaylearnerError, RunStopped
from raylearner.jobs import client as jobs_client
from raylearner.jobs.sweep import figures, plan, report, runner, trial_jobs
from raylearner.jobs.sweep.state import Status, SweepState
from raylearner.run import cluster

SIZE = cluster.RunSize(cpus=1.0, gpus=0.0, num_actors=1, num_ranks=1)


class Cluster:
    """Plays the Jobs API: each poll calls `status` with the trial and its attempt, from 0.

    `status` returns a job's status or the code of an HTTP error.
    """

    def __init__(
        self, status: Callable[[int, int], str | int] = lambda number, attempt: "SUCCEEDED"
    ) -> None:
        self.status = status
        self.started: list[int] = []
        self.stopped: list[int] = []
        self.trials: dict[str, tuple[int, int]] = {}

    def submit_job(self, *, submission_id: str, metadata: Any, **more: Any) -> str:
        number = int(metadata["trial"])
        self.trials[submission_id] = (number, self.started.count(number))
        self.started.append(number)
        return submission_id

    def _do_request(self, method: str, endpoint: str) -> requests.Response:
        number, attempt = self.trials[endpoint.split("/")[3]]
        response = requests.Response()
        response.status_code = 200
        if method == "POST":
            self.stop(number)
            return response
        status = self.status(number, attempt)
        if isinstance(status, int):
            response.status_code = status
        response._content = json.dumps({"status": status}).encode()
        return response

    def stop(self, number: int) -> None:
        self.stopped.append(number)

    def get_job_logs(self, job: str) -> str:
        return "a line\nthe run failed: it broke"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    monkeypatch.setattr(jobs_client, "is_local", lambda client: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(report, "plot", lambda *arguments: [])
    ids = iter(range(10**6))
    monkeypatch.setattr(runner.time, "time", lambda: float(next(ids)))
    Path("base.yaml").write_text(MINIMAL)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def make_sweep(folder: Path, cluster: Any, *, seeds: int = 2, asha: Any = None) -> runner.Sweep:
    """Over what the folder holds already."""
    sweep = {
        "name": "s",
        "base": ["base.yaml"],
        "axes": [{"key": "replay.group_size", "values": [4]}],
        "seeds": list(range(seeds)),
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    read = plan.read("sweep.yaml")
    followed = trial_jobs.TrialJobs(cluster, {"working_dir": "."})
    sizes = {trial.number: SIZE for trial in read.trials}
    return runner.Sweep(read, SweepState(folder / "sweep", read), followed, sizes=sizes, asha=asha)


def standing(folder: Path) -> list[tuple[str, int]]:
    trials = json.loads((folder / "sweep" / "sweep.json").read_text())["trials"]
    return [(trial["status"], trial["num_attempts"]) for trial in trials]


def write_curve(folder: Path, number: int, value: float, num_steps: int) -> None:
    run_dir = folder / "sweep" / "trials" / f"{number:03d}"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()  # which a job would resume
    rows = [{"step": s, "rollout/reward/mean": value} for s in range(1, num_steps + 1)]
    write_jsonl(run_dir / "metrics.jsonl", *rows)


@pytest.mark.parametrize("error", [500, requests.ConnectionError("refused")])
def test_a_job_is_not_started_again_while_the_cluster_does_not_answer(
    folder: Path, error: int | Exception
) -> None:
    looks = 0

    def status(number: int, attempt: int) -> str | int:
        nonlocal looks
        looks += 1
        if looks > 5:
            return "SUCCEEDED"
        if isinstance(error, int):
            return error
        raise error

    cluster = Cluster(status)
    make_sweep(folder, cluster).run()
    assert cluster.started == [0, 1]
    assert standing(folder) == [("done", 1), ("done", 1)]


def test_a_cluster_that_stays_silent_ends_the_sweep_and_a_job_it_lost_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_jobs, "PATIENCE_S", 0.0)

    def silent(number: int, attempt: int) -> str:
        raise requests.ConnectionError("refused")

    with pytest.raises(RaylearnerError, match="job s-000"):
        make_sweep(folder, Cluster(silent)).run()
    assert standing(folder) == [("running", 1), ("running", 1)]

    def status(number: int, attempt: int) -> str | int:
        return 404 if attempt == 0 and number == 0 else "SUCCEEDED"

    first = Cluster(status)
    trials = json.loads((folder / "sweep" / "sweep.json").read_text())["trials"]
    first.trials = {t["submission_id"]: (t["number"], 0) for t in trials}
    first.started = [0]
    make_sweep(folder, first).run()
    assert first.started == [0, 0]
    assert standing(folder) == [("done", 1), ("done", 1)]


def test_a_new_call_retries_failed_trials(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(lambda number, attempt: ("SUCCEEDED", "FAILED")[number])
    with pytest.raises(RaylearnerError, match=r"1 of 2 .*\n  001: it broke"):
        make_sweep(folder, cluster).run()
    assert cluster.started == [0, 1, 1]
    assert standing(folder) == [("done", 1), ("failed", 2)]
    fixed = Cluster()
    with caplog.at_level(logging.INFO):
        make_sweep(folder, fixed).run()
    assert ": 001" in caplog.text
    assert fixed.started == [1]
    assert standing(folder) == [("done", 1), ("done", 1)]


class _StopsTheSecond:
    """Stands for ASHA; keeps the curves that it gets."""

    def __init__(self) -> None:
        self.curves: dict[int, list[tuple[int, float]]] = {}

    def should_stop(self, number: int, curve: list[tuple[int, float]]) -> bool:
        self.curves[number] = curve
        return number == 1


def test_a_trial_that_is_stopped_early_keeps_its_cpus_until_its_job_has_ended(folder: Path) -> None:
    looks: list[int] = []

    def status(number: int, attempt: int) -> str:
        looks.append(number)
        if number == 1:
            return "STOPPED" if looks.count(1) > 4 else "RUNNING"
        if number == 0:
            return "SUCCEEDED" if looks.count(0) > 9 else "RUNNING"
        assert looks.count(1) == 5, "the third was started while the second was ending"
        return "SUCCEEDED"

    cluster = Cluster(status)
    make_sweep(folder, cluster, seeds=3, asha=_StopsTheSecond()).run()
    assert (cluster.started, cluster.stopped) == ([0, 1, 2], [1])
    assert standing(folder) == [("done", 1), ("stopped early", 1), ("done", 1)]


def test_early_stopping_sees_ended_trials_at_once_and_after_a_resume(folder: Path) -> None:
    for number, value in ((0, 0.5), (1, 0.1)):
        write_curve(folder, number, value, 2)

    def status(number: int, attempt: int) -> str:
        if number == 1:
            raise KeyboardInterrupt
        return "SUCCEEDED"

    first = _StopsTheSecond()
    cluster = Cluster(status)
    sweep = make_sweep(folder, cluster, asha=first)
    cluster.stop = lambda number: setattr(cluster, "status", lambda *_: "STOPPED")
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert first.curves == {0: [(1, 0.5), (2, 0.5)]}
    assert standing(folder) == [("done", 1), ("waiting", 0)]
    again = _StopsTheSecond()
    make_sweep(folder, Cluster(), asha=again).run()
    assert again.curves[0] == [(1, 0.5), (2, 0.5)]


def test_a_sweep_logs_missing_resources_and_errors_at_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "WAIT_LOG_S", 0.0)
    left = iter(range(3))

    def supply() -> dict[str, float]:
        if next(left, None) is None:
            raise RunStopped("enough")
        return {"CPU": 0.5}

    def broken(*arguments: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(ray, "cluster_resources", supply)
    monkeypatch.setattr(report, "write", broken)
    with pytest.raises(RunStopped, match="enough"):
        make_sweep(folder, Cluster()).run()
    assert "trial 000 waits for nodes: it needs 1 CPUs" in caplog.text
    assert "disk full" in caplog.text


def test_a_second_signal_does_not_interrupt_the_stop_of_trials(folder: Path) -> None:
    def status(number: int, attempt: int) -> str:
        if not cluster.stopped:
            signal.raise_signal(signal.SIGTERM)
        return "STOPPED"

    cluster = Cluster(status)
    stop = cluster.stop

    def interrupted_stop(number: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        stop(number)

    cluster.stop = interrupted_stop
    with pytest.raises(RunStopped):
        make_sweep(folder, cluster).run()
    assert cluster.stopped == [0, 1]
    assert standing(folder) == [("waiting", 0)] * 2


def test_an_attempt_counts_once_it_has_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()

    def refuse(**arguments: Any) -> str:
        raise RuntimeError("Request failed with status code 500: no")

    monkeypatch.setattr(cluster, "submit_job", refuse)
    with pytest.raises(RaylearnerError, match="status code 500"):
        make_sweep(folder, cluster).run()
    assert standing(folder) == [(Status.WAITING, 0)] * 2


def test_trials_get_the_packages_of_the_job_that_the_sweep_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pip = {"packages": ["einops"], "pip_check": False}
    given = {"working_dir": "gcs://a.zip", "py_modules": ["gcs://b.zip"], "pip": pip}
    job_config = {"runtime_env": {**given, "env_vars": {"A": "b"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job_config))
    assert given.items() <= trial_jobs.runtime_env(None).items()


def test_a_missing_plot_library_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RaylearnerError, match="matplotlib"):
        figures.check_matplotlib()
