"""Do long episodes train as often as short ones? A simulation of a run around the real replay classes.

    python benchmarks/lengths.py [--steps 60] [--seeds 3]

A fixed number of episodes run at once, each for as many time units as it has tokens; a learner takes,
steps and pushes. Prints a Markdown table of the ways to choose the groups of a step.
"""

import argparse
import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from raylearner.config.schema import ReplaySection
from raylearner.replay.buffer import ReplayBuffer, Take
from raylearner.types import Claim, Prompt, Trajectory

Lengths = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Draws the lengths of a group's members, in tokens."""

PROMPTS = [Prompt(prompt_id=f"prompt-{i}", messages=()) for i in range(1000)]


def log_uniform(low: float, high: float, *, spread: float = 0.0) -> Lengths:
    """Return lengths that the prompt decides; members' logarithms deviate from it by `spread`."""

    def draw(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        wanted = generator.uniform(np.log(low), np.log(high))
        return np.exp(wanted + spread * generator.standard_normal(size))

    return draw


def log_normal(median: float, deviation: float) -> Lengths:
    """Return independent lengths, whatever the prompt."""

    def draw(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return median * np.exp(deviation * generator.standard_normal(size))

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One simulated run. A unit of time is the time of one sampled token."""

    lengths: Lengths
    max_tokens: int = 1024
    num_slots: int = 384
    """Number of episodes that engines play at once."""
    step_time: float = 90.0
    num_steps: int = 60
    replay: ReplaySection = field(
        default_factory=lambda: ReplaySection(groups_per_step=8, max_staleness=4)
    )
    max_overtaken: float | None = None
    """Steps' worth of groups by which a group may train before an older one that is running; 0: in
    order of start. None: in order of completion, the replay's own rule."""
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Lengths in tokens, by episode; shares of the run's time and tokens."""

    started: list[int] = field(default_factory=list[int])
    finished: list[int] = field(default_factory=list[int])
    trained: list[list[int]] = field(default_factory=list[list[int]])
    """By step."""
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """Of the replay at each take."""
    time: float = 0.0
    busy: float = 0.0
    """Time during which the learner stepped."""

    @property
    def num_steps(self) -> int:
        return len(self.trained)

    @property
    def learner_idle(self) -> float:
        return 1 - self.busy / self.time

    @property
    def masked(self) -> float:
        """Share of taken tokens beyond the bound."""
        taken = sum(map(sum, self.trained))
        return sum(step["buffer/masked_tokens"] for step in self.metrics) / taken

    def trained_to(self, lengths: list[int]) -> float:
        """Return mean trained length over the mean of these."""
        return float(np.mean([n for step in self.trained for n in step]) / np.mean(lengths))


class Simulation:
    """Owns a replay buffer and the events of its run, in order of time."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._section = setting.replay.model_copy(update={"group_time_limit_s": 1e12})
        self._now = 0.0
        self._buffer = ReplayBuffer(
            self._section, PROMPTS, seed=setting.seed, clock=lambda: self._now
        )
        self._events: list[tuple[float, int, Claim | list[int]]] = []
        self._running: dict[tuple[int, int, int], float] = {}  # start by claim
        self._lengths: dict[int, NDArray[np.int64]] = {}  # of a group's members
        self._pushed_at = [0.0]
        self._num_events = 0
        self._is_stepping = False
        self.outcome = Outcome()

    def run(self) -> Outcome:
        self._claim()
        while len(self._pushed_at) <= self._setting.num_steps:
            self._now, _, event = heapq.heappop(self._events)
            if isinstance(event, Claim):
                self._finish(event)
            else:
                self._is_stepping = False
                self._buffer.commit(event, len(self._pushed_at))
                self._pushed_at.append(self._now)
            self._take()
            self._claim()
        self.outcome.time = self._now
        return self.outcome

    def _after(self, delay: float, event: Claim | list[int]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + delay, self._num_events, event))

    def _claim(self) -> None:
        free = self._setting.num_slots - len(self._running)
        reply = self._buffer.claim("rollout-0", len(self._pushed_at) - 1, free)
        for key in reply.cancelled:
            del self._running[key]
        for claim in reply.claims:
            self._running[claim.key] = self._now
            self.outcome.started.append(self._length(claim))
            self._after(self._length(claim), claim)

    def _finish(self, claim: Claim) -> None:
        started = self._running.pop(claim.key, None)
        if started is None:
            return
        outcome = self._buffer.put([self._episode(claim, started)])
        assert outcome == "accepted", outcome
        self.outcome.finished.append(self._length(claim))

    def _take(self) -> None:
        num_groups, num_done = self._section.groups_per_step, len(self.outcome.trained)
        if self._is_stepping or num_done == self._setting.num_steps or self._must_wait(num_groups):
            return
        take = self._buffer.take(num_groups, len(self._pushed_at) - 1)
        if take is None:
            return
        self._is_stepping = True
        self._record(take)
        self._after(self._setting.step_time, [group.group_id for group in take.groups])

    def _record(self, take: Take) -> None:
        self.outcome.trained.append([t.num_tokens for g in take.groups for t in g.trajectories])
        self.outcome.metrics.append(take.metrics)
        self.outcome.busy += self._setting.step_time

    def _must_wait(self, num_groups: int) -> bool:
        limit, running = self._setting.max_overtaken, self._buffer.ledger.running
        held = self._buffer.ledger.held_oldest_first()[:num_groups]
        if limit is None or not running or len(held) < num_groups:
            return False
        return held[-1].group_id > min(running) + limit * num_groups

    def _length(self, claim: Claim) -> int:
        if claim.group_id not in self._lengths:
            size = self._section.group_size + self._section.extra
            generator = np.random.default_rng([self._setting.seed, claim.group_id])
            drawn = self._setting.lengths(generator, size).round()
            self._lengths[claim.group_id] = drawn.clip(1, self._setting.max_tokens).astype(int)
        return int(self._lengths[claim.group_id][claim.sample_index])

    def _episode(self, claim: Claim, started: float) -> Trajectory:
        """Return an episode whose tokens have the versions of their times."""
        size = self._length(claim)
        mask = np.ones(size, np.bool_)
        versions = np.searchsorted(self._pushed_at, started + np.arange(size), side="right") - 1
        return Trajectory(
            group_id=claim.group_id,
            sample_index=claim.sample_index,
            attempt=claim.attempt,
            prompt_id=claim.prompt.prompt_id,
            token_ids=np.zeros(size, np.int32),
            loss_mask=mask,
            train_mask=mask,
            behavior_logprobs=np.full(size, -1.0, np.float32),
            policy_versions=versions.astype(np.int32),
            claim_policy_version=claim.policy_version,
            reward=float(claim.sample_index % 2),
        )


def simulate(setting: Setting) -> Outcome:
    return Simulation(setting).run()


LENGTHS: dict[str, Lengths] = {
    "the prompt decides": log_uniform(40, 800),
    "the prompt decides roughly": log_uniform(40, 800, spread=0.5),
    "independent": log_normal(200, 1.3),
}
RULES: dict[str, tuple[dict[str, Any], float | None]] = {
    "in order of completion": ({}, None),
    "the same, staleness 8": ({"max_staleness": 8}, None),
    "the same, 20 groups at once": ({"max_concurrent_groups": 20}, None),
    "at most 4 steps overtaken": ({}, 4),
    "at most 1 step overtaken": ({}, 1),
    "in order of start": ({}, 0),
    "`on_stale: wait`": ({"on_stale": "wait"}, None),
    "`on_stale: wait`, staleness 8": ({"on_stale": "wait", "max_staleness": 8}, None),
}
"""Keys of `replay`, and `Setting.max_overtaken`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    sys.stdout.write(
        "| lengths | groups of a step | trained / finished, in groups that ended | trained / finished |"
        " trained / started | masked | steps per 1,000 tokens | learner idle |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|\n"
    )
    for name, lengths in LENGTHS.items():
        for rule, (keys, max_overtaken) in RULES.items():
            section = ReplaySection(**{"groups_per_step": 8, "max_staleness": 4} | keys)
            runs = [
                simulate(
                    Setting(
                        lengths=lengths,
                        replay=section,
                        max_overtaken=max_overtaken,
                        num_steps=arguments.steps,
                        seed=seed,
                    )
                )
                for seed in range(arguments.seeds)
            ]
            ratios = [
                (
                    run.metrics[-1]["buffer/trained_to_finished_length"],
                    run.trained_to(run.finished),
                    run.trained_to(run.started),
                    run.masked,
                    1000 * run.num_steps / run.time,
                    run.learner_idle,
                )
                for run in runs
            ]
            same, finished, started, masked, rate, idle = np.mean(ratios, axis=0)
            sys.stdout.write(
                f"| {name} | {rule} | {same:.3f} | {finished:.3f} | {started:.3f} | {masked:.0%} |"
                f" {rate:.1f} | {idle:.0%} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
