"""Runs of the real command line, and what their metrics come to."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.common import ROOT, end, environment, mean, rows

KEYS = (
    "rollout/reward/mean",
    "rollout/sampled_tokens/mean",
    "rollout/tokens_per_s",
    "rollout/actors",
    "rollout/idle_fraction",
    "learner/idle_fraction",
    "learner/tokens_per_s",
    "learner/step_s",
    "learner/mfu",
    "learner/peak_memory_gib",
    "learner/logprob_gap/mean",
    "buffer/staleness/mean",
    "buffer/staleness/max",
    "buffer/wait_s",
    "buffer/finished/tokens/mean",
    "buffer/trained/tokens/mean",
    "buffer/trained_to_finished_length",
    "buffer/masked_fraction",
    "weights/publish_s",
    "weights/write_s",
    "weights/pause_s",
    "weights/update_s",
    "weights/send_s",
    "weights/probe_s",
    "weights/logprob_error",
    "weights/verify_s",
    "weights/verify_tensors",
)


class Run:
    """One `python -m raylearner train` in a process group of its own."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any] | Path,
        *arguments: str,
        gpus: Sequence[str] | None = None,
        cpu: bool = False,
    ) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = config if isinstance(config, Path) else folder.with_suffix(".yaml")
        if not isinstance(config, Path):
            path.write_text(yaml.safe_dump(config))
        self._log = folder.with_suffix(".log")
        command = [sys.executable, "-m", "raylearner", "train", str(path), f"run.dir={folder}"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=environment(gpus, cpu=cpu),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def metrics(self) -> list[dict[str, Any]]:
        return rows(self.folder / "metrics.jsonl")

    def wait(
        self, *, timeout_s: float, enough: Callable[[list[dict[str, Any]]], bool] | None = None
    ) -> int | None:
        """Until it ends, has made `enough` steps, or runs out of time, and is then ended."""
        until = time.monotonic() + timeout_s
        try:
            while self.process.poll() is None and time.monotonic() < until:
                if enough is not None and enough(self.metrics()):
                    return 0
                time.sleep(0.5)
            return self.process.poll()
        finally:
            end(self.process)

    def tail(self, num_lines: int = 25) -> list[str]:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return text.splitlines()[-num_lines:]


def summary(
    metrics: Sequence[dict[str, Any]], *, skip: int, trajectories_per_step: int
) -> dict[str, Any]:
    """Rates over the steps after the first `skip`, means of what is worth knowing."""
    kept = metrics[skip:] if len(metrics) > skip + 1 else metrics
    if len(kept) < 2:
        return {"num_steps": len(metrics)}
    seconds = kept[-1]["time_s"] - kept[0]["time_s"]
    found: dict[str, Any] = {
        "num_steps": len(metrics),
        "seconds": seconds,
        "steps_per_s": (len(kept) - 1) / seconds,
        "first_step_s": metrics[0]["time_s"],
    }
    found["trained_trajectories_per_s"] = trajectories_per_step * (len(kept) - 1) / seconds
    for key in KEYS:
        values = [step[key] for step in kept if step.get(key) is not None]
        if values:
            found[key] = mean(values)
    third = max(1, len(metrics) // 3)
    rewards = [step.get("rollout/reward/mean") or 0.0 for step in metrics]
    found["reward_first_third"] = mean(rewards[:third])
    found["reward_last_third"] = mean(rewards[-third:])
    return found
