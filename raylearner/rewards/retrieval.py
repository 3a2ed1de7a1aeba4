"""Rewards for what an episode looked at."""

from typing import cast

from raylearner.config.rewards import RetrievalHit
from raylearner.rewards.functions import EpisodeView


def retrieval_hit(episode: EpisodeView, section: RetrievalHit) -> float | None:
    """The share of the row's right pages among those shown; None where the row names none."""
    wanted = _ids(episode.prompt.columns.get(section.column))
    if not wanted:
        return None
    return len(wanted & set(episode.shown)) / len(wanted)


def _ids(value: object) -> set[str]:
    if value is None or value == "":
        return set()
    values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
    return {str(one) for one in values}
