"""Recovery of a run whose learner or replay actor died: learner, ledger, buffer and records roll back to one
checkpoint, or to the start of the run where none was written.

Waits for new processes, for their state, and for its weights to reach the engines, each limited by the
watchdog.
"""

import asyncio
import logging
from pathlib import Path

from raylearner.config.schema import RunConfig
from raylearner.errors import LearnerDied, ReplayDied, summary
from raylearner.learner.checkpoint.directory import Checkpoint, find_latest, find_newest
from raylearner.observability.recorder import Recorder
from raylearner.run.restarts import RestartBudget
from raylearner.run.roles import Roles
from raylearner.run.run_actors import RunActors
from raylearner.run.watchdog import Watchdog, publish_limit_s, start_limit_s

logger = logging.getLogger(__name__)

Death = LearnerDied | ReplayDied


class Recovery:
    """Restores a run, at most `run.max_learner_restarts` times within `run.restart_window_s`."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        recorder: Recorder,
        *,
        actors: RunActors,
        roles: Roles,
        watchdog: Watchdog,
    ) -> None:
        """`folder` is the run directory."""
        self._config = config
        self._checkpoints = folder / "checkpoints"
        self._recorder = recorder
        self._actors = actors
        self._roles = roles
        self._watchdog = watchdog
        self._budget = RestartBudget(config.run.max_learner_restarts, config.run.restart_window_s)

    async def restore(self, latest: Checkpoint) -> int:
        """Restore a checkpoint in processes that have just started; return its step."""
        await self._watchdog.wait(
            "restoring the learner",
            self._actors.learner.restore(latest.folder),
            roles=[self._roles.learner],
            limit_s=start_limit_s(self._config),
        )
        return await self._restore_replay(latest)

    async def roll_back(self, error: Death, *, step: int) -> int:
        """Replace what died, restore the last checkpoint, and publish its version to the engines.

        Returns its step: 0, with the initial policy, where there is no checkpoint. What dies meanwhile
        is replaced too. Raises the last death where no restart is left.
        """
        limit_s = start_limit_s(self._config)
        while True:
            latest = await self._restart_point(error, step)
            try:
                if isinstance(error, ReplayDied):
                    self._actors.restart_replay()
                await self._watchdog.wait(
                    "restarting the learner",
                    self._actors.restart_learner(),
                    roles=[self._roles.learner],
                    limit_s=2 * limit_s,
                )
                restored = await (
                    self._restore_replay(None) if latest is None else self.restore(latest)
                )
                await self._watchdog.wait(
                    "publishing the restored weights",
                    self._actors.publish_restored(),
                    roles=[self._roles.learner],
                    limit_s=publish_limit_s(self._config),
                )
                return restored
            except (LearnerDied, ReplayDied) as again:
                error = again

    async def _restore_replay(self, latest: Checkpoint | None) -> int:
        await self._watchdog.wait(
            "restoring the replay",
            self._actors.load_replay(None if latest is None else latest.folder),
            roles=[self._roles.replay],
            limit_s=start_limit_s(self._config),
        )
        step = 0 if latest is None else latest.step
        self._recorder.rewind(step)
        version = self._actors.learner.policy_version
        logger.info("restored step %d, policy version %d", step, version)
        return step

    async def _restart_point(self, error: Death, step: int) -> Checkpoint | None:
        """Count a restart, and pause before one of several in a row. Raises the death where none is
        left, or all checkpoints are damaged."""
        budget, who = self._budget, "replay actor" if isinstance(error, ReplayDied) else "learner"
        number = budget.count()
        if budget.is_used_up:
            raise type(error)(
                f"the {who} died at step {step} and run.max_learner_restarts={budget.limit} within"
                f" {budget.window_s:g} s (run.restart_window_s) is used up: {error}"
            ) from error
        # Sizes alone: this run wrote the files, and hashing large ones takes minutes.
        latest = await asyncio.to_thread(find_latest, self._checkpoints, should_hash=False)
        if latest is None and find_newest(self._checkpoints) is not None:
            raise type(error)(
                f"the {who} died at step {step}, and every checkpoint in {self._checkpoints} is damaged:"
                f" {error}"
            ) from error
        logger.warning(
            "the %s died at step %d and is replaced, restart %d of %d within %g s; the run rolls back"
            " to step %d: %s",
            *(who, step, number, budget.limit, budget.window_s),
            0 if latest is None else latest.step,
            summary(error),
        )
        await asyncio.sleep(budget.backoff_s())
        return latest
