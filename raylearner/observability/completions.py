"""The trajectories of a step as distributions and as a table of completions."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raylearner.config.schema import CompletionsSection
from raylearner.observability.episodes import Episode, episodes_of
from raylearner.text import visible
from raylearner.types import PolicyVersion, Trajectory, TrajectoryKey

LOG_WIDTH = 160
"""Width of the table in the log."""


def samples(
    trajectories: Sequence[Trajectory], *, policy_version: PolicyVersion
) -> dict[str, NDArray[np.float64]]:
    """Return the values of a step's distributions: of episodes, and staleness of trajectories.

    `policy_version` is the version that was trained on them.
    """
    episodes = episodes_of(trajectories)
    values: dict[str, list[float]] = {
        "rollout/reward": [e.reward for e in episodes if e.reward is not None],
        "rollout/sampled_tokens": [e.num_sampled_tokens for e in episodes],
        "rollout/turns": [len(e.turns) for e in episodes],
        "buffer/staleness": [policy_version - t.min_policy_version for t in trajectories],
    }
    return {key: np.asarray(found, np.float64) for key, found in values.items() if found}


WEIGHT_MIDDLES = (0.25, 0.65, 0.85, 0.925, 0.97, 1.0, 1.03, 1.075, 1.175, 1.6, 3.0)
"""Representative weight of each bin of `learner/importance_weight/share_<bin>`."""
NUM_WEIGHT_SAMPLES = 1000


def weight_samples(metrics: Mapping[str, float | None]) -> NDArray[np.float64] | None:
    """Return importance weights according to the shares of their bins; None if none were measured."""
    shares = [
        metrics.get(f"learner/importance_weight/share_{number}") or 0.0
        for number in range(len(WEIGHT_MIDDLES))
    ]
    if not np.isfinite(shares).all() or sum(shares) <= 0:
        return None
    counts = np.round(np.asarray(shares) * NUM_WEIGHT_SAMPLES).astype(int)
    return np.repeat(np.asarray(WEIGHT_MIDDLES), counts)


Rows = list[dict[str, str]]
"""One row per completion, all with the same columns in order."""


def rows(
    trajectories: Sequence[Trajectory],
    config: CompletionsSection,
    *,
    advantages: Mapping[TrajectoryKey, float] | None = None,
) -> Rows:
    """Return a few episodes from the worst reward to the best, with all rewards and logged values.

    With `unique_prompts`, only the first episode of each prompt is considered. The advantage is that of
    the first segment. Logged names that collide with another column get the prefix `logged_`.
    """
    ordered = episodes_of(trajectories)
    if config.unique_prompts:
        ordered = list({e.first.prompt_id: e for e in reversed(ordered)}.values())
    ordered.sort(key=lambda e: (e.reward is not None, e.reward or 0.0))
    places = np.linspace(0, len(ordered) - 1, min(config.num_completions, len(ordered)))
    chosen = [ordered[round(place)] for place in places]
    parts = sorted({name for e in chosen for name in e.first.rewards})
    columns = sorted({name for e in chosen for name in e.first.columns})
    logged = sorted({name for e in chosen for name in e.metrics})
    table: Rows = []
    for episode in chosen:
        first = episode.first
        row = {
            "prompt": _cut(first.prompt_text, config.max_characters),
            "completion": _cut(_completion(episode), config.max_characters),
        }
        _add(row, {name: _number(first.rewards.get(name)) for name in parts})
        _add(row, {"reward": _number(episode.reward)})
        _add(row, {"advantage": _number((advantages or {}).get(first.key))})
        _add(row, {name: _cell(first.columns.get(name), config) for name in columns})
        _add(row, {name: _number(episode.metrics.get(name)) for name in logged})
        table.append(row)
    return table


def _add(row: dict[str, str], cells: Mapping[str, str]) -> None:
    """Add cells, renamed if the row has one of that name."""
    for name, cell in cells.items():
        while name in row:
            name = f"logged_{name}"
        row[name] = cell


def markdown(table: Rows) -> str:
    """Return the table as Markdown, for TensorBoard."""
    if not table:
        return ""
    heads = [_escaped(head) for head in table[0]]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row.values()) + " |" for row in table]
    return "\n".join(lines)


def plain(table: Rows) -> str:
    """Return the table as lines for a log."""
    drawn = Table()
    for head in table[0] if table else ():
        drawn.add_column(Text(head))
    for row in table:
        drawn.add_row(*(Text(cell) for cell in row.values()))
    console = Console(file=io.StringIO(), width=LOG_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().rstrip()


def _cell(value: object, config: CompletionsSection) -> str:
    if value is None or isinstance(value, float):
        return _number(value)
    return _cut(str(value), config.max_characters)


def _completion(episode: Episode) -> str:
    return "".join(part for turn in episode.turns for part in (turn.text, turn.reply))


def _cut(text: str, size: int) -> str:
    text = visible(text)
    return text if len(text) <= size else f"{text[: size // 2]} ... {text[-(size // 2) :]}"


def _escaped(text: str) -> str:
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(character, entity)
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
