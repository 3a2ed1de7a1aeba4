"""Warnings, once each, about a run that goes on but does not learn, or wastes its hardware."""

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping

from raylearner.config.schema import ReplaySection, WeightsSection
from raylearner.observability.metrics import entry_of

WINDOW_STEPS = 10
"""Number of steps whose mean is judged."""
FLAT_FRACTION = 0.9
"""Mean fraction of groups with equal rewards from which on there is hardly anything to learn from."""
LOW_ESS = 0.5
HIGH_GAP = 0.2
"""Mean difference of log-probabilities, in nats, at which importance weights of single tokens are 20% off."""
HIGH_ON_POLICY_GAP = 0.05
STARVED_FRACTION = 0.5
"""Fraction of time without work above which one side is limited by the other."""
FAILING_FRACTION = 0.5
"""Fraction of the failed episodes of one data source, in a window with at least `MIN_EPISODES`."""
MIN_EPISODES = 20

SOURCE_EPISODES = "rollout/source/<source>/episodes"
SOURCE_ERRORS = "rollout/source/<source>/errors"

logger = logging.getLogger(__name__)


class HealthWatch:
    """Checks the metrics of every step."""

    def __init__(self, replay: ReplaySection, weights: WeightsSection) -> None:
        self._replay = replay
        self._weights = weights
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW_STEPS + 1)
        self._warned: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Log each warning that holds for the mean of the last steps, the first time that it does."""
        if self._rows and metrics.get("step", 0.0) < self._rows[-1].get("step", 0.0):
            self._rows.clear()  # the run rolled back
        self._rows.append(metrics)
        if len(self._rows) <= WINDOW_STEPS:
            return
        self._check_signal()
        self._check_weights()
        self._check_starvation()
        self._check_sources()

    def _mean(self, key: str) -> float:
        """Return the mean over the window; NaN if a step lacks the metric."""
        values = [row.get(key, math.nan) for row in list(self._rows)[1:]]
        return sum(values) / len(values)

    def _grown(self, key: str) -> float:
        """Return how much a count grew in the window; it may have begun in it."""
        return self._rows[-1].get(key, 0.0) - self._rows[0].get(key, 0.0)

    def _warn(self, name: str, text: str, *values: object) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(text, *values)

    def _check_signal(self) -> None:
        flat = self._mean("learner/zero_variance_fraction")
        if flat < FLAT_FRACTION or math.isnan(flat):
            return
        reward = self._mean("rollout/reward/mean")
        self._warn(
            "flat",
            "%.0f%% of the groups of the last %d steps have equal rewards, on average %.3g, and teach"
            " nothing (learner/zero_variance_fraction); if all answers are right, the task is solved;"
            " otherwise use easier or other prompts, rewards with more levels, a higher"
            " sampling.temperature or a larger replay.group_size",
            *(100 * flat, WINDOW_STEPS, reward),
        )

    def _check_weights(self) -> None:
        ess = self._mean("learner/importance_weight/ess")
        if ess < LOW_ESS:
            self._warn(
                "ess",
                "the importance weights of the last %d steps leave an effective sample size of %.0f%%"
                " (learner/importance_weight/ess): the data is too far from the policy; lower"
                " learner.learning_rate or replay.max_staleness",
                *(WINDOW_STEPS, 100 * ess),
            )
        own = self._mean("learner/on_policy_gap/mean")
        gap = self._mean("learner/logprob_gap/mean")
        if own > HIGH_ON_POLICY_GAP:
            change = "set weights.cache to recompute, or " if self._weights.cache == "keep" else ""
            self._warn(
                "on_policy_gap",
                "engines and learner differ by %.2g nats on tokens of the same policy version"
                " (learner/on_policy_gap/mean): they compute differently; %scompare"
                " actors.engine.dtype with learner.compute_dtype, see weights/logprob_error",
                *(own, change),
            )
        elif gap > HIGH_GAP:
            self._warn(
                "gap",
                "log-probabilities of engines and learner differ by %.2g nats on average over the last"
                " %d steps (learner/logprob_gap/mean): the policy moves far while episodes wait; lower"
                " learner.learning_rate or replay.max_staleness",
                *(gap, WINDOW_STEPS),
            )

    def _check_starvation(self) -> None:
        if self._replay.max_staleness == 0:  # each side waits for the other by design
            return
        learner = self._mean("learner/idle_fraction")
        engines = self._mean("rollout/idle_fraction")
        if learner > STARVED_FRACTION:
            self._warn(
                "learner",
                "the learner waited for episodes for %.0f%% of the last %d steps"
                " (learner/idle_fraction): increase actors.num_actors or"
                " actors.max_concurrent_episodes, or look for slow tools and rewards in trace.json",
                *(100 * learner, WINDOW_STEPS),
            )
        if engines > STARVED_FRACTION:
            self._warn(
                "engines",
                "engines had no episode to play for %.0f%% of the last %d steps"
                " (rollout/idle_fraction): raise replay.max_staleness, give the learner more ranks"
                " (learner.num_ranks), or use fewer engines (actors.num_actors)",
                *(100 * engines, WINDOW_STEPS),
            )

    def _check_sources(self) -> None:
        sources = sorted(_sources(self._rows[-1]))
        for source in sources:
            num_episodes = self._grown(SOURCE_EPISODES.replace("<source>", source))
            num_failed = self._grown(SOURCE_ERRORS.replace("<source>", source))
            if num_episodes >= MIN_EPISODES and num_failed >= FAILING_FRACTION * num_episodes:
                self._warn(
                    f"source {source}",
                    "%.0f of the last %.0f episodes of the data source %s failed"
                    " (rollout/source/%s/errors); failures.jsonl in the run directory has the causes",
                    *(num_failed, num_episodes, source, source),
                )


def _sources(keys: Iterable[str]) -> set[str]:
    """Return the names of the data sources with a count of episodes."""
    found = (entry_of(key) for key in keys)
    return {
        entry[1]["source"] for entry in found if entry is not None and entry[0] == SOURCE_EPISODES
    }
