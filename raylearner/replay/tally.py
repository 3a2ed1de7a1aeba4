"""What the replay counts: outcomes, errors with their causes, lengths, and when enough is enough."""

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from raylearner.errors import error_kind
from raylearner.types import CALLS, FAILURES, EpisodeScore, StopReason, Trajectory

LENGTH_WINDOW = 2048
"""Episodes whose lengths make up a distribution."""

EXAMPLE_CHARACTERS = 300
"""How much of an error message is quoted."""
FAILURE_CHARACTERS = 4000
"""How much is kept of the first failure of its kind, the frames of users' code included."""
MAX_KINDS = 100
"""Failures that are told apart by what they say."""


NUMBERS = re.compile(r"\d+")


class Tally:
    """Owns the counters of episodes and the windows behind distributions and failure limits.

    `failure` is why the run should end, once there is a reason; it stays.
    """

    def __init__(
        self,
        *,
        error_window: int,
        max_error_fraction: float,
        max_tool_failure_fraction: float,
        max_filtered_groups: int,
    ) -> None:
        self.late = 0
        self.duplicate = 0
        self.refused: Counter[str] = Counter()
        self.rolled_back = 0
        self.errors: Counter[str] = Counter()
        self.failure: str | None = None
        self._seen: set[str] = set()
        self._fresh: list[str] = []
        self._recent: deque[tuple[str, str] | None] = deque(maxlen=error_window)
        self._error_window = error_window
        self._max_error_fraction = max_error_fraction
        self._max_tool_failure_fraction = max_tool_failure_fraction
        self._tools: dict[str, deque[tuple[float, float]]] = {}  # calls and failures by episode
        self._max_filtered_groups = max_filtered_groups
        self._filtered: Counter[str] = Counter()  # since the last complete group that could train
        self._stale_in_row = 0
        self._finished: deque[int] = deque(maxlen=LENGTH_WINDOW)
        self._trained: deque[int] = deque(maxlen=LENGTH_WINDOW)

    def count_finished(self, episode: Iterable[Trajectory]) -> None:
        """An episode came to its end, whatever becomes of it."""
        self._finished.append(sum(segment.num_tokens for segment in episode))

    def count_trained(self, episode: Iterable[Trajectory]) -> None:
        self._trained.append(sum(segment.num_tokens for segment in episode))

    def count_accepted(self, episode: Iterable[Trajectory]) -> None:
        episode = list(episode)
        self._count_tools(episode[0].metrics)
        failed = next((t for t in episode if t.stop_reason is StopReason.ERROR), None)
        if failed is None:
            self._recent.append(None)
        else:
            error = failed.error or ""
            self._count_error(error_kind(error), error)

    def count_scores(self, scores: Iterable[EpisodeScore]) -> None:
        """Episodes that failed after all, in a function that sees groups."""
        for score in scores:
            if score.error is not None:
                self._count_error(error_kind(score.error), score.error)

    def count_refused(self, rule: str) -> None:
        self.refused[rule.partition(", got")[0]] += 1
        self._count_error("refused", rule)

    def count_filtered(self, why: str) -> None:
        """A group was dropped when it closed."""
        self._filtered[why] += 1
        if self._filtered.total() >= self._max_filtered_groups:
            reasons = ", ".join(f"{n} {name}" for name, n in self._filtered.most_common())
            last = next((entry for entry in reversed(self._recent) if entry is not None), None)
            error = (
                f"; the last error was: {last[1]}" if last and self._filtered["all_failed"] else ""
            )
            self._fail(
                f"{self._filtered.total()} groups in a row were filtered ({reasons}): nothing is "
                f"left to learn from; replay.max_filtered_groups is the limit{error}"
            )

    def count_usable(self) -> None:
        """A group closed that may train."""
        self._filtered.clear()

    def count_stale(self) -> None:
        """A complete group was dropped for its age."""
        self._stale_in_row += 1
        if self._stale_in_row >= self._max_filtered_groups:
            self._fail(
                f"{self._stale_in_row} complete groups in a row were dropped as stale: raise "
                "replay.max_staleness, or see why groups take so long"
            )

    def count_leased(self) -> None:
        self._stale_in_row = 0

    def drain_failures(self) -> list[str]:
        """The first failure of each kind since the last time, whole: errors that differ in numbers
        alone are of one kind."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def metrics(self) -> dict[str, float]:
        return {
            "buffer/dropped/late": self.late,
            "buffer/dropped/duplicate": self.duplicate,
            "buffer/dropped/refused": self.refused.total(),
            "buffer/dropped/rolled_back": self.rolled_back,
            **{f"rollout/errors/{kind}": count for kind, count in self.errors.items()},
            **distribution("buffer/finished/tokens", self._finished),
            **distribution("buffer/trained/tokens", self._trained),
        }

    def state(self) -> dict[str, Any]:
        return {
            "late": self.late,
            "duplicate": self.duplicate,
            "refused": dict(self.refused),
            "rolled_back": self.rolled_back,
            "errors": dict(self.errors),
            "recent": list(self._recent),
            "tools": {name: list(calls) for name, calls in self._tools.items()},
            "filtered": dict(self._filtered),
            "stale_in_row": self._stale_in_row,
            "finished": list(self._finished),
            "trained": list(self._trained),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.late, self.duplicate = state["late"], state["duplicate"]
        self.refused, self.rolled_back = Counter(state["refused"]), state["rolled_back"]
        self.errors = Counter(state["errors"])
        recent = [None if entry is None else (entry[0], entry[1]) for entry in state["recent"]]
        self._recent = deque(recent, maxlen=self._error_window)
        self._tools = {
            name: deque(((calls, failures) for calls, failures in entries), self._error_window)
            for name, entries in state["tools"].items()
        }
        self._filtered = Counter(state["filtered"])
        self._stale_in_row = state["stale_in_row"]
        self._finished = deque(state["finished"], maxlen=LENGTH_WINDOW)
        self._trained = deque(state["trained"], maxlen=LENGTH_WINDOW)
        self.failure = None

    def _count_error(self, kind: str, message: str) -> None:
        self.errors[kind] += 1
        headline = NUMBERS.sub("#", message.partition("\n")[0])[:EXAMPLE_CHARACTERS]
        if headline not in self._seen and len(self._seen) < MAX_KINDS:
            self._seen.add(headline)
            self._fresh.append(message[:FAILURE_CHARACTERS])
        self._recent.append((kind, message[:EXAMPLE_CHARACTERS]))
        failed = [entry for entry in self._recent if entry is not None]
        size = self._error_window
        if len(self._recent) == size and len(failed) > self._max_error_fraction * size:
            kind, count = Counter(name for name, _ in failed).most_common(1)[0]
            example = next(text for name, text in reversed(failed) if name == kind)
            example = example.partition("\n")[0]
            self._fail(
                f"{len(failed)} of the last {size} episodes failed, {count} of them by "
                f"'{kind}', for example: {example}"
            )

    def _count_tools(self, metrics: Mapping[str, float]) -> None:
        """A tool that fails almost every call teaches nothing, though its episodes do not fail."""
        for key, calls in metrics.items():
            name = key.removeprefix(CALLS)
            if name == key or not calls > 0:
                continue
            recent = self._tools.setdefault(name, deque(maxlen=self._error_window))
            recent.append((calls, metrics.get(f"{FAILURES}{name}", 0.0)))
            num_calls, num_failures = (sum(counts) for counts in zip(*recent, strict=True))
            if (
                len(recent) == self._error_window
                and num_failures > self._max_tool_failure_fraction * num_calls
            ):
                self._fail(
                    f"tool {name!r} failed {num_failures:.0f} of its {num_calls:.0f} calls in the "
                    f"last {len(recent)} episodes that called it "
                    f"(replay.max_tool_failure_fraction is {self._max_tool_failure_fraction:g}); "
                    "the warnings of the rollout actors in the log quote its errors"
                )

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


def distribution(name: str, values: Iterable[float]) -> dict[str, float]:
    """Mean, median and 95th percentile under `name`; zeros when there is nothing yet."""
    array = np.fromiter(values, np.float64)
    mean, p50, p95 = 0.0, 0.0, 0.0
    if len(array):
        mean = float(array.mean())
        p50, p95 = (float(x) for x in np.percentile(array, [50, 95]))
    return {f"{name}/mean": mean, f"{name}/p50": p50, f"{name}/p95": p95}
