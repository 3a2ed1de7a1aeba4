"""Reports of steps, collected and written during the next step.

Waits for rollout actors and learner ranks, which answer late under load, each within its own limit.
"""

import asyncio
import logging
from typing import Any

from raylearner.config.schema import RunConfig
from raylearner.errors import summary
from raylearner.observability.action_watch import ActionWatch
from raylearner.observability.group_watch import GroupWatch
from raylearner.observability.health_watch import HealthWatch
from raylearner.observability.recorder import Recorder
from raylearner.observability.rollout_metrics import rollout_metrics
from raylearner.observability.spans import Tracer
from raylearner.replay.buffer import Take
from raylearner.run.run_actors import RunActors
from raylearner.run.watchdog import Watchdog
from raylearner.types import PolicyVersion

logger = logging.getLogger(__name__)

ACTORS_TIMEOUT_S = 30.0
"""Time for rollout actors and ranks that answer late, or not at all."""


class StepReporter:
    """Owns the report in flight. Its failure is raised by the next call."""

    def __init__(
        self,
        config: RunConfig,
        recorder: Recorder,
        *,
        actors: RunActors,
        watchdog: Watchdog,
        tracer: Tracer,
    ) -> None:
        self._recorder = recorder
        self._actors = actors
        self._watchdog = watchdog
        self._tracer = tracer
        self._failed_reward = config.rewards.reported_failed_reward
        self._action_watch = ActionWatch(config.environment, max_steps=config.run.num_steps)
        self._group_watch = GroupWatch(config.replay)
        self._health_watch = HealthWatch(config.replay, config.weights)
        self._running: asyncio.Task[None] | None = None

    async def start(
        self,
        step: int,
        take: Take,
        output: Any,
        metrics: dict[str, float],
        *,
        trained_version: PolicyVersion,
    ) -> None:
        """Start the report of a step, after the one in flight.

        `output` is the learner's, and `trained_version` the policy version before the step. `metrics`
        are those of the controller.
        """
        metrics = {
            **take.metrics,
            **output.metrics,
            **self._actors.publisher.metrics,
            **metrics,
            "policy_version": float(output.policy_version),
            "rollout/actors": float(len(self._actors.fleet.actors)),
            "rollout/restarts": float(self._actors.fleet.num_restarts),
        }
        await self.wait()
        self._running = asyncio.create_task(
            self._report(step, take, output, metrics, trained_version), name="report"
        )

    async def wait(self) -> None:
        """Wait until the last step is recorded."""
        if self._running is not None:
            # A cancelled loop does not cancel the report, which `finish` waits for.
            await self._watchdog.wait(
                "recording the last step",
                asyncio.shield(self._running),
                limit_s=self._watchdog.limit_s + ACTORS_TIMEOUT_S,
            )
            self._running = None

    async def finish(self) -> None:
        """Wait for the report of a run that failed otherwise; a failure of the report is logged."""
        try:
            await self.wait()
        except Exception as error:
            self._running = None
            logger.warning("the last step is not completely recorded: %s", summary(error))

    async def _report(
        self,
        step: int,
        take: Take,
        output: Any,
        metrics: dict[str, float],
        trained_version: PolicyVersion,
    ) -> None:
        recorder = self._recorder
        (activities, rollout_spans), learner_spans = await asyncio.gather(
            self._actors.fleet.drain(), self._actors.learner.drain_spans()
        )
        recorder.spans([*rollout_spans, *learner_spans, *self._tracer.drain()])
        rollout = rollout_metrics(take.groups, activities, failed_reward=self._failed_reward)
        recorder.failures(step, take.failures)
        recorder.step(step, rollout | metrics)
        self._health_watch.look(rollout | metrics | {"step": float(step)})
        self._action_watch.look(take.groups)
        self._group_watch.look(metrics)
        await asyncio.to_thread(
            recorder.trajectories,
            step,
            [t for group in take.groups for t in group.trajectories],
            policy_version=trained_version,
            advantages=output.advantages,
            learner_logprobs=output.logprobs,
        )
