"""Counters and limits of failures, metrics of the replay, and a description for the watchdog."""

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raylearner.replay.groups import GroupRecord, SampleRecord, SampleState
from raylearner.replay.ledger import Ledger
from raylearner.replay.staleness import is_mixed_version
from raylearner.types import CALLS, FAILURES, EpisodeScore, PolicyVersion, StopReason, Trajectory

LENGTH_WINDOW = 2048
"""Maximum number of episodes in a distribution of lengths."""

EXAMPLE_CHARACTERS = 300
"""Maximum length of a quoted error message."""
FAILURE_CHARACTERS = 4000
"""Maximum length of the first failure of its kind, including the frames of users' code."""
MAX_KINDS = 100
"""Maximum number of failures that are distinguished by their message."""


NUMBERS = re.compile(r"\d+")


class ReplayCounters:
    """Owns the counters of episodes and the windows behind distributions and failure limits.

    `failure` is the first reason to end the run.
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
        self._source_episodes: Counter[str] = Counter()
        self._source_errors: Counter[str] = Counter()
        self.failure: str | None = None
        self._seen: set[str] = set()
        self._new_failures: list[str] = []
        self._recent: deque[tuple[str, str] | None] = deque(maxlen=error_window)
        self._error_window = error_window
        self._max_error_fraction = max_error_fraction
        self._max_tool_failure_fraction = max_tool_failure_fraction
        self._tools: dict[str, deque[tuple[float, float]]] = {}  # calls and failures by episode
        self._tool_errors: dict[str, str] = {}
        self._max_filtered_groups = max_filtered_groups
        self._filtered: Counter[str] = Counter()  # since the last complete group that could train
        self._stale_in_row = 0
        self._finished: deque[int] = deque(maxlen=LENGTH_WINDOW)
        self._trained: deque[int] = deque(maxlen=LENGTH_WINDOW)

    def count_finished(self, episode: Iterable[Trajectory], *, is_trained: bool) -> None:
        """Count a finished episode once its group trained or was dropped.

        While a group is running, only its short episodes have finished: counted then, they would make
        trained episodes look long.
        """
        num_tokens = sum(segment.num_tokens for segment in episode)
        self._finished.append(num_tokens)
        if is_trained:
            self._trained.append(num_tokens)

    def count_accepted(self, episode: Iterable[Trajectory]) -> None:
        episode = list(episode)
        self._count_tools(episode[0].metrics, episode[0].tool_errors)
        failed = next((t for t in episode if t.stop_reason is StopReason.ERROR), None)
        source = episode[0].source
        self._source_episodes[source] += 1
        self._source_errors[source] += failed is not None
        if failed is None:
            self._recent.append(None)
        else:
            self._count_error(failed.error_kind, failed.error or "")

    def count_scores(self, scores: Iterable[EpisodeScore]) -> None:
        """Count episodes that failed in a group reward function."""
        for score in scores:
            if score.error is not None:
                self._count_error(score.error.kind, score.error.text)

    def count_refused(self, rule: str) -> None:
        self.refused[rule.partition(", got")[0]] += 1
        self._count_error("refused", rule)

    def count_filtered(self, why: str) -> None:
        """Count a group that was dropped when it closed."""
        self._filtered[why] += 1
        if self._filtered.total() >= self._max_filtered_groups:
            reasons = ", ".join(f"{n} {name}" for name, n in self._filtered.most_common())
            last = next((entry for entry in reversed(self._recent) if entry is not None), None)
            error = (
                f"; the last error was: {last[1]}" if last and self._filtered["all_failed"] else ""
            )
            self._fail(
                f"{self._filtered.total()} groups in a row were filtered ({reasons}): they give no "
                f"learning signal; replay.max_filtered_groups is the limit{error}"
            )

    def count_usable(self) -> None:
        """Count a closed group that may train."""
        self._filtered.clear()

    def count_stale(self) -> None:
        """Count a complete group dropped as stale."""
        self._stale_in_row += 1
        if self._stale_in_row >= self._max_filtered_groups:
            self._fail(
                f"{self._stale_in_row} complete groups in a row were dropped as stale: raise "
                "replay.max_staleness, or find out why groups take so long"
            )

    def count_leased(self) -> None:
        self._stale_in_row = 0

    def drain_failures(self) -> list[str]:
        """Return the first failure of each kind since the last call. Errors that differ only in numbers
        are of one kind."""
        fresh, self._new_failures = self._new_failures, []
        return fresh

    def metrics(self) -> dict[str, float]:
        return {
            "buffer/dropped/late": self.late,
            "buffer/dropped/duplicate": self.duplicate,
            "buffer/dropped/refused": self.refused.total(),
            "buffer/dropped/rolled_back": self.rolled_back,
            **{f"rollout/errors/{kind}": count for kind, count in self.errors.items()},
            **self._metrics_by_source(),
            **distribution("buffer/finished/tokens", self._finished),
            **distribution("buffer/trained/tokens", self._trained),
            "buffer/trained_to_finished_length": self._length_ratio(),
        }

    def state(self) -> dict[str, Any]:
        return {
            "late": self.late,
            "duplicate": self.duplicate,
            "refused": dict(self.refused),
            "rolled_back": self.rolled_back,
            "errors": dict(self.errors),
            "source_episodes": dict(self._source_episodes),
            "source_errors": dict(self._source_errors),
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
        self._source_episodes = Counter(state["source_episodes"])
        self._source_errors = Counter(state["source_errors"])
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

    def _metrics_by_source(self) -> dict[str, float]:
        episodes, errors = self._source_episodes, self._source_errors
        return {
            **{f"rollout/source/{source}/episodes": count for source, count in episodes.items()},
            **{f"rollout/source/{source}/errors": count for source, count in errors.items()},
        }

    def _length_ratio(self) -> float:
        """Return mean trained length over mean finished length; 1 before anything trained."""
        if not self._trained:
            return 1.0
        return float(np.mean(self._trained) / np.mean(self._finished))

    def _count_error(self, kind: str, message: str) -> None:
        self.errors[kind] += 1
        headline = NUMBERS.sub("#", message.partition("\n")[0])[:EXAMPLE_CHARACTERS]
        if headline not in self._seen and len(self._seen) < MAX_KINDS:
            self._seen.add(headline)
            self._new_failures.append(message[:FAILURE_CHARACTERS])
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

    def _count_tools(self, metrics: Mapping[str, float], errors: Mapping[str, str]) -> None:
        """End the run for a tool that fails almost every call, although its episodes do not fail."""
        self._tool_errors |= errors
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
                    f"(replay.max_tool_failure_fraction is {self._max_tool_failure_fraction:g})"
                    + (
                        f", for example: {self._tool_errors[name]}"
                        if name in self._tool_errors
                        else ""
                    )
                )

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


def distribution(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return mean, median and 95th percentile under `name`; zeros without values."""
    array = np.fromiter(values, np.float64)
    mean, p50, p95 = 0.0, 0.0, 0.0
    if len(array):
        mean = float(array.mean())
        p50, p95 = (float(x) for x in np.percentile(array, [50, 95]))
    return {f"{name}/mean": mean, f"{name}/p50": p50, f"{name}/p95": p95}


