"""Budgets of restarts: limits within a window of time, and pauses between tries."""

import time
from collections import deque
from collections.abc import Callable, Collection

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""Pause before the second try in a row; it doubles with each further one, up to the second number."""
ROW_S = 60.0
"""Failures within this time of each other are in a row, for a budget's own `backoff_s`."""


def backoff_s(num_in_row: int) -> float:
    """Return the pause after this many failures in a row: none after the first."""
    if num_in_row < 2:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(num_in_row - 2, 30), MAX_BACKOFF_S)


class RestartBudget:
    """Counts restarts; at most `limit` are allowed within any `window_s` seconds."""

    def __init__(
        self, limit: int, window_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.window_s = window_s
        self._clock = clock
        self._counted: deque[tuple[float, str]] = deque()
        self._num_in_row = 0

    def count(self, place: str = "") -> int:
        """Count one restart; return the number within the window, this one included.

        More than `limit` means that this restart is not allowed. `place` is where the failure was, see
        `forgive`.
        """
        now = self._clock()
        is_in_row = bool(self._counted) and now - self._counted[-1][0] <= ROW_S + self.backoff_s()
        self._num_in_row = self._num_in_row + 1 if is_in_row else 1
        self._counted.append((now, place))
        return self.num_counted

    def forgive(self, places: Collection[str]) -> None:
        """Take back what was counted at these places, which turned out to be lost themselves."""
        self._counted = deque(entry for entry in self._counted if entry[1] not in places)

    @property
    def num_counted(self) -> int:
        """Number of restarts counted within the window that ends now."""
        oldest = self._clock() - self.window_s
        while self._counted and self._counted[0][0] <= oldest:
            self._counted.popleft()
        return len(self._counted)

    @property
    def is_used_up(self) -> bool:
        """Whether the last counted restart is one too many."""
        return self.num_counted > self.limit

    def backoff_s(self) -> float:
        """Return the pause before the restart that was counted last."""
        return backoff_s(self._num_in_row)

    def wait_s(self) -> float:
        """Return the time until the window allows the restart that was counted last; 0 if it does."""
        excess = self.num_counted - self.limit
        if excess <= 0 or self.limit == 0:
            return 0.0 if excess <= 0 else float("inf")
        return self._counted[excess - 1][0] + self.window_s - self._clock()
