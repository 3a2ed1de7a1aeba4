"""Tiny warm-started agents learn to use their tools: search and code, through the whole loop, on a CPU.

    python benchmarks/agents.py [--agent search_qa] [--plot docs/figures/agents.png] [key=value ..]

Starts the service that an agent needs, trains it with `configs/<agent>.yaml` and its overlays in
`configs/tiny/`, and fails unless the mean reward of the last ten steps is 0.3 above the first ten's.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from raylearner.learner.model.mesh import free_port
from raylearner.services.corpora.records import write_records
from raylearner.tools.service import wait_for_service

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ("search_qa", "code_agent")
MIN_RISE = 0.3


@contextmanager
def service(module: str, *arguments: str) -> Iterator[str]:
    """A service of raylearner in a process of its own; its address once it answers."""
    port = free_port()
    command = [sys.executable, "-m", f"raylearner.services.{module}", *arguments]
    process = subprocess.Popen([*command, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        asyncio.run(wait_for_service(url, wait_s=60))
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def search_service(folder: Path) -> Iterator[list[str]]:
    """The overrides that point a run to a service over invented records."""
    write_records(folder)
    with service("search", "--corpus", str(folder / "records.jsonl")) as url:
        yield [
            f"environment.tools=[{{kind: search, url: '{url}', top_n: 1}}]",
            *questions_of(folder),
        ]


def questions_of(folder: Path) -> list[str]:
    """The overrides that point a run to the questions that a corpus came with."""
    return [
        f"data.train.path={folder / 'questions.jsonl'}",
        f"data.evaluation.path={folder / 'questions_held_out.jsonl'}",
    ]


def play(agent: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train one agent; its rewards by step, evaluations and time."""
    configs = (f"{agent}.yaml", "tiny/cpu.yaml", f"tiny/{agent}.yaml")
    with ExitStack() as stack:
        if agent == "search_qa":
            overrides = [*stack.enter_context(search_service(folder / "records")), *overrides]
        return train(agent, configs, folder / agent, overrides)


def train(name: str, configs: Sequence[str], run: Path, overrides: list[str]) -> dict[str, Any]:
    """One run of files in `configs/` in the directory `run`; what is reported of it."""
    started = time.monotonic()
    files = [str(ROOT / "configs" / config) for config in configs]
    command = [sys.executable, "-m", "raylearner", "train", *files, *overrides]
    subprocess.run([*command, f"run.dir={run}"], check=True, cwd=ROOT)
    taken_s = time.monotonic() - started

    def rows(file: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run / file).read_text().splitlines()]

    rewards = [row["rollout/reward/mean"] for row in rows("metrics.jsonl")]
    return {
        "agent": name,
        "rewards": rewards,
        "first": sum(rewards[:10]) / 10,
        "last": sum(rewards[-10:]) / 10,
        "evaluations": [(row["step"], row["reward/mean"]) for row in rows("eval.jsonl")],
        "metrics": rows("metrics.jsonl"),
        "taken_s": taken_s,
    }


def summary(result: dict[str, Any]) -> str:
    return (
        f"{result['agent']}: first ten {result['first']:.3f}, last ten {result['last']:.3f}, "
        f"greedy on held-out prompts {result['evaluations']}, {result['taken_s']:.0f} s"
    )


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
        typer.echo(summary(result))
    if plot_to is not None:
        plot(results, plot_to)
    if any(result["last"] < result["first"] + MIN_RISE for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
