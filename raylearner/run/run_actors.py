"""Every actor of a run, started together and ended in order, and the weights on their way to engines.

Consumes policy versions from the controller; produces engines that hold them. Waits for actors to
start, each bounded by its own limit, and for pushes, bounded by `weights.deadline_s`.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raylearner.actors.reward_actor import RewardActors
from raylearner.cleanup import clean_up
from raylearner.config.schema import RunConfig
from raylearner.errors import WeightTransferError
from raylearner.learner.learner_group import LearnerGroup
from raylearner.learner.spec import LearnerSpec
from raylearner.observability.spans import Tracer
from raylearner.run.fleet import RolloutFleet
from raylearner.run.model import RunModel
from raylearner.run.placement import Colocation, RankPlaces
from raylearner.run.replay_process import ReplayProcess
from raylearner.run.start_view import follow
from raylearner.run.watchdog import Watchdog, start_limit_s
from raylearner.types import PolicyVersion, Prompt
from raylearner.weights.publisher import Publisher
from raylearner.weights.push import Receive
from raylearner.weights.transports import transport_of

logger = logging.getLogger(__name__)


class RunActors:
    """Owns replay, rewards, learner and engines, all started; `close` leaves none of their processes.

    Made by `start`. Learner and engines are connected only by the publisher.
    """

    def __init__(
        self,
        config: RunConfig,
        training: list[Prompt],
        *,
        folder: Path,
        model: RunModel,
        tracer: Tracer,
        places: RankPlaces | None,
    ) -> None:
        """`folder` is the run's directory."""
        self._config = config
        self._tracer = tracer
        self._places = places
        colocation = places if isinstance(places, Colocation) else None
        self._is_closed = False
        self._rewards = RewardActors(config.run.name, config.rewards)
        self._replay = ReplayProcess(
            config, training, folder=folder, group_rewards=self._rewards.groups
        )
        spec = LearnerSpec.of_run(config, model_path=model.path, run_dir=folder)
        self.learner = (
            LearnerGroup(spec, ray_options=None if places is None else places.rank_options())
            if colocation is None
            else LearnerGroup(
                spec, ray_options=colocation.rank_options(), rank_of=colocation.rank_of
            )
        )
        self.fleet = RolloutFleet(
            config=config,
            model=model,
            replay=self.replay,
            on_loss=self._forget,
            on_join=self._admit,
            colocation=colocation,
            folder=folder,
        )
        self.publisher = self._make_publisher()

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        training: list[Prompt],
        *,
        folder: Path,
        model: RunModel,
        watchdog: Watchdog,
        tracer: Tracer,
        on_wait: Callable[[Sequence[str]], None],
    ) -> "RunActors":
        """Start everything at once, and raise the first failure, after which nothing is left.

        Processes import their libraries while the model is made, and load it then. `on_wait` receives what
        is waited for, a line each.
        """
        actors: RunActors | None = None
        following: asyncio.Task[None] | None = None
        try:
            actors = cls(
                config,
                training,
                folder=folder,
                model=model,
                tracer=tracer,
                places=await _reserve(config),
            )
            groups = {"engines": actors.fleet, "learner ranks": actors.learner}
            following = asyncio.create_task(follow(model, groups, on_wait))
            limit_s = start_limit_s(config)
            await asyncio.gather(
                model.made(),
                watchdog.wait("starting reward models", actors._rewards.start(), limit_s=limit_s),
                watchdog.wait(
                    "starting learner ranks",
                    actors.learner.start(model=model.made()),
                    limit_s=limit_s,
                    progress=lambda: model.is_made,  # which has a limit of its own
                ),
                actors.fleet.start(),  # has its own limit
            )
        except BaseException:
            await model.close()
            if actors is not None:
                await actors.close()
            raise
        finally:
            if following is not None:
                following.cancel()
        return actors

    async def close(self) -> None:
        """End every actor and everything it started, even where another fails. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        await clean_up(
            sys.exception(),
            self.publisher.close,  # first, since a push to engines that end would fail
            self.fleet.stop,
            self.learner.close,
            self._replay.close,
            self._rewards.close,
            *([] if self._places is None else [self._places.release]),
        )

    @property
    def replay(self) -> Any:
        """Handle of the replay actor, which is replaced where it dies."""
        return self._replay.actor

    def restart_replay(self) -> None:
        """Replace a dead replay actor; rollout actors claim from the new one after `load_replay`."""
        self._replay.replace()

    async def load_replay(self, checkpoint: Path | None) -> None:
        """Restore ledger and buffer of a checkpoint, or of the start. Raises `ReplayDied`."""
        await self._replay.load(checkpoint)
        await self.fleet.use_replay(self.replay)

    async def restart_learner(self) -> None:
        """Replace a dead learner by ranks with the initial policy; end running episodes and pushes."""
        await self.publisher.break_off()
        await self.learner.restart()
        await self.fleet.abort()

    async def publish_restored(self) -> None:
        """Publish the restored version to every engine, even if theirs is newer."""
        self.publisher = self._make_publisher(is_first=False)
        self._add_engines()
        await self.publish()

    def check(self) -> None:
        """Raise what ended a push in the background, and `LearnerDied` where no rank runs."""
        self.publisher.raise_failure()
        self.learner.check()

    async def publish(self) -> None:
        """Publish the learner's version; return once every engine has it or failed."""
        await self.publisher.publish(self.learner.policy_version)

    def start_publishing(self, policy_version: PolicyVersion) -> None:
        """Start a push, which lands while the next batch is being taken and packed; it wakes engines."""
        is_new = policy_version != self.publisher.policy_version
        is_due = policy_version % self._config.weights.every_steps == 0
        if (is_new and is_due) or self._config.engines_sleep:
            self.publisher.start(policy_version)

    async def sleep_engines(self) -> None:
        """Put engines to sleep until the next push, where the learner needs their memory."""
        if self._config.engines_sleep:
            with self._tracer.span("sleep"):
                await self.fleet.sleep()

    async def publish_last(self) -> None:
        """Publish the last version to every engine and log that it was verified."""
        await self.publish()
        if self.publisher.policy_version != self.learner.policy_version:
            logger.warning("the last weights reached no engine; the learner's checkpoint has them")
            return
        logger.info(
            "every engine (%d) holds policy version %d, log-probability error %.1e",
            len(self.publisher.members),
            self.publisher.policy_version,
            self.publisher.metrics["weights/logprob_error"],
        )

    def lend(self, actor_id: str) -> None:
        """Keep weights from an engine until it is given back."""
        self.publisher.remove(actor_id)

    async def give_back(self, actor_id: str) -> None:
        try:
            await self._admit(actor_id, self.fleet.receiver(actor_id))
        except WeightTransferError as error:
            self.fleet.fail_push(actor_id, error)

    def _make_publisher(self, *, is_first: bool = True) -> Publisher:
        return Publisher(
            self.learner,
            on_failed=self.fleet.fail_push,
            deadline_s=self._config.weights.deadline_s,
            max_failed_pushes=self._config.weights.max_failed_pushes,
            is_first=is_first,
            tracer=self._tracer,
        )

    def _add_engines(self) -> None:
        for actor_id in self.fleet.actors:
            self.publisher.add(actor_id, self.fleet.receiver(actor_id))

    async def _forget(self, actor_id: str, *, is_failure: bool) -> None:
        if is_failure:
            self.publisher.remove(actor_id)
        else:
            await self.publisher.dismiss(actor_id)
        returned = await self.replay.fail_actor.remote(actor_id, is_failure=is_failure)
        logger.info("%d running samples of %s return to pending", returned, actor_id)

    async def _admit(self, actor_id: str, receive: Receive) -> None:
        """Bring the current weights to an engine; again where a rollback replaced the publisher."""
        publisher = None
        while publisher is not self.publisher:
            publisher = self.publisher
            await publisher.admit(actor_id, receive)


async def _reserve(config: RunConfig) -> RankPlaces | None:
    """Reserve places of learner ranks that share GPUs with engines, or that must outlive changes of the fleet."""
    if transport_of(config.weights.transport).shares_memory:
        return await Colocation.reserve(config)
    return await RankPlaces.reserve(config) if config.actors.is_elastic else None
