"""A tiny visual agent learns to search for pages and look at them, through the whole loop, on a CPU.

    python benchmarks/visual.py [--plot docs/figures/visual.png] [key=value ..]

Runs `configs/visual_search_tiny.yaml` twice: on pages of colours, and as a control on the same pages
left white (`--blank` of the generator), from the warm start on. Fails unless the mean reward of the
last ten steps is 0.3 above the first ten's for the agent that sees, and not for the blind one.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from agents import MIN_RISE, plot, questions_of, service, summary, train

from raylearner.services.corpora.visual_pages import Kind, write_visual_pages

CONFIG = "visual_search_tiny.yaml"
NUM_DOCUMENTS = 200
"""Of ten pages each: more than a run asks for, so that none is learnt by heart."""
HIT = "rollout/reward/retrieval_hit/mean"


def play(name: str, folder: Path, overrides: list[str], *, is_blind: bool) -> dict[str, Any]:
    """Train one agent on pages of its own."""
    pages = folder / f"{name}-pages"
    write_visual_pages(pages, kinds=[Kind.COLOURS], num_documents=NUM_DOCUMENTS, is_blank=is_blind)
    with service("pages", "--folder", str(pages)) as url:
        tools = f"environment.tools=[{{kind: page_search, url: '{url}', top_n: 1}}]"
        given = [tools, *questions_of(pages), "evaluation.num_prompts=96", *overrides]
        return train(name, [CONFIG], folder / name, given)


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for the runs.")] = None,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="PNG to write.")] = None,
) -> None:
    given = list(overrides or [])
    with tempfile.TemporaryDirectory() as name:
        seeing = play("seeing", Path(name), given, is_blind=False)
        blind = play("blind", Path(name), given, is_blind=True)
    for result in (seeing, blind):
        hits = [row[HIT] for row in result["metrics"]]
        typer.echo(
            f"{summary(result)}, right page looked at {sum(hits[:10]) / 10:.3f}, then "
            f"{sum(hits[-10:]) / 10:.3f}"
        )
    if plot_to is not None:
        plot([seeing, blind], plot_to)
    rises = [result["last"] - result["first"] for result in (seeing, blind)]
    if rises[0] < MIN_RISE or rises[1] >= MIN_RISE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
