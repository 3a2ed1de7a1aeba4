"""Studies of objectives on tiny models, in one process and without Ray.

`python benchmarks/study.py run objectives --cache FOLDER` appends one JSON line per run to
`benchmarks/results/objectives.jsonl`; `table` and `plot` read them.
"""

import asyncio
import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from study_harness import Run, train

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"

log = logging.getLogger(__name__)

CRITIC = "learner.critic={learning_rate: 1.0e-3}"

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "grpo": ("learner.advantage={kind: grpo}", "learner.loss={kind: ppo}"),
    "dr_grpo": (
        "learner.advantage={kind: dr_grpo}",
        "learner.loss={kind: ppo}",
        "learner.aggregation=sequence_mean_of_sums_scaled",
        "learner.aggregation_scale=96",
    ),
    "rloo": ("learner.advantage={kind: rloo}", "learner.loss={kind: reinforce}"),
    "reinforce_plus_plus": (
        "learner.advantage={kind: reinforce_plus_plus}",
        "learner.loss={kind: ppo}",
    ),
    "gae": ("learner.advantage={kind: gae}", "learner.loss={kind: ppo}", CRITIC),
    "vtrace": ("learner.advantage={kind: vtrace}", "learner.loss={kind: gpg}", CRITIC),
    "ppo": (
        "learner.advantage={kind: grpo}",
        "learner.loss={kind: ppo}",
        "learner.num_mini_batches=2",
        "learner.num_epochs=2",
    ),
    "decoupled_ppo": (
        "learner.advantage={kind: grpo}",
        "learner.loss={kind: decoupled_ppo}",
        "learner.num_mini_batches=2",
    ),
    "gspo": (
        "learner.advantage={kind: grpo}",
        "learner.loss={kind: gspo}",
        "learner.aggregation=sequence_mean_of_means",
    ),
    "cispo": ("learner.advantage={kind: grpo}", "learner.loss={kind: cispo}"),
}
"""The quickstart's own task, model and learning rate; all one version behind."""

OFF_POLICY_TASK = (
    "model={hidden_size: 128, num_layers: 2, num_heads: 4, intermediate_size: 512}",
    "model.warm_start={num_steps: 400, batch_size: 64, learning_rate: 3.0e-3}",
    "model.warm_start.right_fraction=0.35",
    "data.train.max_operand=999",
    "data.evaluation.max_operand=999",
    "replay={groups_per_step: 4, group_size: 8}",
    "learner.learning_rate=3.0e-4",
    "learner.schedule=linear",
    "learner.advantage={kind: grpo}",
    "run.num_steps=80",
)
"""Operands of three digits: longer expressions and results to copy, each digit a way to fail."""

OFF_POLICY: dict[str, tuple[str, ...]] = {
    "none": ("learner.loss={kind: ppo}",),
    "tis": ("learner.loss={kind: ppo}", "learner.corrections=[{kind: tis, high: 2.0}]"),
    "decoupled_ppo": (
        "learner.loss={kind: decoupled_ppo, behavior_cap: 5.0, behavior_mode: filter}",
    ),
    "icepop": ("learner.loss={kind: ppo}", "learner.corrections=[{kind: icepop}]"),
    "vtrace": (
        "learner.advantage={kind: vtrace}",
        "learner.loss={kind: gpg}",
        "learner.critic={learning_rate: 2.0e-4}",
    ),
}
"""One update per take, so that the proximal policy is the current one and no ratio is clipped."""

WEIGHTED = frozenset({"tis", "decoupled_ppo", "icepop"})
"""At lag 0 their weights are 1, which makes them `none`; they are not run again there."""

CACHE_LAG = 4
CACHES: tuple[Literal["recompute", "keep"], ...] = ("recompute", "keep")
"""The first push finds requests of 6 sampled tokens, and each later one 6 more."""

LAGS = (0, 4, 16)
SEEDS = (0, 1, 2)


