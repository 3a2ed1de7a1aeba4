"""Slots of a fleet: each keeps one rollout actor alive.

The task of a slot waits for resources, starts an actor and its engine, brings it the current weights and
lets it play; when it ends, the task returns its samples, counts, waits, and starts over. The other slots
continue meanwhile.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from raylearner.config.schema import RunConfig
from raylearner.deaths import is_death
from raylearner.errors import (
    EngineError,
    EngineLost,
    LearnerDied,
    PushBroken,
    RaylearnerError,
    WeightTransferError,
    summary,
)
from raylearner.observability.lines import number_of
from raylearner.run.launching import ActorLauncher, is_end, lost_nodes
from raylearner.run.placement import Colocation, answer
from raylearner.run.restarts import ROW_S, RestartBudget, backoff_s
from raylearner.run.slot import Slot, Stage
from raylearner.weights.push import Receive
from raylearner.weights.update import WeightReceipt, WeightUpdate

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
"""Maximum time for an actor to end its episodes, and then its engine, before it is killed."""
RETRY_S = 1.0
"""Pause before an actor tries again what failed since another process died."""
NODE_REPORT_S, NODE_POLL_S = 30.0, 2.0
"""Maximum time until Ray reports a lost node, and interval between looks at its report."""
UNPLACED_NOTICE_S = 5.0
"""Wait for a node after which it is logged that actors wait for resources."""

OnJoin = Callable[[str, Receive], Awaitable[None]]


class OnLoss(Protocol):
    """Return the samples of an actor that is gone, and take it out of the publisher."""

    async def __call__(self, actor_id: str, *, is_failure: bool) -> None: ...


class Slots:
    """Owns the slots and their actors."""

    def __init__(
        self,
        config: RunConfig,
        launcher: ActorLauncher,
        *,
        on_loss: OnLoss,
        on_join: OnJoin,
        colocation: Colocation | None,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._colocation = colocation
        self._on_loss = on_loss
        self._on_join = on_join
        self._budget = RestartBudget(config.actors.max_restarts, config.run.restart_window_s)
        self._slots: list[Slot] = []
        self._num_started = self.num_restarts = 0
        self._not_at_fault: set[str] = set()
        self._has_started = self._is_stopping = self._has_logged_unplaced = False
        self._may_play = asyncio.Event()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self.actors: dict[str, Any] = {}
        """Handles of the actors that joined, oldest first."""

    async def start(self, num_slots: int) -> None:
        """Start all slots at once; return when their actors have joined.

        Raises `EngineError` with the first cause where an engine refuses to start or takes too long;
        one whose process was killed is started again.
        """
        self.add(num_slots)
        await self._wait_until(lambda: len(self.actors) >= num_slots)
        self._has_started = True

    async def play(self) -> None:
        """Let all actors play, until `stop`. Raises the failure that ends the run."""
        self._may_play.set()
        await self._wait_until(lambda: self._is_stopping)

    async def stop(self) -> None:
        """End every actor with its engine; those that do not end in time are killed."""
        self._is_stopping = True
        self._changed.set()
        actors = [slot.actor for slot in self._slots if slot.actor is not None]
        await asyncio.gather(*(self._stop(actor) for actor in actors))
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:  # those included that started meanwhile
            self._kill(slot)
        self._slots.clear()
        self.actors.clear()

    @property
    def kept(self) -> list[Slot]:
        """The slots that are not released."""
        return [slot for slot in self._slots if not slot.is_released]

    async def phases(self) -> list[str]:
        """Return what is awaited for each actor that has not joined yet."""
        absent = [slot for slot in self.kept if slot.stage is not Stage.PLAYING]
        starting = [self._launcher.phase(s.actor_id) for s in absent if s.stage is Stage.STARTING]
        others = [str(slot.stage) for slot in absent if slot.stage is not Stage.STARTING]
        return [*await asyncio.gather(*starting), *others]

    def add(self, num_slots: int) -> None:
        for _ in range(num_slots):
            slot = Slot()
            slot.task = asyncio.create_task(self._run_slot(slot), name="slot")
            self._slots.append(slot)

    def release(self, num_slots: int) -> None:
        """End the newest slots, those without a playing actor first; samples return to pending."""
        kept = sorted(self.kept, key=lambda slot: (slot.stage is Stage.PLAYING, -slot.joined_at_s))
        for slot in kept[: max(0, num_slots)]:
            slot.release.set()
            if slot.actor is None and slot.stage is not Stage.PLAYING and slot.task is not None:
                slot.task.cancel()

    async def use_replay(self, replay: Any) -> None:
        """Let every actor, those that start included, claim from this replay actor."""
        self._launcher.replay = replay
        actors = [slot.actor for slot in self._slots if slot.actor is not None]
        await asyncio.gather(*(self._launcher.connect(actor) for actor in actors))

    def excuse(self, actor_id: str) -> None:
        """Do not count the coming end of an actor as a failure."""
        self._not_at_fault.add(actor_id)

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        while self._failure is None and not is_reached():
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def _run_slot(self, slot: Slot) -> None:
        """Fill the slot until it is released; keep a failure that ends the run for the waiting caller."""
        try:
            while not slot.is_released:
                slot.actor_id = f"rollout-{self._num_started}"
                self._num_started += 1
                cause = await self._fill(slot)
                if self._is_stopping:
                    return
                await self._empty(slot, cause)
        except Exception as error:
            self._failure = self._failure or error
        finally:
            if not self._is_stopping:
                self._slots.remove(slot)
                self._kill(slot)
            self._changed.set()

    async def _fill(self, slot: Slot) -> Exception:
        """Start an actor and let it play; return why it ended."""

        def place(node: str) -> None:
            slot.stage, slot.node = Stage.STARTING, node
            if all(other.stage is not Stage.UNPLACED for other in self._slots):
                self._has_logged_unplaced = False

        slot.stage, slot.node = Stage.UNPLACED, ""
        notice = asyncio.get_running_loop().call_later(UNPLACED_NOTICE_S, self._log_unplaced)
        try:
            launched = await self._launcher.launch(
                slot.actor_id, on_placed=place, has_to_wait=self._has_started
            )
        except EngineError as error:
            if not self._has_started and not isinstance(error, EngineLost):
                raise
            return error
        finally:
            notice.cancel()
        logger.info("%s with %s runs as process %d", slot.actor_id, launched.engine, launched.pid)
        slot.actor = launched.actor
        try:
            await self._join(slot)
            await self._may_play.wait()
            await self._play(slot)
        except Exception as error:
            if not is_end(error) and not isinstance(error, WeightTransferError):
                raise
            return error
        return RaylearnerError("its loop ended after a failed weight push")

    async def _join(self, slot: Slot) -> None:
        """Bring the current weights to a new engine, after the restart of a learner that died."""
        await self._launcher.connect(slot.actor)
        while True:
            try:
                await self._on_join(slot.actor_id, receiver(slot.actor))
                break
            except LearnerDied as error:  # the controller rolls back meanwhile
                logger.warning(
                    "%s waits until the learner is restored: %s", slot.actor_id, summary(error)
                )
                await asyncio.sleep(RETRY_S)
        self.actors[slot.actor_id] = slot.actor
        slot.stage, slot.joined_at_s = Stage.PLAYING, time.monotonic()
        self._changed.set()

    async def _play(self, slot: Slot) -> None:
        """Return when the actor's loop ended, or had to, since the slot was released."""
        running = asyncio.ensure_future(self._run(slot))
        releasing = asyncio.ensure_future(slot.release.wait())
        try:
            await asyncio.wait([running, releasing], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.wait_for(answer(slot.actor.halt.remote()), STOP_TIMEOUT_S)
                await asyncio.wait([running], timeout=STOP_TIMEOUT_S)
            if running.done():
                running.result()
        except TimeoutError:
            logger.debug("%s did not end its episodes in time", slot.actor_id)
        finally:
            running.cancel()
            releasing.cancel()

    async def _run(self, slot: Slot) -> None:
        """Let an actor play; again where it failed since another process died, which is replaced."""
        level = logging.WARNING
        while True:
            try:
                return await slot.actor.run.remote()
            except RayTaskError as error:
                if not is_death(error):
                    raise
                text = (
                    "%s waits until the process that it called is replaced, retrying every %g s: %s"
                )
                logger.log(level, text, slot.actor_id, RETRY_S, summary(error))
                level = logging.DEBUG
            await asyncio.sleep(RETRY_S)
            await self._launcher.connect(slot.actor)  # it may not have heard of the present replay

    async def _empty(self, slot: Slot, cause: Exception) -> None:
        """Return the samples of an actor that ended, and count it as a failure where it was one.

        Raises `RaylearnerError` where no restart is left and no other slot can continue.
        """
        actor_id, has_played = slot.actor_id, slot.stage is Stage.PLAYING
        if slot.is_released:
            self.actors.pop(actor_id, None)
        else:
            self._kill(slot)
        try:
            await self._on_loss(actor_id, is_failure=not slot.is_released)
        except Exception as error:
            if not is_death(error):
                raise
            # The controller sees the death of the replay actor itself.
            logger.debug("the samples of %s were not returned: %s", actor_id, error)
        if slot.is_released:
            if slot.actor is not None:  # no push needs it any more
                await self._stop(slot.actor)
            self._kill(slot)
            logger.info(
                "%s ended as requested; %d rollout actors are playing", actor_id, len(self.actors)
            )
            return
        self.num_restarts += 1
        if has_played:
            self._log_too_few()
        is_at_fault = await self._is_at_fault(slot, cause)
        self._not_at_fault.discard(actor_id)
        is_new = has_played and time.monotonic() - slot.joined_at_s > ROW_S
        slot.num_in_row = 1 if is_new else slot.num_in_row + 1
        slot.stage = Stage.RESTING
        if is_at_fault:
            self._budget.count(slot.node)
        if is_at_fault and self._budget.is_used_up:
            await self._wait_for_budget(slot, cause)
            return
        pause_s = backoff_s(slot.num_in_row)
        logger.warning(
            "%s died and is replaced%s, %s: %s",
            *(actor_id, f" in {pause_s:g} s" if pause_s else ""),
            f"restart {self._budget.num_counted} of {self._budget.limit} within"
            f" {self._budget.window_s:g} s"
            if is_at_fault
            else "not counted as a restart",
            summary(cause),
        )
        await asyncio.sleep(pause_s)

    async def _wait_for_budget(self, slot: Slot, cause: Exception) -> None:
        """Wait until the window allows a restart, while others play. Raises where none can.

        Ray reports a lost node some seconds after the death of its actors, which then no longer count.
        """
        limit, window_s = self._budget.limit, self._budget.window_s
        slot.stage = Stage.GIVEN_UP
        used = (
            f"actors.max_restarts={limit} within {window_s:g} s (run.restart_window_s) is used up"
        )
        wait_s = self._budget.wait_s()
        logger.warning(
            "%s died and is not replaced%s, since %s; %d rollout actors are left: %s",
            *(slot.actor_id, f" for {wait_s:.0f} s" if math.isfinite(wait_s) else ""),
            *(used, len(self.actors), summary(cause)),
        )
        may_be_node = isinstance(cause, ActorUnavailableError)
        ends_at_s = time.monotonic() + (NODE_REPORT_S if may_be_node else 0.0)
        while self._budget.is_used_up:
            others = [other for other in self.kept if other.stage is not Stage.GIVEN_UP]
            if (not others or not self._has_started) and time.monotonic() >= ends_at_s:
                raise RaylearnerError(
                    f"{slot.actor_id} died, {used}, and no other rollout actor can continue; last cause:"
                    f" {summary(cause)}"
                )
            await asyncio.sleep(min(self._budget.wait_s(), NODE_POLL_S))
            self._budget.forgive(await asyncio.to_thread(lost_nodes))

    async def _is_at_fault(self, slot: Slot, cause: Exception) -> bool:
        """Return whether an end counts: not that of a node, or of a push that another broke."""
        if slot.actor_id in self._not_at_fault or isinstance(cause, PushBroken):
            return False
        return not slot.node or slot.node not in await asyncio.to_thread(lost_nodes)

    def _kill(self, slot: Slot) -> None:
        self.actors.pop(slot.actor_id, None)
        actor, slot.actor = slot.actor, None
        if actor is not None:
            ray.kill(actor)
        if self._colocation is not None:
            self._colocation.forget(slot.actor_id)

    def _log_unplaced(self) -> None:
        """Log once for all of them that actors wait for resources; the view of the start shows it before."""
        num_unplaced = sum(slot.stage is Stage.UNPLACED for slot in self._slots)
        if self._has_started and num_unplaced and not self._has_logged_unplaced:
            self._has_logged_unplaced = True
            logger.info(
                "waiting for places: %s of %s each; %d playing",
                number_of(num_unplaced, "rollout actor"),
                *(self._launcher.resources, len(self.actors)),
            )

    def _log_too_few(self) -> None:
        least, num_left = self._config.actors.min_actors, len(self.actors)
        if num_left == 0:
            logger.warning("no rollout actor is left; the run waits until one has started")
        elif num_left < least and self._config.actors.is_elastic:
            logger.warning(
                "%d of at least %d rollout actors are left (actors.num_actors.min); the run continues"
                " with these until others join",
                *(num_left, least),
            )

    async def _stop(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await actor.stop.remote()
        except Exception as error:
            if not is_end(error) and not isinstance(error, TimeoutError):
                raise
            logger.debug("an actor did not stop and was killed: %s", error)
        ray.kill(actor)


def receiver(actor: Any) -> Receive:
    """Return the call by which an actor receives weights."""

    async def receive(update: WeightUpdate) -> WeightReceipt:
        return await actor.receive.remote(update)

    return receive
