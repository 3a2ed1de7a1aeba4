"""Warnings about groups and tokens that are lost: too stale to train, or not complete in time."""

import logging
from collections import deque
from collections.abc import Mapping

from raylearner.config.schema import ReplaySection

WINDOW_STEPS = 10
"""Number of steps over which losses are counted."""
MAX_LOST_FRACTION = 1 / 3
"""Fraction of the groups of these steps from which on a loss is warned of."""
MAX_MASKED_FRACTION = 0.1
"""Mean fraction of masked tokens in these steps above which it is warned of."""
REPEAT_STEPS = 50
"""Number of steps before the same warning is written again."""
ENDS = ("trained", "stale", "time_limit", "zero_variance", "all_failed", "no_baseline")
"""Ways in which groups end."""

logger = logging.getLogger(__name__)


class GroupWatch:
    """Checks the metrics of every step."""

    def __init__(self, config: ReplaySection) -> None:
        self._config = config
        self._totals: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS + 1)
        self._masked: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._num_steps = 0
        self._warned_at: dict[str, int] = {}

    def look(self, metrics: Mapping[str, float]) -> None:
        """Log a warning for each reason that cost too many groups or tokens, with the keys to change."""
        totals = {end: metrics.get(f"buffer/dropped/{end}", 0.0) for end in ENDS}
        totals["trained"] = metrics.get("buffer/groups/trained", 0.0)
        self._num_steps += 1
        if self._totals and any(totals[end] < self._totals[-1][end] for end in ENDS):
            self._totals.clear()  # the run rolled back
            self._masked.clear()
        self._totals.append(totals)
        self._masked.append(metrics.get("buffer/masked_fraction", 0.0))
        if len(self._totals) <= WINDOW_STEPS:
            return
        ended = {end: int(totals[end] - self._totals[0][end]) for end in ENDS}
        for why in ("stale", "time_limit"):
            if ended[why] and ended[why] >= MAX_LOST_FRACTION * sum(ended.values()):
                self._warn_of_groups(why, ended[why], sum(ended.values()))
        masked = sum(self._masked) / len(self._masked)
        if masked > MAX_MASKED_FRACTION:
            self._warn_of_tokens(masked)

    def _is_due(self, why: str) -> bool:
        """Return whether this warning may be written now, and remember that it is."""
        warned_at = self._warned_at.get(why)
        if warned_at is not None and self._num_steps - warned_at < REPEAT_STEPS:
            return False
        self._warned_at[why] = self._num_steps
        return True

    def _warn_of_groups(self, why: str, num_lost: int, num_ended: int) -> None:
        if not self._is_due(why):
            return
        config = self._config
        if why == "stale":
            change = "" if config.on_stale == "mask" else "set replay.on_stale to mask, or "
            problem = (
                f"their tokens are more than {config.max_staleness} policy versions old when they"
                f" became ready to train (replay.max_staleness, with replay.on_stale: {config.on_stale});"
                f" {change}raise replay.max_staleness, run fewer groups at a time with"
                " replay.max_concurrent_groups, or shorten the episodes"
            )
        else:
            problem = (
                f"they did not complete within {config.group_time_limit_s:g} s"
                " (replay.group_time_limit_s); raise it, increase"
                " actors.num_actors, or shorten the episodes"
            )
        logger.warning(
            "%d of the %d groups that ended in the last %d steps were dropped and did not train: %s",
            *(num_lost, num_ended, WINDOW_STEPS, problem),
        )

    def _warn_of_tokens(self, fraction: float) -> None:
        if not self._is_due("masked"):
            return
        config = self._config
        wait = (
            ""
            if config.on_stale == "wait"
            else ", or set replay.on_stale to wait, with fewer steps per second"
        )
        logger.warning(
            "%.0f%% of the tokens of the last %d steps do not train: they are more than %d policy"
            " versions old, mostly at the beginning of long episodes (buffer/masked_fraction); raise"
            " replay.max_staleness%s",
            *(100 * fraction, WINDOW_STEPS, config.max_staleness, wait),
        )
