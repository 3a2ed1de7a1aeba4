"""The loop of a run: takes groups, steps the learner, publishes, reports, checkpoints, evaluates.

Consumes finished groups; produces policy versions. Waits for groups (unblocked by rollout actors)
and for the learner's step; the watchdog limits every wait.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from raylearner.cleanup import clean_up
from raylearner.config.schema import RunConfig
from raylearner.errors import LearnerDied, ReplayDied, RunStopped, causes, summary
from raylearner.learner.batch.pack import pack
from raylearner.learner.checkpoint.directory import Checkpoint
from raylearner.observability.lines import number_of
from raylearner.observability.recorder import Recorder
from raylearner.observability.spans import Tracer
from raylearner.run.checkpointing import CheckpointWriter
from raylearner.run.evaluation import Evaluations, HeldOutPrompts, make_evaluators
from raylearner.run.model import RunModel, model_path, prepare_model
from raylearner.run.recovery import Recovery
from raylearner.run.replay_process import asked
from raylearner.run.roles import Roles
from raylearner.run.run_actors import RunActors
from raylearner.run.step_reporter import StepReporter
from raylearner.run.stopping import stopped
from raylearner.run.taking import Taker
from raylearner.run.watchdog import (
    PATIENCE,
    Role,
    T,
    Watchdog,
    publish_limit_s,
    start_limit_s,
    unless_set,
)
from raylearner.types import Prompt

logger = logging.getLogger(__name__)

FIRST_STEP = "first learner step, which may compile"
CLOSE_TIMEOUT_S = 60.0
"""Maximum time for one part of the run to end at its close."""


class Controller:
    """Owns the loop of a run, its actors and its checkpoint in flight. Made by `start`; `run` ends it."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        held_out: list[HeldOutPrompts],
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
        self._watchdog = Watchdog(config.run.watchdog_s, step=lambda: self.step)
        self._roles = Roles.of_run(actors)
        self._taker = Taker(
            config,
            folder,
            recorder,
            actors=actors,
            roles=self._roles,
            watchdog=self._watchdog,
            tracer=tracer,
            stop=stop,
        )
        self._recovery = Recovery(
            config,
            folder,
            recorder,
            actors=actors,
            roles=self._roles,
            watchdog=self._watchdog,
        )
        self._has_begun = self._is_compiled = False
        self._reports = StepReporter(
            config, recorder, actors=actors, watchdog=self._watchdog, tracer=tracer
        )
        self._checkpoints = CheckpointWriter(
            config.run,
            folder / "checkpoints",
            actors=actors,
            watchdog=self._watchdog,
            roles=[self._roles.learner, self._roles.replay],
            tracer=tracer,
        )
        evaluators = make_evaluators(config, held_out, recorder.evaluation_trajectories)
        self._evaluations = (
            Evaluations(
                evaluators,
                actors=actors,
                can_lend=not config.engines_sleep,
                record=recorder.evaluation,
                tracer=tracer,
            )
            if evaluators
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
        held_out: list[HeldOutPrompts],
        *,
        latest: Checkpoint | None,
        stop: asyncio.Event,
    ) -> "Controller":
        """Start every actor, restore the checkpoint `latest` and publish the weights.

        `stop` ends the run at the next step boundary, after a checkpoint. Raises `RunStopped` immediately
        if it is set meanwhile, since starting takes minutes. Nothing is left behind on failure.
        """
        starting = cls._start(config, folder, recorder, training, held_out, latest, stop)
        controller = await unless_set(stop, starting)
        if controller is None or stop.is_set():
            if controller is not None:
                await controller.close()
            raise stopped(folder)
        return controller

    @classmethod
    async def _start(
        cls,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        training: list[Prompt],
        held_out: list[HeldOutPrompts],
        latest: Checkpoint | None,
        stop: asyncio.Event,
    ) -> "Controller":
        tracer = Tracer(track="controller", is_enabled=config.recorded.trace)
        watchdog = Watchdog(config.run.watchdog_s, step=lambda: latest.step if latest else 0)
        limit_s = start_limit_s(config)

        async def prepare() -> None:
            label = "preparing the model"
            preparing = prepare_model(config, folder, training, on_progress=model.report)
            with tracer.span(label):
                await watchdog.wait(label, preparing, limit_s=limit_s)

        model = RunModel(model_path(config, folder), making=prepare())
        ranks = number_of(config.learner.num_ranks, "learner rank")
        engines = number_of(config.actors.min_actors, "engine")
        with recorder.stage(f"starting {ranks} and {engines}") as stage:
            actors = await RunActors.start(
                config,
                training,
                folder=folder,
                model=model,
                watchdog=watchdog,
                tracer=tracer,
                on_wait=stage.wait_for,
            )
        controller = cls(
            config, folder, recorder, held_out, actors=actors, tracer=tracer, stop=stop
        )
        try:
            if latest is not None:
                with recorder.stage("restoring the last checkpoint"):
                    controller.step = await controller._recovery.restore(latest)
            with recorder.stage("publishing the first weights"):
                await controller._publish("first", actors.publish())
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
        watching = asyncio.create_task(self._watchdog.watch(self._roles.rollout), name="watchdog")
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    self._actors.fleet.play(tasks)
                    yield
                    with self._recorder.stage("ending all processes"):
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
            watching.cancel()
            await clean_up(sys.exception(), self.close)

    async def close(self) -> None:
        """End every actor and everything it started. Safe to call twice."""
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "the report of the last step": self._reports.finish,
            "the checkpoint in flight": self._checkpoints.cancel,
        }
        if self._evaluations is not None:
            parts["the evaluation in flight"] = self._evaluations.cancel
        parts["the actors"] = self._actors.close

        async def close(label: str) -> None:
            await self._wait(f"closing {label}", parts[label](), limit_s=CLOSE_TIMEOUT_S)

        await clean_up(
            sys.exception(),
            *(partial(close, label) for label in parts),
            lambda: self._recorder.spans(self._tracer.drain()),
        )

    # -- the loop ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train to the last step, then close. Raises `RunStopped` after a requested stop."""
        async with self._lifecycle():
            while not await self._finish():
                pass

    async def _finish(self) -> bool:
        """Evaluate a new run, make all steps and publish the last weights; return False after a rollback."""
        num_steps = self._config.run.num_steps
        try:
            section = self._config.evaluation
            if self.step == 0 and not self._has_begun and section and section.before_first_step:
                await self._evaluate()
            self._has_begun = True
            while self.step < num_steps:
                await self._make_step()
            await self._publish("last", self._actors.publish_last())
        except (LearnerDied, ReplayDied) as error:
            if self._checkpoints.completed < num_steps:
                await self._recover(error)
                return False
            logger.warning(
                "the run is complete with its last checkpoint; a failure after it is ignored: %s",
                summary(error),
            )
        return True

    async def _make_step(self) -> None:
        """Take groups, train, publish, report, and checkpoint or evaluate where that is due."""
        config, actors, learner = self._config, self._actors, self._actors.learner
        wait_started = time.monotonic()
        take = await self._taker.take(self.step + 1)
        if take is None:
            await self._stop()
        step_started, trained_version = time.monotonic(), learner.policy_version
        with self._tracer.span("pack"):
            batches = pack(
                take.groups,
                policy_version=trained_version,
                num_ranks=config.learner.num_data_ranks,
                max_tokens_per_micro_batch=config.learner.token_budget,
                num_mini_batches=config.learner.num_mini_batches,
                should_mask_truncated=config.learner.mask_truncated,
                shares_prefixes=learner.shares_prefixes,
            )
        # A stuck engine is ended at the limit, by its own watch.
        sleep_limit_s = 2 * self._watchdog.limit_s
        await self._wait("putting engines to sleep", actors.sleep_engines(), limit_s=sleep_limit_s)
        # The first step after a start compiles.
        limit_s = self._watchdog.limit_s * (1.0 if self._is_compiled else PATIENCE)
        first = nullcontext() if self._is_compiled else self._recorder.stage(FIRST_STEP)
        with self._tracer.span("step", step=self.step + 1), first:
            output = await self._wait(
                "the learner's step", learner.step(batches), self._roles.learner, limit_s=limit_s
            )
        self._is_compiled = True
        group_ids = [group.group_id for group in take.groups]
        await self._wait(
            "the replay actor's commit",
            asked(actors.replay.commit.remote(group_ids, output.policy_version)),
            self._roles.replay,
        )
        self.step += 1
        actors.start_publishing(output.policy_version)
        wait_s = step_started - wait_started
        metrics = self._checkpoints.drain_metrics() | {
            "buffer/wait_s": wait_s,
            "learner/idle_fraction": wait_s / max(1e-9, time.monotonic() - wait_started),
        }
        await self._reports.start(self.step, take, output, metrics, trained_version=trained_version)
        await self._checkpoint_and_evaluate()

    async def _wait(
        self, label: str, call: Awaitable[T], *roles: Role, limit_s: float | None = None
    ) -> T:
        return await self._watchdog.wait(label, call, roles=roles, limit_s=limit_s)

    async def _publish(self, which: str, call: Awaitable[None]) -> None:
        label, limit_s = f"publishing the {which} weights", publish_limit_s(self._config)
        await self._wait(label, call, self._roles.learner, limit_s=limit_s)

    async def _checkpoint_and_evaluate(self) -> None:
        is_last = self.step >= self._config.run.num_steps
        if self._stop_requested.is_set() and not is_last:
            await self._stop()
        if is_last or self._checkpoints.is_due(self.step):
            await self._reports.wait()
            await self._checkpoints.start(self.step)
        if is_last:
            await self._checkpoints.complete(self.step)
        if is_last:
            await self._evaluate()
        elif self._evaluations is not None and self._evaluations.is_due(self.step):
            await self._unless_stopped(self._evaluations.start(self.step))

    async def _evaluate(self) -> None:
        if self._evaluations is not None:
            with self._recorder.stage("evaluating"):
                await self._unless_stopped(self._evaluations.run(self.step))

    async def _unless_stopped(self, evaluating: Coroutine[Any, Any, None]) -> None:
        """Await an evaluation, which a stop aborts."""

        async def evaluate() -> bool:
            await evaluating
            return True

        if not await unless_set(self._stop_requested, evaluate()):
            await self._stop()

    async def _stop(self) -> NoReturn:
        """Write a checkpoint of this step, unless there is one, and raise `RunStopped`."""
        await self._reports.wait()
        if self.step:
            await self._checkpoints.complete(self.step)
        raise stopped(self._folder)

    async def _finish_checkpoint(self) -> None:
        """Finish the checkpoint in flight of a run that failed otherwise."""
        try:
            await self._checkpoints.wait()
        except Exception as error:
            logger.warning("the checkpoint in flight is lost: %s", summary(error))

    async def _recover(self, error: LearnerDied | ReplayDied) -> None:
        """Go back to the last checkpoint, or to the start of the run. A stop ends the run at once: what there
        is to keep is on disk.
        """
        await self._reports.finish()
        await self._checkpoints.cancel()
        if self._evaluations is not None:
            await self._evaluations.cancel()
        self._is_compiled = False
        rolling_back = self._recovery.roll_back(error, step=self.step)
        step = await unless_set(self._stop_requested, rolling_back)
        if step is None:
            raise stopped(self._folder)
        self.step = step
