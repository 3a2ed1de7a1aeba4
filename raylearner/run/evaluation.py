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
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias

from raylearner.actors.rollout_worker import EvaluateCall
from raylearner.config.schema import EvaluationKeys, HeldOut, RunConfig
from raylearner.data.cells import HASH_CHARACTERS, content_hash
from raylearner.errors import EvaluationIncomplete, RaylearnerError, summary
from raylearner.observability.episodes import Episode, episodes_of
from raylearner.observability.spans import Tracer
from raylearner.run.evaluation_metrics import Scoring, summarize
from raylearner.run.run_actors import RunActors
from raylearner.types import Claim, PolicyVersion, Prompt, Trajectory

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


HeldOutPrompts: TypeAlias = tuple[HeldOut, list[Prompt]]
"""A set, and its prompts that fit."""


class Evaluator:
    """Plays `num_prompts` held-out prompts, `samples_per_prompt` times each, spread over the actors."""

    def __init__(
        self,
        config: EvaluationKeys,
        prompts: Sequence[Prompt],
        *,
        scoring: Scoring,
        name: str = "",
        record_trajectories: Callable[[int, Sequence[Trajectory]], None] = lambda *_: None,
    ) -> None:
        """`scoring` says how episodes count, and `name` is that of a set, which its metrics start with.

        `record_trajectories` receives the step and all trajectories of an evaluation, in a thread.
        """
        self._record_trajectories = record_trajectories
        self._config = config
        self._name = name
        self._label = f"evaluation of {name}" if name else "evaluation"
        self._scoring = scoring
        self._prompts = _spread(prompts)[: config.num_prompts]
        hashes = "".join(content_hash(prompt) for prompt in self._prompts)
        self._prompts_hash = hashlib.sha256(hashes.encode()).hexdigest()[:HASH_CHARACTERS]

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def is_due(self, step: int) -> bool:
        """Whether it is made after this step, unless that is the last."""
        return bool(self._config.every_steps) and step % self._config.every_steps == 0

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
        claims = self._claims(policy_version)
        remaining = claims
        played: list[Trajectory] = []
        failed: set[str] = set()
        for _ in range(MAX_ROUNDS):
            left_s = max(0.0, ends_at_s - time.monotonic())
            able = await self._wait_for_actors(actors, failed, wait_s=min(wait_s, left_s))
            if able:
                left_s = max(0.0, ends_at_s - time.monotonic())
                done, remaining = await self._play(remaining, able, failed, time_limit_s=left_s)
                played.extend(done)
            is_over = time.monotonic() >= ends_at_s
            if not able and not (played and is_over):
                break
            if not remaining or is_over:
                record = self._record(claims, played, step=step, policy_version=policy_version)
                await asyncio.to_thread(self._record_trajectories, step, played)
                return record
        raise EvaluationIncomplete(
            f"{self._label} at step {step}: {len(remaining)} of {len(claims)} episodes were not"
            f" played, since every rollout actor that tried failed ({', '.join(sorted(failed))})"
        )

    def _claims(self, policy_version: PolicyVersion) -> list[Claim]:
        """Return the episodes of one evaluation; those of a prompt follow each other."""
        samples = self._config.samples_per_prompt
        return [
            Claim(
                group_id=index,
                sample_index=sample,
                attempt=0,
                prompt=prompt,
                policy_version=policy_version,
                seed=index * samples + sample,
            )
            for index, prompt in enumerate(self._prompts)
            for sample in range(samples)
        ]

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
        claims: list[Claim],
        actors: Mapping[str, EvaluateCall],
        failed: set[str],
        *,
        time_limit_s: float,
    ) -> tuple[list[Trajectory], list[Claim]]:
        """Return the episodes, and the claims of actors that failed, which are added to `failed`."""

        async def ask(call: EvaluateCall, share: list[Claim]) -> list[Trajectory]:
            async with asyncio.timeout(time_limit_s + ANSWER_TIMEOUT_S):
                return await call(share, self._config.sampling, time_limit_s)

        # Samples of a prompt stay together, so that their engine computes it once.
        bounds = [len(claims) * i // len(actors) for i in range(len(actors) + 1)]
        shares = [claims[start:end] for start, end in pairwise(bounds)]
        asked = [(actor_id, share) for actor_id, share in zip(actors, shares, strict=True) if share]
        results = await asyncio.gather(
            *(ask(actors[actor_id], share) for actor_id, share in asked), return_exceptions=True
        )
        played: list[Trajectory] = []
        left: list[Claim] = []
        for (actor_id, share), result in zip(asked, results, strict=True):
            if isinstance(result, TimeoutError):
                logger.warning(
                    "%s did not finish its evaluation in time and does not respond", actor_id
                )
                left.extend(share)
            elif isinstance(result, BaseException):
                logger.warning(
                    "%s failed during an evaluation; its %d episodes go to other actors: %s",
                    *(actor_id, len(share), summary(result)),
                )
                failed.add(actor_id)
                left.extend(share)
            else:
                played.extend(result)
        return played, left

    def _record(
        self,
        claims: Sequence[Claim],
        played: list[Trajectory],
        *,
        step: int,
        policy_version: PolicyVersion,
    ) -> dict[str, Any]:
        versions = {v for t in played for v in (t.min_policy_version, t.max_policy_version)}
        if versions - {policy_version}:
            raise RaylearnerError(
                f"evaluation must be pinned to version {policy_version}, but tokens carry"
                f" versions {sorted(versions)}"
            )
        episodes = episodes_of(played)
        self._warn_of_failures(episodes, step)
        self._warn_of_unfinished(claims, episodes, step)
        record: dict[str, Any] = {
            "step": step,
            "policy_version": policy_version,
            **({"set": self._name} if self._name else {}),
            "prompts_hash": self._prompts_hash,
        }
        start = f"{self._name}/" if self._name else ""
        record |= summarize(claims, episodes, scoring=self._scoring, prefix=start)
        for source in sorted({claim.prompt.source for claim in claims}):
            record |= summarize(
                [claim for claim in claims if claim.prompt.source == source],
                [episode for episode in episodes if episode.first.source == source],
                scoring=self._scoring,
                prefix=f"{start}{source}/",
            )
        return record

    def _warn_of_unfinished(
        self, claims: Sequence[Claim], episodes: Sequence[Episode], step: int
    ) -> None:
        done = {episode.first.episode_key for episode in episodes}
        unfinished = [claim for claim in claims if claim.key not in done]
        if unfinished:
            prompt_ids = list(dict.fromkeys(claim.prompt.prompt_id for claim in unfinished))
            logger.warning(
                "%s at step %d: %d of %d episodes did not finish within evaluation.time_limit_s=%g;"
                " they were aborted and count as not solved, for example prompts %s",
                *(self._label, step, len(unfinished), len(claims), self._config.time_limit_s),
                ", ".join(prompt_ids[:MAX_NAMED]),
            )

    def _warn_of_failures(self, episodes: Sequence[Episode], step: int) -> None:
        failed = [episode.first for episode in episodes if episode.is_failed]
        errors = Counter(trajectory.error_kind for trajectory in failed)
        if errors.total() < WARNED_FAILED_FRACTION * len(episodes) or not errors:
            return
        kind = errors.most_common(1)[0][0]
        example = next(t.error for t in failed if t.error_kind == kind)
        logger.warning(
            "%s at step %d: %d of %d episodes failed and count as not solved in reward/mean;"
            " most often by %s, for example: %s",
            *(self._label, step, errors.total(), len(episodes), kind, example),
        )


class Evaluations:
    """Owns the evaluations of a run, one set after the other: alone, or during training on one lent actor.

    A lent actor also plays training episodes, as far as their staleness allows, and receives no
    weights; afterwards it gets the newest. If it dies, its evaluation is lost, which is logged.
    """

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        *,
        actors: RunActors,
        can_lend: bool,
        record: Callable[[Mapping[str, Any]], None],
        tracer: Tracer,
    ) -> None:
        """Without `can_lend` the run always waits, as where engines sleep during a step."""
        self._evaluators = evaluators
        self._actors = actors
        self._can_lend = can_lend
        self._record = record
        self._tracer = tracer
        self._running: asyncio.Task[None] | None = None

    async def run(self, step: int) -> None:
        """Evaluate on all actors, after the evaluation in flight."""
        await self.wait()
        await self._actors.publish()
        await self._run_alone(self._evaluators, step)

    async def _run_alone(self, evaluators: Sequence[Evaluator], step: int) -> None:
        for evaluator in evaluators:
            with self._tracer.span("evaluate", step=step):
                record = await evaluator.evaluate(
                    self._actors.fleet.evaluators,
                    step=step,
                    policy_version=self._actors.learner.policy_version,
                    wait_s=REPLACEMENT_WAIT_S,
                )
            self._record(record)

    def is_due(self, step: int) -> bool:
        """Whether a set is evaluated after this step."""
        return any(evaluator.is_due(step) for evaluator in self._evaluators)

    async def start(self, step: int) -> None:
        """Start the evaluations that are due, after those in flight; wait for them if no actor can be lent."""
        due = [evaluator for evaluator in self._evaluators if evaluator.is_due(step)]
        if not self._can_lend or len(self._actors.fleet.actors) < MIN_ACTORS_TO_LEND:
            await self.wait()
            await self._actors.publish()
            await self._run_alone(due, step)
            return
        await self._actors.publish()
        version = self._actors.learner.policy_version
        await self.wait()
        actor_id = max(self._actors.fleet.evaluators())
        self._actors.lend(actor_id)
        self._running = asyncio.create_task(
            self._run_beside(due, actor_id, step=step, policy_version=version), name="evaluation"
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

    async def _run_beside(
        self,
        evaluators: Sequence[Evaluator],
        actor_id: str,
        *,
        step: int,
        policy_version: PolicyVersion,
    ) -> None:
        def lent() -> dict[str, EvaluateCall]:
            calls = self._actors.fleet.evaluators()
            return {key: call for key, call in calls.items() if key == actor_id}

        try:
            for evaluator in evaluators:
                self._record(
                    await evaluator.evaluate(lent, step=step, policy_version=policy_version)
                )
        except EvaluationIncomplete as error:
            logger.warning("%s; it is lost", error)
        if lent():
            await self._actors.give_back(actor_id)


def make_evaluators(
    config: RunConfig,
    held_out: Sequence[HeldOutPrompts],
    record_trajectories: Callable[..., None],
) -> list[Evaluator]:
    """Return an evaluator for each set of held-out prompts.

    `record_trajectories` receives step, trajectories and `name`, that of the set.
    """
    return [
        Evaluator(
            part.section,
            prompts,
            name=part.name,
            scoring=Scoring.of_run(config, part.section),
            record_trajectories=partial(record_trajectories, name=part.name),
        )
        for part, prompts in held_out
        if prompts
    ]


def _spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Alternate between sources, so that a limit keeps prompts of each."""
    by_source: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_source[prompt.source].append(prompt)
    rounds = zip_longest(*by_source.values())
    return [prompt for turn in rounds for prompt in turn if prompt is not None]
