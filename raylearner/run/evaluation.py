"""Evaluation on held-out prompts: played by rollout actors at one policy version.

Before and after training all actors play, and the run waits. In between one actor keeps the version
that is evaluated, while the others continue and get newer ones.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from raylearner.actors.rollout_worker import EvaluateCall
from raylearner.config.schema import EvaluationSection
from raylearner.data.cells import HASH_CHARACTERS, content_hash
from raylearner.errors import EvaluationIncomplete, RaylearnerError, summary
from raylearner.observability.episodes import Episode, episodes_of, mean_reward
from raylearner.observability.spans import Tracer
from raylearner.run.run_actors import RunActors
from raylearner.types import PolicyVersion, Prompt, Trajectory

logger = logging.getLogger(__name__)

WARNED_FAILED_FRACTION = 0.1
"""Minimum fraction of failed episodes for a warning."""
MAX_ROUNDS = 5
"""Maximum number of times that the prompts of actors that failed are given to others."""
REPLACEMENT_WAIT_S = 600.0
"""Maximum wait for the replacement of the last actor that could play."""
ACTORS_POLL_S = 1.0
ANSWER_TIMEOUT_S = 30.0
"""Time after the limit of an evaluation for an actor to answer."""
MAX_NAMED = 3
"""Maximum number of unfinished prompts that a warning names."""
MIN_ACTORS_TO_LEND = 2
"""Minimum number of actors to lend one: evaluation must not take the only one."""


class Evaluator:
    """Plays `num_prompts` held-out prompts, spread over the actors, and reports rewards by source."""

    def __init__(
        self,
        config: EvaluationSection,
        prompts: Sequence[Prompt],
        *,
        failed_reward: float = 0.0,
        record_trajectories: Callable[[int, Sequence[Trajectory]], None] = lambda *_: None,
    ) -> None:
        """`failed_reward` is the reward of a failed episode in means.

        `record_trajectories` receives the step and all trajectories of an evaluation, in a thread.
        """
        self._record_trajectories = record_trajectories
        self._config = config
        self._failed_reward = failed_reward
        self._prompts = _spread(prompts)[: config.num_prompts]
        hashes = "".join(content_hash(prompt) for prompt in self._prompts)
        self._prompts_hash = hashlib.sha256(hashes.encode()).hexdigest()[:HASH_CHARACTERS]

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    async def evaluate(
        self,
        actors: Callable[[], Mapping[str, EvaluateCall]],
        *,
        step: int,
        policy_version: PolicyVersion,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        """Return one record for `eval.jsonl`. `actors` returns those that are alive.

        The share of an actor that fails is played by the others, or by its replacement, which may take
        `wait_s`. Raises `RaylearnerError` when an episode was sampled by another version, and
        `EvaluationIncomplete` when no actor lived long enough to play.
        """
        ends_at_s = time.monotonic() + self._config.time_limit_s
        remaining = self._prompts
        played: list[Trajectory] = []
        failed: set[str] = set()
        for _ in range(MAX_ROUNDS):
            left_s = max(0.0, ends_at_s - time.monotonic())
            able = await self._wait_for_actors(actors, failed, wait_s=min(wait_s, left_s))
            if not able:
                break
            left_s = max(0.0, ends_at_s - time.monotonic())
            done, remaining = await self._play(remaining, able, failed, time_limit_s=left_s)
            played.extend(done)
            if not remaining or time.monotonic() >= ends_at_s:
                record = self._record(played, step=step, policy_version=policy_version)
                await asyncio.to_thread(self._record_trajectories, step, played)
                return record
        raise EvaluationIncomplete(
            f"evaluation at step {step}: {len(remaining)} of {len(self._prompts)} prompts were not"
            f" played, since every rollout actor that tried failed ({', '.join(sorted(failed))})"
        )

    async def _wait_for_actors(
        self,
        actors: Callable[[], Mapping[str, EvaluateCall]],
        failed: Collection[str],
        *,
        wait_s: float,
    ) -> dict[str, EvaluateCall]:
        """Return the actors that have not failed, as soon as there are any; none after `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            able = {key: call for key, call in actors().items() if key not in failed}
            if able or time.monotonic() >= deadline_s:
                return able
            await asyncio.sleep(ACTORS_POLL_S)

    async def _play(
        self,
        prompts: list[Prompt],
        actors: Mapping[str, EvaluateCall],
        failed: set[str],
        *,
        time_limit_s: float,
    ) -> tuple[list[Trajectory], list[Prompt]]:
        """Return the episodes, and the prompts of actors that failed, which are added to `failed`."""

        async def ask(call: EvaluateCall, share: list[Prompt]) -> list[Trajectory]:
            async with asyncio.timeout(time_limit_s + ANSWER_TIMEOUT_S):
                return await call(share, self._config.sampling, time_limit_s)

        shares = [prompts[i :: len(actors)] for i in range(len(actors))]
        results = await asyncio.gather(
            *(
                ask(call, share)
                for call, share in zip(actors.values(), shares, strict=True)
                if share
            ),
            return_exceptions=True,
        )
        played: list[Trajectory] = []
        left: list[Prompt] = []
        for actor_id, share, result in zip(actors, shares, results, strict=False):
            if isinstance(result, TimeoutError):
                logger.warning(
                    "%s did not finish its evaluation in time and does not respond", actor_id
                )
                left.extend(share)
            elif isinstance(result, BaseException):
                logger.warning(
                    "%s failed during an evaluation; its %d prompts go to other actors: %s",
                    *(actor_id, len(share), summary(result)),
                )
                failed.add(actor_id)
                left.extend(share)
            else:
                played.extend(result)
        return played, left

    def _record(
        self, played: list[Trajectory], *, step: int, policy_version: PolicyVersion
    ) -> dict[str, Any]:
        versions = {v for t in played for v in (t.min_policy_version, t.max_policy_version)}
        if versions - {policy_version}:
            raise RaylearnerError(
                f"evaluation must be pinned to version {policy_version}, but tokens carry"
                f" versions {sorted(versions)}"
            )
        episodes = episodes_of(played)
        by_source: dict[str, list[Episode]] = defaultdict(list)
        for episode in episodes:
            by_source[episode.first.source].append(episode)
        self._warn_of_failures(episodes, step)
        unfinished = self._find_unfinished(episodes)
        if unfinished:
            logger.warning(
                "evaluation at step %d: %d of %d episodes did not finish within evaluation.time_limit_s=%g;"
                " they were aborted and count as not solved, for example prompts %s",
                *(step, len(unfinished), len(self._prompts), self._config.time_limit_s),
                ", ".join(prompt.prompt_id for prompt in unfinished[:MAX_NAMED]),
            )
        num_unfinished = Counter(prompt.source for prompt in unfinished)
        record: dict[str, Any] = {
            "step": step,
            "policy_version": policy_version,
            "prompts_hash": self._prompts_hash,
            **_summary(
                episodes,
                prefix="",
                failed_reward=self._failed_reward,
                num_unfinished=len(unfinished),
            ),
        }
        for source in sorted(by_source.keys() | num_unfinished.keys()):
            record |= _summary(
                by_source[source],
                prefix=f"{source}/",
                failed_reward=self._failed_reward,
                num_unfinished=num_unfinished[source],
            )
        return record

    def _find_unfinished(self, episodes: Sequence[Episode]) -> list[Prompt]:
        """Return the prompts without an episode."""
        num_played = Counter(episode.first.prompt_id for episode in episodes)
        unfinished: list[Prompt] = []
        for prompt in self._prompts:
            if num_played[prompt.prompt_id]:
                num_played[prompt.prompt_id] -= 1
            else:
                unfinished.append(prompt)
        return unfinished

    def _warn_of_failures(self, episodes: Sequence[Episode], step: int) -> None:
        failed = [episode.first for episode in episodes if episode.is_failed]
        errors = Counter(trajectory.error_kind for trajectory in failed)
        if errors.total() < WARNED_FAILED_FRACTION * len(episodes) or not errors:
            return
        kind = errors.most_common(1)[0][0]
        example = next(t.error for t in failed if t.error_kind == kind)
        logger.warning(
            "evaluation at step %d: %d of %d episodes failed and count as not solved in reward/mean;"
            " most often by %s, for example: %s",
            *(step, errors.total(), len(episodes), kind, example),
        )


class Evaluations:
    """Owns the evaluations of a run: alone, or during training on one lent actor.

    A lent actor also plays training episodes, as far as their staleness allows, and receives no
    weights; afterwards it gets the newest. If it dies, its evaluation is lost, which is logged.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        actors: RunActors,
        can_lend: bool,
        record: Callable[[Mapping[str, Any]], None],
        tracer: Tracer,
    ) -> None:
        """Without `can_lend` the run always waits, as where engines sleep during a step."""
        self._evaluator = evaluator
        self._actors = actors
        self._can_lend = can_lend
        self._record = record
        self._tracer = tracer
        self._running: asyncio.Task[None] | None = None

    async def run(self, step: int) -> None:
        """Evaluate on all actors, after the evaluation in flight."""
        await self.wait()
        await self._actors.publish()
        with self._tracer.span("evaluate", step=step):
            record = await self._evaluator.evaluate(
                self._actors.fleet.evaluators,
                step=step,
                policy_version=self._actors.learner.policy_version,
                wait_s=REPLACEMENT_WAIT_S,
            )
        self._record(record)

    async def start(self, step: int) -> None:
        """Start an evaluation after the one in flight; wait for it if no actor can be lent."""
        if not self._can_lend or len(self._actors.fleet.actors) < MIN_ACTORS_TO_LEND:
            await self.run(step)
            return
        await self._actors.publish()
        version = self._actors.learner.policy_version
        await self.wait()
        actor_id = max(self._actors.fleet.evaluators())
        self._actors.lend(actor_id)
        self._running = asyncio.create_task(
            self._run_beside(actor_id, step=step, policy_version=version), name="evaluation"
        )

    async def wait(self) -> None:
        """Wait for the evaluation in flight, and raise its error."""
        running, self._running = self._running, None
        if running is not None:
            await running

    async def cancel(self) -> None:
        """Cancel the evaluation in flight; its actor gets no weights from here."""
        running, self._running = self._running, None
        if running is not None:
            if not running.done():
                logger.warning("the evaluation in flight is broken off and lost")
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run_beside(self, actor_id: str, *, step: int, policy_version: PolicyVersion) -> None:
        def lent() -> dict[str, EvaluateCall]:
            calls = self._actors.fleet.evaluators()
            return {key: call for key, call in calls.items() if key == actor_id}

        try:
            self._record(
                await self._evaluator.evaluate(lent, step=step, policy_version=policy_version)
            )
        except EvaluationIncomplete as error:
            logger.warning("%s; it is lost", error)
        if lent():
            await self._actors.give_back(actor_id)


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Alternate between sources, so that a limit keeps prompts of each."""
    by_source: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_source[prompt.source].append(prompt)
    rounds = zip_longest(*by_source.values())
    return [prompt for turn in rounds for prompt in turn if prompt is not None]


def _summary(
    episodes: Sequence[Episode], *, prefix: str, failed_reward: float, num_unfinished: int
) -> dict[str, float | int | None]:
    """Return means over episodes; in `reward/mean` failed and unfinished ones count as not solved."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    num_failed = sum(e.is_failed for e in episodes)
    count = max(1, len(episodes))
    return {
        f"{prefix}reward/mean": mean_reward(
            episodes, failed_reward=failed_reward, num_unfinished=num_unfinished
        ),
        f"{prefix}reward/mean_without_failed": sum(rewards) / len(rewards) if rewards else None,
        f"{prefix}num_prompts": len(episodes) + num_unfinished,
        f"{prefix}unfinished": num_unfinished,
        f"{prefix}errors": num_failed,
        f"{prefix}failed_fraction": num_failed / count,
        f"{prefix}turns/mean": sum(len(e.turns) for e in episodes) / count,
        f"{prefix}sampled_tokens/mean": sum(e.num_sampled_tokens for e in episodes) / count,
    }
