"""A reward function that sees whole groups, for runs on a cluster."""

from collections.abc import Callable, Sequence

from raylearner.rewards.functions import EpisodeView


async def longest(
    episodes: Sequence[EpisodeView],
    *,
    log_extra: Callable[..., None],
    log_metric: Callable[..., None],
) -> list[float]:
    """1 for the longest episodes of a group, 0 for the others."""
    lengths = [len(episode.completion_ids) for episode in episodes]
    log_extra("length", lengths)
    log_metric("most", max(lengths))
    return [float(length == max(lengths)) for length in lengths]
