"""The loop of a run: takes groups, steps the learner, publishes, reports, checkpoints, evaluates.

Consumes finished groups; produces policy versions. Waits for groups (unblocked by rollout actors)
and for the learner's step; whoever makes no progress for `run.watchdog_s` is named and ends the run.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from raylearner.cleanup import clean_up
from raylearner.config.schema import RunConfig
from raylearner.errors import (
    LearnerDied,
    RunStopped,
    TooManyFailures,
    summary,
)
from raylearner.learner.batch.pack import pack
from raylearner.learner.checkpoint.directory import Checkpoint, find_latest
from raylearner.observability.action_watch import ActionWatch
from raylearner.observability.recorder import Recorder
from raylearner.observability.spans import Tracer
from raylearner.observability.step_report import step_metrics
from raylearner.replay.buffer import Take
from raylearner.run import placement
from raylearner.run.checkpointing import CheckpointWriter
from raylearner.run.evaluation import Evaluator, SideEvaluation
from raylearner.run.run_actors import RunActors, prepare_model
from raylearner.run.watchdog import T, in_time, stalled, unless_set
from raylearner.types import Prompt

logger = logging.getLogger(__name__)

MIN_ACTORS_TO_LEND = 2
"""With fewer, evaluation would take the only one."""
TAKE_POLL_S = 5.0
"""How long one take call waits before the watchdog looks."""


class Controller:
    """Owns the run's actors and its loop. `start`, `train`, `close`."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        training: list[Prompt],
        held_out: list[Prompt],
    ) -> None:
        self._config = config
        self._folder = folder
        self._recorder = recorder
        self._training = training
        self._evaluator = (
            Evaluator(
                config.evaluation,
                held_out,
                failed_reward=config.rewards.reported_failed_reward,
            )
            if held_out
            else None
        )
        self._side_evaluation: SideEvaluation | None = None
        self._tracer = Tracer(track="controller", is_enabled=config.observability.trace)
        self._stop_requested = asyncio.Event()
        self._num_learner_restarts = 0
        self._reporting: asyncio.Task[None] | None = None
        self._action_watch = ActionWatch(config.environment, max_steps=config.run.num_steps)
        self._started: RunActors | None = None
        self._saver: CheckpointWriter | None = None
        self._is_resumed = False
        self.step = 0

    def request_stop(self) -> None:
        """Ends the run at the next step boundary, after a checkpoint (SIGTERM, `ray job stop`, a deadline)."""
        logger.info("stop requested: a checkpoint follows the running step")
        self._stop_requested.set()

    @property
    def _should_stop(self) -> bool:
        return self._stop_requested.is_set()

    # -- starting and ending -------------------------------------------------------------------

    async def start(self, tasks: asyncio.TaskGroup, *, latest: Checkpoint | None) -> None:
        """Raises `RunStopped` at once where a stop is requested meanwhile: starting takes minutes."""
        await unless_set(self._stop_requested, self._start(latest))
        if self._should_stop:
            raise RunStopped(self._stopped())
        self._actors.fleet.play(tasks)

    async def _start(self, latest: Checkpoint | None) -> None:
        config, self._is_resumed = self._config, latest is not None
        with self._recorder.stage("preparing the model"):
            model_path = await prepare_model(config, self._folder, self._training)
        actors = self._started = await RunActors.reserved(
            config,
            self._training,
            folder=self._folder,
            model_path=model_path,
            tracer=self._tracer,
        )
        self._saver = CheckpointWriter(
            self._folder / "checkpoints",
            learner=actors.learner,
            replay=actors.replay,
            keep_last=config.run.keep_last,
            should_defer=config.run.checkpoint_async,
            tracer=self._tracer,
        )
        with self._recorder.stage(
            f"starting {config.learner.num_ranks} learner ranks and"
            f" {config.actors.num_actors} engines"
        ):
            await actors.start()
        if self._evaluator is not None:
            self._side_evaluation = SideEvaluation(
                self._evaluator,
                actors=actors.fleet.evaluators,
                lend=actors.lend,
                give_back=actors.give_back,
                record=self._recorder.evaluation,
            )
        if latest is not None:
            with self._recorder.stage("restoring the last checkpoint"):
                await self._restore(latest)
        with self._recorder.stage("publishing the first weights"):
            await actors.publish()

    async def close(self) -> None:
        """Ends every actor and what it started. Safe to call twice."""
        parts = (self._side_evaluation, self._saver)
        await clean_up(
            sys.exception(),
            self._finish_report,
            *(part.cancel for part in parts if part is not None),
            *([] if self._started is None else [self._started.close]),
            lambda: self._recorder.spans(self._tracer.drain()),
        )

    @property
    def _actors(self) -> RunActors:
        assert self._started is not None, "start comes first"
        return self._started

    # -- the loop ------------------------------------------------------------------------------

    async def train(self) -> None:
        """Steps until `run.num_steps`. Raises `RunStopped` after a requested stop."""
        if self.step == 0:
            await self._evaluate()
        while self.step < self._config.run.num_steps:
            try:
                await self._make_step()
            except LearnerDied as error:
                await self._roll_back(error)
        await self._actors.assert_current()

    async def _make_step(self) -> None:
        """Takes, trains, publishes, reports, and what is due after the step."""
        config, actors = self._config, self._actors
        learner = actors.learner
        wait_started = time.monotonic()
        take = await self._take()
        step_started, trained_version = time.monotonic(), learner.policy_version
        with self._tracer.span("pack"):
            batches = pack(
                take.groups,
                policy_version=trained_version,
                num_ranks=config.learner.num_data_ranks,
                max_tokens_per_micro_batch=config.learner.max_tokens_per_micro_batch,
                num_mini_batches=config.learner.num_mini_batches,
                should_mask_truncated=config.learner.mask_truncated,
            )
        await actors.let_engines_sleep()
        with self._tracer.span("step", step=self.step + 1):
            output = await self._in_time(learner.step(batches), "the learner's step")
        await actors.replay.commit.remote(
            [group.group_id for group in take.groups], output.policy_version
        )
        self.step += 1
        actors.start_publishing(output.policy_version)
        metrics = self._step_metrics(
            take, output, wait_s=step_started - wait_started, since=wait_started
        )
        await self._reported()
        self._reporting = asyncio.create_task(
            self._report(self.step, take, output, metrics, trained_version=trained_version)
        )
        await self._checkpoint_and_evaluate()

    async def _take(self) -> Take:
        """The next groups. Raises `StalledError` when nobody made progress for `watchdog_s`, and
        `TooManyFailures`."""
        try:
            return await self._take_in_time()
        except TooManyFailures:
            asked = placement.answer(self._actors.replay.failures.remote())
            failures = await self._in_time(asked, "the replay actor's failures")
            self._recorder.failures(self.step + 1, failures)
            raise

    async def _take_in_time(self) -> Take:
        config, actors = self._config, self._actors
        progress, changed_at = -1, time.monotonic()
        with self._tracer.span("take"):
            while True:
                asked = placement.answer(
                    actors.replay.take.remote(
                        config.replay.groups_per_step, actors.learner.policy_version, TAKE_POLL_S
                    )
                )
                taking = unless_set(self._stop_requested, asked)
                # A take that finds nothing comes back by itself.
                take = await self._in_time(taking, "the replay actor's take", beyond_s=TAKE_POLL_S)
                if take is not None:
                    return take
                if self._should_stop:
                    await self._stop()
                now = time.monotonic()
                current = await self._in_time(
                    placement.answer(actors.replay.progress.remote()), "the replay actor's progress"
                )
                if current != progress:
                    progress, changed_at = current, now
                elif now - changed_at > config.run.watchdog_s:
                    folder, idle_s = self._folder / "stalled", now - changed_at
                    raise await stalled(actors.replay, folder, idle_s=idle_s, step=self.step)

    async def _in_time(self, call: Awaitable[T], what: str, *, beyond_s: float = 0.0) -> T:
        limit_s = self._config.run.watchdog_s + beyond_s
        return await in_time(call, what, limit_s=limit_s, step=self.step)

    def _step_metrics(
        self, take: Take, output: Any, *, wait_s: float, since: float
    ) -> dict[str, float]:
        """What the controller knows at the end of a step."""
        actors = self._actors
        metrics = take.metrics | output.metrics | dict(actors.publisher.metrics)
        metrics |= self._saver.drain_metrics() if self._saver is not None else {}
        return metrics | {
            "policy_version": float(output.policy_version),
            "rollout/restarts": float(actors.fleet.num_restarts),
            "buffer/wait_s": wait_s,
            "learner/idle_fraction": wait_s / max(1e-9, time.monotonic() - since),
        }

    async def _report(
        self,
        step: int,
        take: Take,
        output: Any,
        metrics: dict[str, float],
        *,
        trained_version: int,
    ) -> None:
        """Beside the next step: actors under load take a while to answer, and files to write.

        `trained_version` is the policy's before the step.
        """
        actors = self._actors
        (activities, played), trained = await asyncio.gather(
            actors.fleet.drain(), actors.learner.drain_spans()
        )
        self._recorder.spans([*played, *trained, *self._tracer.drain()])
        reported = step_metrics(
            take.groups,
            activities,
            failed_reward=self._config.rewards.reported_failed_reward,
        )
        self._recorder.failures(step, take.failures)
        self._recorder.step(step, reported | metrics)
        self._action_watch.look(take.groups)
        trajectories = [t for group in take.groups for t in group.trajectories]
        await asyncio.to_thread(
            self._recorder.trajectories,
            step,
            trajectories,
            policy_version=trained_version,
            advantages=output.advantages,
            learner_logprobs=output.logprobs,
        )

    async def _reported(self) -> None:
        """Until the last step is on record."""
        if self._reporting is not None:
            # Whoever cancels the loop does not cancel the report, which `close` waits for.
            await asyncio.shield(self._reporting)
            self._reporting = None

    async def _finish_report(self) -> None:
        """Where something worse went wrong already."""
        try:
            await self._reported()
        except Exception as error:
            self._reporting = None
            logger.warning("step %d is not wholly on record: %s", self.step, summary(error))

    async def _checkpoint_and_evaluate(self) -> None:
        run, is_last = self._config.run, self.step >= self._config.run.num_steps
        every = run.checkpoint_every_steps
        assert self._saver is not None, "start comes first"
        if is_last or self._should_stop or (every and self.step % every == 0):
            await self._reported()
            await self._saver.start(self.step)
        if is_last:
            await self._saver.wait()
        if self._should_stop and not is_last:
            await self._stop()
        every = self._config.evaluation.every_steps
        if is_last:
            await self._evaluate()
        elif every and self.step % every == 0:
            await self._evaluate_beside_training()

    async def _stop(self) -> None:
        assert self._saver is not None, "start comes first"
        await self._reported()
        if self.step and self._saver.step != self.step:
            await self._saver.start(self.step)
        await self._saver.wait()
        raise RunStopped(self._stopped())

    def _stopped(self) -> str:
        if self.step or self._is_resumed:
            return f"stopped on request at step {self.step}; resume with --resume {self._folder}"
        return (
            f"stopped on request before the first step: {self._folder} holds no checkpoint; start"
            " again in another run.dir"
        )

    # -- evaluation and checkpoints ------------------------------------------------------------

    async def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        if self._side_evaluation is not None:
            await self._side_evaluation.settle()
        actors = self._actors
        await actors.publish()
        with self._tracer.span("evaluate", step=self.step):
            record = await self._evaluator.evaluate(
                actors.fleet.evaluators,
                step=self.step,
                policy_version=actors.learner.policy_version,
            )
        self._recorder.evaluation(record)

    async def _evaluate_beside_training(self) -> None:
        """With a single actor, or engines that sleep in a step, nobody is free, so the run waits."""
        if self._side_evaluation is None:
            return
        actors = self._actors
        if len(actors.fleet.actors) < MIN_ACTORS_TO_LEND or self._config.engines_sleep:
            await self._evaluate()
            return
        await actors.publish()
        await self._side_evaluation.start(
            step=self.step, policy_version=actors.learner.policy_version
        )

    async def finish_checkpoint(self) -> None:
        """Of a run that failed otherwise: the checkpoint in flight is still worth having."""
        if self._saver is not None:
            try:
                await self._saver.wait()
            except Exception as error:
                logger.warning("the checkpoint in flight is lost: %s", summary(error))

    async def _restore(self, latest: Checkpoint) -> None:
        learner = self._actors.learner
        await learner.restore(latest.folder)
        await self._actors.replay.load.remote(str(latest.folder / "replay"))
        self.step = latest.step
        self._recorder.rewind(self.step)
        logger.info("restored step %d, policy version %d", self.step, learner.policy_version)

    async def _roll_back(self, error: LearnerDied) -> None:
        """Learner, ledger and buffer go back to one cut; engines are set to its version.

        A learner that dies again meanwhile is restarted again, as often as is allowed in all.
        """
        await self._finish_report()
        if self._saver is not None:
            await self._saver.cancel()
        if self._side_evaluation is not None:
            await self._side_evaluation.cancel()
        while True:
            latest = await self._restart_point(error)
            try:
                await self._actors.restart_learner()
                await self._restore(latest)
                return await self._actors.push_restored()
            except LearnerDied as again:
                error = again

    async def _restart_point(self, error: LearnerDied) -> Checkpoint:
        """Counts a restart. Raises `LearnerDied` where none is left, or no checkpoint."""
        self._num_learner_restarts += 1
        latest = await asyncio.to_thread(find_latest, self._folder / "checkpoints")
        if self._num_learner_restarts > self._config.run.max_learner_restarts or latest is None:
            why = (
                "there is no whole checkpoint"
                if latest is None
                else "run.max_learner_restarts is used up"
            )
            raise LearnerDied(f"the learner died at step {self.step} and {why}: {error}") from error
        logger.warning("the learner died at step %d, rolling back: %s", self.step, error)
        return latest