def runs_of(study: str) -> list[Run]:
    """All runs of a study, the cheapest question first: seed by seed."""
    match study:
        case "objectives":
            return [
                Run(study=study, name=name, overrides=overrides, lag=1)
                for name, overrides in OBJECTIVES.items()
            ]
        case "off_policy":
            return [
                Run(
                    study=study,
                    name=name,
                    overrides=(*OFF_POLICY_TASK, *overrides),
                    lag=lag,
                    seed=seed,
                )
                for seed in SEEDS
                for lag in LAGS
                for name, overrides in OFF_POLICY.items()
                if lag or name not in WEIGHTED
            ]
        case "cache":
            return [
                Run(
                    study=study,
                    name=f"{name}, {cache}",
                    overrides=(*OFF_POLICY_TASK, *OFF_POLICY[name]),
                    lag=CACHE_LAG,
                    seed=seed,
                    cache=cache,
                )
                for seed in SEEDS
                for name in ("none", "decoupled_ppo")
                for cache in CACHES
            ]
        case _:
            raise typer.BadParameter(f"no study {study!r}; there are {', '.join(TABLES)}")


def read_results(path: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Records by name, lag and seed; of several, the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {(record["name"], record["lag"], record["seed"]): record for record in records}


# -- tables and figures ----------------------------------------------------------------------------


def objectives_table(records: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        f"| {r['name']} | {r['lag']} | {r['initial_accuracy']:.2f} | {r['accuracy']:.2f} "
        f"| {statistics.fmean(r['reward'][-10:]):.2f} | {r['seconds']:.0f} | {r['cpu_s']:.0f} |"
        for r in records
    ]
    head = "| objective | lag | accuracy before | after | reward, last 10 steps | s | CPU s |"
    return [head, "|---|---:|---:|---:|---:|---:|---:|", *rows]


def off_policy_tables(records: Sequence[dict[str, Any]]) -> list[str]:
    """What the policy is worth in the end, and what it was over the second half of the run."""
    return [
        *_by_lag(records, "accuracy", lambda record: record["late_accuracy"]),
        "",
        *_by_lag(records, "reward", lambda r: statistics.fmean(r["reward"][r["num_steps"] // 2 :])),
    ]


def cache_table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Mean over seeds, and extremes."""
    head = (
        "| correction, cache | held-out accuracy, last 3 | reward, second half "
        "| gap on own version, mean nats | versions per trajectory | recomputed tokens |"
    )
    rows = [head, "|---|---:|---:|---:|---:|---:|"]
    for name in sorted({record["name"] for record in records}, reverse=True):
        seeds = [record for record in records if record["name"] == name]
        accuracies = [record["late_accuracy"] for record in seeds]
        rewards = [statistics.fmean(r["reward"][r["num_steps"] // 2 :]) for r in seeds]
        gap = statistics.fmean(value for r in seeds for value in r["gap"] if value == value)
        rows.append(
            f"| {name} | {_spread(accuracies)} | {_spread(rewards)} | {gap:.2g} "
            f"| {statistics.fmean(r['versions'] for r in seeds):.1f} "
            f"| {statistics.fmean(r['recomputed_tokens'] for r in seeds):,.0f} |"
        )
    return rows


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _by_lag(
    records: Sequence[dict[str, Any]], title: str, value: Callable[[dict[str, Any]], float]
) -> list[str]:
    """Mean over seeds, extremes, and change from the same objective at lag 0."""
    lines = [
        f"| {title} | " + " | ".join(f"lag {lag}" for lag in LAGS) + " |",
        "|---" + "|---:" * len(LAGS) + "|",
    ]
    for name in _names(records):
        cells: list[str] = []
        means: list[float] = []
        for lag in LAGS:
            values = [value(record) for record in _of(records, name, lag)]
            if not values:
                cells.append("")
                continue
            means.append(statistics.fmean(values))
            change = f", {means[-1] / means[0] - 1:+.0%}" if len(means) > 1 and means[0] else ""
            cells.append(f"{means[-1]:.2f} ({min(values):.2f} to {max(values):.2f}){change}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    names = {record["name"] for record in records}
    return [name for name in OFF_POLICY if name in names]


def _of(records: Sequence[dict[str, Any]], name: str, lag: int) -> list[dict[str, Any]]:
    """All seeds of one cell."""
    source = "none" if lag == 0 and name in WEIGHTED else name
    return [record for record in records if (record["name"], record["lag"]) == (source, lag)]


def plot_objectives(records: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for record in records:
        axes.plot(_smoothed(record["reward"]), label=record["name"], linewidth=1.2)
    axes.set(xlabel="step", ylabel="mean reward of the batch", ylim=(0, 1.02))
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def plot_off_policy(records: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel for each lag: mean over seeds, and the band of all of them."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(LAGS), figsize=(11, 3.6), sharey=True, layout="constrained"
    )
    for axes, lag in zip(panels, LAGS, strict=True):
        for index, name in enumerate(_names(records)):
            if curves := [_smoothed(record["reward"]) for record in _of(records, name, lag)]:
                points = list(zip(*curves, strict=True))
                means = [statistics.fmean(point) for point in points]
                axes.plot(means, color=f"C{index}", label=name, linewidth=1.2)
                low, high = list(map(min, points)), list(map(max, points))
                axes.fill_between(range(len(points)), low, high, color=f"C{index}", alpha=0.15)
        axes.set(title=f"lag {lag}", xlabel="step", ylim=(0, 1.02))
    panels[0].set_ylabel("mean reward of the batch")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _smoothed(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean over the last `width` values."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


# -- the command line ------------------------------------------------------------------------------

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
TABLES = {
    "objectives": objectives_table,
    "off_policy": off_policy_tables,
    "cache": cache_table,
}
StudyName = Annotated[str, typer.Argument(help=f"{', '.join(TABLES)}.")]


@app.command("run")
def run_study(
    study: StudyName,
    cache: Annotated[Path, typer.Option(help="Folder for warm-started models.")],
    only: Annotated[list[str] | None, typer.Option(help="Names to run; default all.")] = None,
    lag: Annotated[list[int] | None, typer.Option(help="Lags to run; default all.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seeds to run; default all.")] = None,
    override: Annotated[list[str] | None, typer.Option(help="Further KEY=VALUE.")] = None,
    results: Annotated[Path | None, typer.Option(help="JSONL file to append to.")] = None,
    repeat: Annotated[bool, typer.Option(help="Also what the file already holds.")] = False,
) -> None:
    """Train the runs of a study, one JSON line each; what the file holds is left out."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("study_harness").setLevel(logging.INFO)
    log.setLevel(logging.INFO)
    path = results or RESULTS / f"{study}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {} if repeat else read_results(path)
    for run in runs_of(study):
        wanted = (
            (not only or run.name in only)
            and (not lag or run.lag in lag)
            and (not seed or run.seed in seed)
        )
        if wanted and run.key not in done:
            run = replace(run, overrides=(*run.overrides, *(override or ())))
            record = asyncio.run(train(run, cache=cache))
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            log.info("%s: accuracy %s in %s s", run.key, record["late_accuracy"], record["seconds"])


@app.command()
def table(study: StudyName, results: Path | None = None) -> None:
    """Write a Markdown table to standard output."""
    records = list(read_results(results or RESULTS / f"{study}.jsonl").values())
    typer.echo("\n".join(TABLES[study](records)))


@app.command()
def plot(study: StudyName, results: Path | None = None, folder: Path = FIGURES) -> None:
    """Draw the figure of a study."""
    records = list(read_results(results or RESULTS / f"{study}.jsonl").values())
    folder.mkdir(parents=True, exist_ok=True)
    draw = plot_objectives if study == "objectives" else plot_off_policy
    draw(records, folder / f"study_{study}.png")


if __name__ == "__main__":
    app()
