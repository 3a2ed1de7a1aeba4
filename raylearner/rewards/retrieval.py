"""Rewards for what an episode looked at."""

from typing import cast
from unicodedata import normalize

from raylearner.config.rewards import RetrievalHit
from raylearner.data.cells import scalar_text
from raylearner.errors import RewardError
from raylearner.rewards.functions import EpisodeView


def retrieval_hit(episode: EpisodeView, section: RetrievalHit) -> float | None:
    """The share of the row's right pages among those shown; None where the row names none.

    Raises `RewardError` for a column that holds no ids.
    """
    value = episode.prompt.columns.get(section.column)
    values = cast(list[object], value) if isinstance(value, list | tuple) else [value]
    try:
        wanted = {_id(scalar_text(one)) for one in values if one is not None and one != ""}
    except ValueError as error:
        raise RewardError(f"an id in column {section.column!r} {error}") from error
    if not wanted:
        return None
    return len(wanted & {_id(shown) for shown in episode.shown}) / len(wanted)


def _id(text: str) -> str:
    return normalize("NFC", text).strip()
