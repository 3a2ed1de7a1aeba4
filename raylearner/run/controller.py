"""The loop of a run: takes groups, steps the learner, publishes, reports, checkpoints, evaluates.

Consumes finished groups; produces policy versions. Waits for groups (unblocked by rollout actors)
and for the learner's step. Without progress for `run.watchdog_s` the run ends, and the message names
what waits for what.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from raylearner.cleanup import clean_up
from raylearner.config.schema import RunConfig
from raylearner.errors import LearnerDied, RunStopped, TooManyFailures, causes, summary
from raylearner.learner.batch.pack import pack
from raylearner.learner.checkpoint.directory import Checkpoint, find_latest
from raylearner.observability.recorder import Recorder
from raylearner.observability.spans import Tracer
from raylearner.replay.buffer import Take
from raylearner.run import placement
from raylearner.run.checkpointing import CheckpointWriter
from raylearner.run.evaluation import Evaluations, Evaluator
from raylearner.run.run_actors import RunActors, prepare_model
from raylearner.run.step_reporter import StepReporter
from raylearner.run.watchdog import T, describe_stall, in_time, unless_set
from raylearner.types import Prompt

logger = logging.getLogger(__name__)

TAKE_POLL_S = 5.0
"""Maximum wait of one take call before the watchdog checks progress."""


class Controller:
    """Owns the loop of a run, its actors and its checkpoint in flight. Made by `start`; `run` ends it."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        held_out: list[Prompt],
        *,
        actors: RunActors,
        tracer: Tracer,
        stop: asyncio.Event,
    ) -> None:
        self._config = config
        self._folder = folder
        self._recorder = recorder
        self._actors = actors
        self._tracer = tracer
        self._stop_requested = stop
        self._num_learner_restarts = 0
        self._reports = StepReporter(config, recorder, actors=actors, tracer=tracer)
        self._checkpoints = CheckpointWriter(
            folder / "checkpoints",
            learner=actors.learner,
            replay=actors.replay,
            keep_last=config.run.keep_last,
            should_defer=config.run.checkpoint_async,
            tracer=tracer,
        )
        self._evaluations = (
            Evaluations(
                Evaluator(
                    config.evaluation,
                    held_out,
                    failed_reward=config.rewards.reported_failed_reward,
                ),
                actors=actors,
                can_lend=not config.engines_sleep,
                record=recorder.evaluation,
                tracer=tracer,
            )
            if held_out and config.evaluation is not None
            else None
        )
        self.step = 0

    # -- starting and ending -------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        training: list[Prompt],
        held_out: list[Prompt],
        *,
        latest: Checkpoint | None,
        stop: asyncio.Event,
    ) -> "Controller":
        """Start every actor, restore the checkpoint `latest` and publish the weights.

        `stop` ends the run at the next step boundary, after a checkpoint. Raises `RunStopped` at once
        where it is set meanwhile, since starting takes minutes. Nothing is left behind on failure.
        """
        starting = cls._start(config, folder, recorder, training, held_out, latest, stop)
        controller = await unless_set(stop, starting)
        if controller is None or stop.is_set():
            if controller is not None:
                await controller.close()
            raise RunStopped(_stop_message(folder, 0 if latest is None else latest.step))
        return controller

    @classmethod
    async def _start(
        cls,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        training: list[Prompt],
        held_out: list[Prompt],
        latest: Checkpoint | None,
        stop: asyncio.Event,
    ) -> "Controller":
        tracer = Tracer(track="controller", is_enabled=config.observability.trace)
        with recorder.stage("preparing the model"):
            model_path = await prepare_model(config, folder, training)
        with recorder.stage(
            f"starting {config.learner.num_ranks} learner ranks and"
            f" {config.actors.min_actors} engines"
        ):
            actors = await RunActors.start(
                config, training, folder=folder, model_path=model_path, tracer=tracer
            )
        controller = cls(
            config, folder, recorder, held_out, actors=actors, tracer=tracer, stop=stop
        )
        try:
            if latest is not None:
                with recorder.stage("restoring the last checkpoint"):
                    await controller._restore(latest)
            with recorder.stage("publishing the first weights"):
                await actors.publish()
        except BaseException:
            await clean_up(sys.exception(), controller.close)
            raise
        return controller

    @asynccontextmanager
    async def _lifecycle(self) -> AsyncGenerator[None]:
        """Watch the rollout actors during the block, and close everything after it.

        Raises the first cause of a failure.
        """
        first: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    self._actors.fleet.play(tasks)
                    yield
                    await self.close()
                except Exception as error:
                    task = asyncio.current_task()
                    # If a task of the group had failed before, it would have cancelled this one.
                    first = error if task is not None and not task.cancelling() else None
                    raise
        except ExceptionGroup as group:
            cause = next(causes(first or group))
            if not isinstance(cause, RunStopped):
                logger.error("the run ended at step %d: %s", self.step, summary(cause))
                await self._finish_checkpoint()
            raise cause from cause.__cause__
        finally:
            logger.info("ended at step %d; run directory: %s", self.step, self._folder)
            await clean_up(sys.exception(), self.close)

    async def close(self) -> None:
        """End every actor and everything it started. Safe to call twice."""
        await clean_up(
            sys.exception(),
            self._reports.finish,
            *([] if self._evaluations is None else [self._evaluations.cancel]),
            self._checkpoints.cancel,
            self._actors.close,
            lambda: self._recorder.spans(self._tracer.drain()),
        )

    # -- the loop ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step, then close. Raises `RunStopped` after a requested stop."""
        async with self._lifecycle():
            if self.step == 0:
                await self._evaluate()
            while self.step < self._config.run.num_steps:
                try:
                    await self._make_step()
                except LearnerDied as error:
                    await self._roll_back(error)
            await self._actors.publish_last()

    async def _make_step(self) -> None:
        """Take groups, train, publish, report, and checkpoint or evaluate where that is due."""
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
        await actors.sleep_engines()
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
        await self._reports.start(self.step, take, output, metrics, trained_version=trained_version)
        await self._checkpoint_and_evaluate()

    async def _take(self) -> Take:
        """Return the next groups. Raises `StalledError` without progress for `watchdog_s`, and
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
                # A take without groups returns after its own timeout.
                take = await self._in_time(taking, "the replay actor's take", beyond_s=TAKE_POLL_S)
                if take is not None:
                    return take
                if self._stop_requested.is_set():
                    await self._stop()
                now = time.monotonic()
                current = await self._in_time(
                    placement.answer(actors.replay.progress.remote()), "the replay actor's progress"
                )
                if current != progress:
                    progress, changed_at = current, now
                elif actors.fleet.waits_for_resources:
                    changed_at = now
                elif now - changed_at > config.run.watchdog_s:
                    folder, idle_s = self._folder / "stalled", now - changed_at
                    raise await describe_stall(actors.replay, folder, idle_s=idle_s, step=self.step)

    async def _in_time(self, call: Awaitable[T], what: str, *, beyond_s: float = 0.0) -> T:
        limit_s = self._config.run.watchdog_s + beyond_s
        return await in_time(call, what, limit_s=limit_s, step=self.step)

    def _step_metrics(
        self, take: Take, output: Any, *, wait_s: float, since: float
    ) -> dict[str, float]:
        """Return the metrics that are known before the rollout actors report."""
        actors = self._actors
        metrics = take.metrics | output.metrics | dict(actors.publisher.metrics)
        metrics |= self._checkpoints.drain_metrics()
        return metrics | {
            "policy_version": float(output.policy_version),
            "rollout/actors": float(len(actors.fleet.actors)),
            "rollout/restarts": float(actors.fleet.num_restarts),
            "buffer/wait_s": wait_s,
            "learner/idle_fraction": wait_s / max(1e-9, time.monotonic() - since),
        }

    async def _checkpoint_and_evaluate(self) -> None:
        run, is_last = self._config.run, self.step >= self._config.run.num_steps
        is_stopping, every = self._stop_requested.is_set(), run.checkpoint_every_steps
        if is_last or is_stopping or (every and self.step % every == 0):
            await self._reports.wait()
            await self._checkpoints.start(self.step)
        if is_last:
            await self._checkpoints.wait()
        if is_stopping and not is_last:
            await self._stop()
        section = self._config.evaluation
        every = 0 if section is None else section.every_steps
        if is_last:
            await self._evaluate()
        elif self._evaluations is not None and every and self.step % every == 0:
            await self._evaluations.start(self.step)

    async def _evaluate(self) -> None:
        if self._evaluations is not None:
            await self._evaluations.run(self.step)

    async def _stop(self) -> None:
        """Write a checkpoint of this step, unless there is one, and raise `RunStopped`."""
        await self._reports.wait()
        if self.step and self._checkpoints.step != self.step:
            await self._checkpoints.start(self.step)
        await self._checkpoints.wait()
        raise RunStopped(_stop_message(self._folder, self.step))

    async def _finish_checkpoint(self) -> None:
        """Finish the checkpoint in flight of a run that failed otherwise."""
        try:
            await self._checkpoints.wait()
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
        """Restore learner, ledger and buffer from one checkpoint, and publish its version to engines.

        A learner that dies again meanwhile is restarted again, up to `run.max_learner_restarts` in all.
        """
        await self._reports.finish()
        await self._checkpoints.cancel()
        if self._evaluations is not None:
            await self._evaluations.cancel()
        while True:
            latest = await self._restart_point(error)
            try:
                await self._actors.restart_learner()
                await self._restore(latest)
                return await self._actors.publish_restored()
            except LearnerDied as again:
                error = again

    async def _restart_point(self, error: LearnerDied) -> Checkpoint:
        """Count a restart. Raises `LearnerDied` where none is left, or there is no checkpoint."""
        self._num_learner_restarts += 1
        latest = await asyncio.to_thread(find_latest, self._folder / "checkpoints")
        if self._num_learner_restarts > self._config.run.max_learner_restarts or latest is None:
            reason = (
                "there is no complete checkpoint"
                if latest is None
                else "run.max_learner_restarts is used up"
            )
            raise LearnerDied(
                f"the learner died at step {self.step} and {reason}: {error}"
            ) from error
        logger.warning("the learner died at step %d, rolling back: %s", self.step, error)
        return latest


def _stop_message(folder: Path, step: int) -> str:
    if step:
        return f"stopped on request at step {step}; resume with --resume {folder}"
    return (
        f"stopped on request before the first step: {folder} holds no checkpoint; start again in"
        " another run.dir"
    )