def buffer_metrics(ledger: Ledger, *, now_s: float) -> dict[str, float]:
    """Return groups by state, totals of the run, and ages of the episodes that run now."""
    counts = ledger.counts
    ages_s = [now_s - sample.started_at_s for _, _, sample in ledger.running_samples()]
    dropped = {"stale": 0, "zero_variance": 0, "all_failed": 0, "time_limit": 0}
    return {
        "buffer/groups/running": len(ledger.running),
        "buffer/groups/held": len(ledger.held),
        "buffer/groups/awaiting_scores": len(ledger.held) - ledger.num_ready,
        "buffer/groups/leased": len(ledger.leased),
        "buffer/groups/admitted": counts.admitted,
        "buffer/groups/trained": counts.trained,
        "buffer/samples/claimed": counts.claimed,
        "buffer/samples/reissued": counts.reissued,
        **{f"buffer/dropped/{why}": n for why, n in (dropped | counts.dropped).items()},
        "buffer/started/count": len(ages_s),
        **distribution("buffer/started/age_s", ages_s),
    }


def take_metrics(
    trajectories: Sequence[Trajectory],
    versions: Sequence[NDArray[np.int32]],
    policy_version: PolicyVersion,
    *,
    num_masked_tokens: int = 0,
    num_over_stale_tokens: int = 0,
) -> dict[str, float]:
    """Return metrics of a take. Staleness is that of each trajectory's oldest trained token.

    `versions` are those of the trained tokens of each trajectory.
    """
    ages = [policy_version - int(array.min()) for array in versions if len(array)]
    num_trained_tokens = sum(len(array) for array in versions)
    num_mixed = sum(is_mixed_version(t) for t in trajectories)
    return {
        "buffer/staleness/mean": sum(ages) / len(ages) if ages else 0.0,
        "buffer/staleness/max": max(ages, default=0),
        "buffer/masked_tokens": num_masked_tokens,
        "buffer/masked_fraction": num_masked_tokens
        / max(num_masked_tokens + num_trained_tokens, 1),
        "buffer/over_stale_trained": num_over_stale_tokens,
        "buffer/mixed_version_fraction": num_mixed / max(len(trajectories), 1),
    }


