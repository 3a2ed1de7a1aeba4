"""Tiny warm-started agents learn to use their tools: search and code, through the whole loop, on a CPU.

    python benchmarks/agents.py [--agent search_qa] [--plot docs/figures/agents.png] [key=value ..]

Starts the service that an agent needs, trains it with `configs/<agent>.yaml` and its overlays in
`configs/tiny/`, and fails unless the mean reward of the last ten steps is 0.3 above the first ten's.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from raylearner.learner.mesh import free_port
from raylearner.services.corpora.records import write_records
from raylearner.tools.http import wait_for_service

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ("search_qa", "code_agent")
MIN_RISE = 0.3


@contextmanager
def search_service(folder: Path) -> Iterator[list[str]]:
    """The overrides that point a run to a service over invented records."""
    import asyncio

    write_records(folder)
    port = free_port()
    module = "raylearner.services.search"
    command = [sys.executable, "-m", module, "--corpus", str(folder / "records.jsonl")]
    process = subprocess.Popen([*command, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(wait_for_service(url, wait_s=60))
        yield [
            f"environment.tools=[{{kind: search, url: '{url}', top_n: 1}}]",
            f"data.train.path={folder / 'questions.jsonl'}",
            f"data.evaluation.path={folder / 'questions_held_out.jsonl'}",
        ]
    finally:
        process.terminate()
        process.wait()


def play(agent: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train one agent; its rewards by step, evaluations and time."""
    configs = [ROOT / "configs" / f"{agent}.yaml", ROOT / "configs/tiny/cpu.yaml"]
    configs.append(ROOT / "configs" / "tiny" / f"{agent}.yaml")
    run = folder / agent
    with ExitStack() as stack:
        if agent == "search_qa":
            overrides = [*stack.enter_context(search_service(folder / "records")), *overrides]
        started = time.monotonic()
        command = [sys.executable, "-m", "raylearner", "train", *map(str, configs), *overrides]
        subprocess.run([*command, f"run.dir={run}"], check=True, cwd=ROOT)
        taken_s = time.monotonic() - started

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run / name).read_text().splitlines()]

    rewards = [row["rollout/reward/mean"] for row in rows("metrics.jsonl")]
    return {
        "agent": agent,
        "rewards": rewards,
        "first": sum(rewards[:10]) / 10,
        "last": sum(rewards[-10:]) / 10,
        "evaluations": [(row["step"], row["reward/mean"]) for row in rows("eval.jsonl")],
        "taken_s": taken_s,
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for result in results:
        axes.plot(range(1, len(result["rewards"]) + 1), result["rewards"], label=result["agent"])
    axes.set(xlabel="learner step", ylabel="mean reward of the batch", ylim=(0, 1.02))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the runs.")] = None,
    agent: Annotated[list[str] | None, typer.Option(help="search_qa, code_agent; all.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="PNG to write.")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = [play(name, Path(folder), list(overrides or [])) for name in agent or AGENTS]
    for result in results:
        typer.echo(
            f"{result['agent']}: first ten {result['first']:.3f}, last ten {result['last']:.3f}, "
            f"greedy on held-out prompts {result['evaluations']}, {result['taken_s']:.0f} s"
        )
    if plot_to is not None:
        plot(results, plot_to)
    if any(result["last"] < result["first"] + MIN_RISE for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