def batch_progress(ledger: Ledger, num_groups: int, group_size: int) -> int:
    """Return the number of finished episodes in the `num_groups` groups that have most of them."""
    groups = [*ledger.held.values(), *ledger.running.values()]
    counts = sorted((min(g.num_in(SampleState.DONE), group_size) for g in groups), reverse=True)
    return sum(counts[:num_groups])


def describe(
    ledger: Ledger,
    *,
    now_s: float,
    engine_versions: Mapping[str, PolicyVersion],
    wanted: tuple[int, PolicyVersion] | None,
) -> list[str]:
    """Return lines on running episodes by actor, and on what claims and `take` wait for."""
    by_actor: dict[str, list[tuple[float, GroupRecord, int, SampleRecord]]] = {}
    for group, index, sample in ledger.running_samples():
        entry = (now_s - sample.started_at_s, group, index, sample)
        by_actor.setdefault(sample.claimant or "?", []).append(entry)
    lines: list[str] = []
    for actor_id in sorted(by_actor.keys() | engine_versions.keys()):
        entries = by_actor.get(actor_id, [])
        line = f"{actor_id} runs {len(entries)} episodes"
        if entries:
            age_s, group, index, sample = max(entries, key=lambda entry: entry[0])
            key = (group.group_id, index, sample.attempt)
            line += f", the oldest {key} for {age_s:.1f} s"
        version = engine_versions.get(actor_id)
        unfit = None if version is None else ledger.why_unfit(version)
        lines.append(line if unfit is None else f"{line}; it may not claim: {unfit}")
    num_pending = sum(g.num_in(SampleState.PENDING) for g in ledger.running.values())
    full = ledger.why_full()
    lines.append(
        f"{num_pending} samples are pending; new groups are "
        + ("admitted when claimed" if full is None else f"not admitted: {full}")
    )
    oldest = next(iter(ledger.running.values()), None)
    if oldest is not None:
        lines.append(
            f"group {oldest.group_id} runs for {now_s - oldest.admitted_at_s:.1f} s (limit "
            f"{ledger.config.group_time_limit_s:g} s): {oldest.num_in(SampleState.DONE)} of "
            f"{ledger.config.group_size} done, {oldest.num_in(SampleState.RUNNING)} running, "
            f"{oldest.num_in(SampleState.PENDING)} pending"
        )
    if wanted is None:
        lines.append(f"no take is waiting; {len(ledger.leased)} groups are leased")
    else:
        num_groups, version = wanted
        why = ""
        num_awaiting = len(ledger.held) - ledger.num_ready
        if num_awaiting:
            why = f", {num_awaiting} of the complete ones await group reward functions"
        elif len(ledger.held) >= num_groups:
            why = ", held back for running groups that would become too stale"
        lines.append(
            f"take of {num_groups} groups at version {version} waits: {len(ledger.held)} "
            f"complete, {len(ledger.running)} running, {len(ledger.leased)} leased{why}"
        )
    return lines
