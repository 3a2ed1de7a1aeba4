"""Drives a run: starts everything, takes groups, steps the learner, publishes, reports, checkpoints.

Consumes finished groups; produces policy versions. Waits for groups (unblocked by rollout actors)
and for the learner's step; whoever makes no progress for `run.watchdog_s` is named and ends the run.
"""

import asyncio
import logging
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray

from raylearner import deadline, placement, resumption
from raylearner.actors.reward_actor import RewardActors
from raylearner.colocation import Colocation
from raylearner.config.schema import RunConfig, TinyModel
from raylearner.environments.catalogue import wait_for_services
from raylearner.errors import (
    CheckpointError,
    LearnerDied,
    RunStopped,
    StalledError,
    WeightTransferError,
)
from raylearner.evaluation import Evaluator, SideEvaluation
from raylearner.learner import checkpoint
from raylearner.learner.batch import pack
from raylearner.learner.checkpoint import Checkpoint
from raylearner.learner.learner_actor import LearnerGroup, Recording
from raylearner.observability import run_directory
from raylearner.observability.recorder import Recorder
from raylearner.observability.spans import Tracer
from raylearner.observability.step_report import step_metrics
from raylearner.placement import RolloutFleet
from raylearner.prompts import load_prompts
from raylearner.replay.replay_actor import ReplayActor, Take
from raylearner.replay.sampler import make_sampler
from raylearner.rewards.group_scorer import GroupScorer
from raylearner.rewards.scorer import Scorer
from raylearner.saving import Saver
from raylearner.tokenization.renderer import Renderer
from raylearner.types import Prompt
from raylearner.weights.publisher import Publisher, Receive

logger = logging.getLogger(__name__)

MIN_ACTORS_TO_LEND = 2
"""With fewer, evaluation would take the only one."""
TAKE_POLL_S = 5.0
"""How long one take call waits before the watchdog looks."""


def run(config: RunConfig, *, resume: Path | None = None, or_start_over: bool = False) -> None:
    """Trains to `run.num_steps`. Raises what ended it; every child process is gone on return.

    `resume` is the run directory to go on in; without a whole checkpoint there, `or_start_over` sets
    it aside, and `ConfigError` is raised otherwise.
    """
    training, held_out = _load_data(config)
    deadline.stop_time_s(config.run, os.environ)
    Scorer(config.rewards)
    GroupScorer(config.rewards)
    make_sampler(config.data.sampler, training, seed=config.run.seed, weights=config.data.weights)
    asyncio.run(wait_for_services(config.environment))
    if not isinstance(config.model, TinyModel):
        Renderer.from_pretrained(config.model.path, config.renderer)
    assert config.run.dir is not None, "the command line names a directory"
    folder = Path(config.run.dir).absolute()
    with ExitStack() as held:
        latest = None
        if resume is not None:
            latest = held.enter_context(resumption.taken_up(folder, or_start_over=or_start_over))
        placement.connect(config.cluster)
        held.callback(ray.shutdown)
        config = placement.resolve(config)
        placement.check_supply(config)
        if resume is None:
            held.enter_context(run_directory.claimed(folder, is_new=True))
        asyncio.run(_train(config, folder, training, held_out, latest=latest))


def _load_data(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    data = config.data
    load = partial(
        load_prompts,
        system_prompt=data.system_prompt,
        max_images=config.renderer.images.max_images,
    )
    return load(data.train), [] if data.evaluation is None else load(data.evaluation)


@ray.remote(num_cpus=1)
def _make_tiny_model(*arguments: Any) -> float | None:
    """In a process of its own, so that the driver never loads torch."""
    from raylearner.demonstrations import prepare_tiny_model

    return prepare_tiny_model(*arguments)


async def _train(
    config: RunConfig,
    folder: Path,
    training: list[Prompt],
    held_out: list[Prompt],
    *,
    latest: Checkpoint | None,
) -> None:
    """On from the checkpoint `latest`, or from the beginning."""
    recorder = Recorder.of_run(config, folder, num_steps=config.run.num_steps)
    controller = Controller(config, folder, recorder, training, held_out)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, controller.request_stop)
    stop_s = deadline.stop_time_s(config.run, os.environ)
    if stop_s is not None:
        loop.call_later(max(0.0, stop_s - time.time()), controller.request_stop)
    try:
        async with asyncio.TaskGroup() as tasks:
            await controller.start(tasks, latest=latest)
            await controller.train()
            await controller.close()
    except* Exception as group:
        if not isinstance(group.exceptions[0], RunStopped):
            logger.error("the run ended at step %d: %s", controller.step, group.exceptions[0])
            await controller.finish_checkpoint()
        raise group.exceptions[0] from group.exceptions[0].__cause__
    finally:
        await controller.close()
        recorder.close()


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
        self._evaluator = Evaluator(config.evaluation, held_out) if held_out else None
        self._side_evaluation: SideEvaluation | None = None
        self._tracer = Tracer(track="controller", is_enabled=config.observability.trace)
        self._stop_requested = asyncio.Event()
        self._is_closed = False
        self._num_learner_restarts = 0
        self._replay: Any = None
        self._rewards: RewardActors | None = None
        self._learner: LearnerGroup | None = None
        self._publisher: Publisher | None = None
        self._saver: Saver | None = None
        self._fleet: RolloutFleet | None = None
        self._colocation = Colocation(config) if config.weights.transport == "ipc" else None
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
        config = self._config
        with self._recorder.stage("preparing the model"):
            model_path = await self._prepare_model()
        if self._colocation is not None:
            await self._colocation.reserve()
        self._rewards = RewardActors(config.run.name, config.rewards)
        self._replay = ReplayActor.options(
            name=f"{config.run.name}/replay", num_cpus=0, max_concurrency=10_000
        ).remote(
            config.replay,
            self._training,
            config.run.seed,
            sampler=config.data.sampler,
            weights=config.data.weights,
            group_rewards=self._rewards.groups,
        )
        self._learner = LearnerGroup(
            config.learner,
            weights=config.weights,
            model_path=model_path,
            temperature=config.sampling.temperature,
            num_steps=config.run.num_steps,
            seed=config.run.seed,
            reward_weights=config.rewards.weights,
            dump_folder=self._folder / "skipped",
            run_name=config.run.name,
            recording=Recording(
                should_trace=config.observability.trace,
                profile=config.observability.profile,
                profile_folder=self._folder / "profile",
            ),
            engine_dtype=getattr(config.actors.engine, "dtype", "float32"),
            ranks_per_engine=getattr(config.actors.engine, "tensor_parallel_size", 1),
            ray_options=None if self._colocation is None else self._colocation.rank_options(),
            rank_of=None if self._colocation is None else self._colocation.rank_of,
            should_free_memory=config.engines_sleep,
        )
        self._saver = Saver(
            self._folder / "checkpoints",
            learner=self._learner,
            replay=self._replay,
            keep_last=config.run.keep_last,
            should_defer=config.run.should_checkpoint_async,
            tracer=self._tracer,
        )
        self._fleet = RolloutFleet(
            config=config.actors,
            sections=placement.rollout_sections(config),
            model_path=model_path,
            replay=self._replay,
            on_loss=self._forget_actor,
            on_join=self._admit_actor,
            colocation=self._colocation,
        )
        with self._recorder.stage(
            f"starting {config.learner.num_ranks} learner ranks and"
            f" {config.actors.num_actors} engines"
        ):
            await asyncio.gather(self._rewards.start(), self._learner.start(), self._fleet.start())
        self._make_publisher()
        if self._evaluator is not None:
            self._side_evaluation = SideEvaluation(
                self._evaluator,
                actors=self._fleet.evaluators,
                lend=self._lend_actor,
                give_back=self._take_back_actor,
                record=self._recorder.evaluation,
            )
        if latest is not None:
            with self._recorder.stage("restoring the last checkpoint"):
                await self._restore(self._learner, latest)
        with self._recorder.stage("publishing the first weights"):
            await self._publish()
        self._fleet.play(tasks)

    async def close(self) -> None:
        """Ends every actor and what it started. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._side_evaluation is not None:
            await self._side_evaluation.cancel()
        if self._saver is not None:
            await self._saver.cancel()
        if self._fleet is not None:
            await self._fleet.stop()
        if self._publisher is not None:
            await self._publisher.close()
        if self._learner is not None:
            await self._learner.close()
        if self._replay is not None:
            ray.kill(self._replay)
        if self._rewards is not None:
            await self._rewards.close()
        if self._colocation is not None:
            self._colocation.release()
        self._recorder.spans(self._tracer.drain())

    async def _prepare_model(self) -> str:
        model = self._config.model
        if not isinstance(model, TinyModel):
            return model.path
        path = self._folder / "model"
        if not path.exists():
            loss = await _make_tiny_model.remote(
                model,
                self._config.renderer,
                self._config.environment,
                self._training,
                str(path),
                self._config.run.seed,
            )
            if loss is not None:
                logger.info("warm start ended with a loss of %.3f", loss)
        return str(path)

    # -- the loop ------------------------------------------------------------------------------

    async def train(self) -> None:
        """Steps until `run.num_steps`. Raises `RunStopped` after a requested stop."""
        learner = self._learner
        assert learner is not None, "start comes first"
        if self.step == 0:
            await self._evaluate()
        while self.step < self._config.run.num_steps:
            try:
                await self._make_step(learner)
            except LearnerDied as error:
                await self._roll_back(learner, error)
        await self._assert_everyone_is_current()

    async def _make_step(self, learner: LearnerGroup) -> None:
        """Takes, trains, publishes, reports, and what is due after the step."""
        config = self._config
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
                should_mask_truncated=config.learner.should_mask_truncated,
            )
        await self._let_engines_sleep()
        with self._tracer.span("step", step=self.step + 1):
            output = await learner.step(batches)
        await self._replay.commit.remote(
            [group.group_id for group in take.groups], output.policy_version
        )
        self.step += 1
        self._start_publishing(output.policy_version)
        await self._report(
            take,
            output,
            trained_version=trained_version,
            wait_s=step_started - wait_started,
            since=wait_started,
        )
        await self._checkpoint_and_evaluate()

    async def _take(self) -> Take:
        """The next groups. Raises `StalledError` when nobody made progress for `watchdog_s`."""
        learner, config = self._learner, self._config
        assert learner is not None, "start comes first"
        progress, changed_at = -1, time.monotonic()
        with self._tracer.span("take"):
            while True:
                take = await self._unless_stopped(
                    self._replay.take.remote(
                        config.replay.groups_per_step, learner.policy_version, TAKE_POLL_S
                    )
                )
                if take is not None:
                    return take
                if self._should_stop:
                    await self._stop()
                now = time.monotonic()
                current = await self._replay.progress.remote()
                if current != progress:
                    progress, changed_at = current, now
                elif now - changed_at > config.run.watchdog_s:
                    await self._raise_stalled(now - changed_at)

    async def _unless_stopped(self, call: Any) -> Any:
        """What the call returns, or None at once when a stop is requested: little time is given."""
        calling = asyncio.ensure_future(placement.answer(call))
        stopping = asyncio.ensure_future(self._stop_requested.wait())
        try:
            await asyncio.wait([calling, stopping], return_when=asyncio.FIRST_COMPLETED)
            return calling.result() if calling.done() else None
        finally:
            calling.cancel()
            stopping.cancel()

    async def _raise_stalled(self, idle_s: float) -> None:
        lines = await self._replay.describe.remote()
        await self._replay.save.remote(str(self._folder / "stalled"))
        raise StalledError(
            f"no progress for {idle_s:.0f} s at step {self.step} (run.watchdog_s); the ledger is in"
            f" {self._folder / 'stalled'}:\n" + "\n".join(f"  {line}" for line in lines)
        )

    async def _report(
        self, take: Take, output: Any, *, trained_version: int, wait_s: float, since: float
    ) -> None:
        """`trained_version` is the policy's before the step."""
        assert self._fleet is not None, "start comes first"
        assert self._publisher is not None, "start comes first"
        assert self._learner is not None, "start comes first"
        activities, spans = await self._fleet.drain()
        spans += await self._learner.drain_spans()
        metrics = step_metrics(take.groups, activities)
        metrics |= take.metrics | output.metrics | dict(self._publisher.metrics)
        metrics |= self._saver.drain_metrics() if self._saver is not None else {}
        metrics |= {
            "policy_version": float(output.policy_version),
            "rollout/restarts": float(self._fleet.num_restarts),
            "buffer/wait_s": wait_s,
            "learner/idle_fraction": wait_s / max(1e-9, time.monotonic() - since),
        }
        self._recorder.spans([*spans, *self._tracer.drain()])
        self._recorder.step(self.step, metrics)
        trajectories = [t for group in take.groups for t in group.trajectories]
        await asyncio.to_thread(
            self._recorder.trajectories,
            self.step,
            trajectories,
            policy_version=trained_version,
            advantages=output.advantages,
            learner_logprobs=output.logprobs,
        )

    async def _checkpoint_and_evaluate(self) -> None:
        run, is_last = self._config.run, self.step >= self._config.run.num_steps
        every = run.checkpoint_every_steps
        assert self._saver is not None, "start comes first"
        if is_last or self._should_stop or (every and self.step % every == 0):
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
        if self.step and self._saver.step != self.step:
            await self._saver.start(self.step)
        await self._saver.wait()
        raise RunStopped(
            f"stopped on request at step {self.step}; go on with --resume {self._folder}"
        )

    # -- weights -------------------------------------------------------------------------------

    def _make_publisher(self) -> None:
        assert self._learner is not None, "start comes first"
        assert self._fleet is not None, "start comes first"
        self._publisher = Publisher(
            write=self._learner.write,
            discard=self._learner.discard,
            settle=self._learner.settle,
            abandon=self._learner.abandon,
            on_condemned=self._fleet.condemn,
            deadline_s=self._config.weights.deadline_s,
            tracer=self._tracer,
        )
        for actor_id in self._fleet.actors:
            self._publisher.add(actor_id, self._fleet.receiver(actor_id))

    def _start_publishing(self, policy_version: int) -> None:
        """The push lands while the next batch is already being taken and packed; it wakes engines."""
        assert self._publisher is not None, "start comes first"
        is_new = policy_version != self._publisher.policy_version
        is_due = policy_version % self._config.weights.every_steps == 0
        if (is_new and is_due) or self._config.engines_sleep:
            self._publisher.start(policy_version)

    async def _let_engines_sleep(self) -> None:
        """Between the last episode of a step and its push, where the learner needs their memory."""
        assert self._fleet is not None, "start comes first"
        if self._config.engines_sleep:
            with self._tracer.span("engines fall asleep"):
                await self._fleet.sleep()

    async def _publish(self) -> None:
        assert self._publisher is not None, "start comes first"
        assert self._learner is not None, "start comes first"
        await self._publisher.publish(self._learner.policy_version)

    async def _assert_everyone_is_current(self) -> None:
        """The last version reaches every engine, with its proof, before the run calls itself done."""
        await self._publish()
        assert self._fleet is not None, "start comes first"
        assert self._publisher is not None, "start comes first"
        logger.info(
            "every engine (%d) holds policy version %d, proof gap %.1e",
            len(self._publisher.members),
            self._publisher.policy_version,
            self._publisher.metrics["weights/proof_gap"],
        )

    async def _forget_actor(self, actor_id: str) -> None:
        if self._publisher is not None:
            self._publisher.remove(actor_id)
        returned = await self._replay.fail_actor.remote(actor_id)
        logger.info("%d running samples of %s return to pending", returned, actor_id)

    async def _admit_actor(self, actor_id: str, receive: Receive) -> None:
        assert self._publisher is not None, "start comes first"
        await self._publisher.admit(actor_id, receive)

    # -- evaluation and checkpoints ------------------------------------------------------------

    async def _evaluate(self) -> None:
        if self._evaluator is None:
            return
        assert self._learner is not None, "start comes first"
        assert self._fleet is not None, "start comes first"
        if self._side_evaluation is not None:
            await self._side_evaluation.settle()
        await self._publish()
        with self._tracer.span("evaluate", step=self.step):
            record = await self._evaluator.evaluate(
                self._fleet.evaluators, step=self.step, policy_version=self._learner.policy_version
            )
        self._recorder.evaluation(record)

    async def _evaluate_beside_training(self) -> None:
        """With a single actor, or engines that sleep in a step, nobody is free, so the run waits."""
        if self._side_evaluation is None:
            return
        assert self._fleet is not None, "start comes first"
        if len(self._fleet.actors) < MIN_ACTORS_TO_LEND or self._config.engines_sleep:
            await self._evaluate()
            return
        assert self._learner is not None, "start comes first"
        await self._publish()
        await self._side_evaluation.start(
            step=self.step, policy_version=self._learner.policy_version
        )

    def _lend_actor(self, actor_id: str) -> None:
        assert self._publisher is not None, "start comes first"
        self._publisher.remove(actor_id)

    async def _take_back_actor(self, actor_id: str) -> None:
        assert self._fleet is not None, "start comes first"
        try:
            await self._admit_actor(actor_id, self._fleet.receiver(actor_id))
        except WeightTransferError as error:
            self._fleet.condemn(actor_id, error)

    async def finish_checkpoint(self) -> None:
        """Of a run that failed otherwise: the checkpoint in flight is still worth having."""
        if self._saver is not None:
            try:
                await self._saver.wait()
            except (CheckpointError, LearnerDied) as error:
                logger.warning("%s", error)

    async def _restore(self, learner: LearnerGroup, latest: Checkpoint) -> None:
        await learner.restore(latest.folder)
        await self._replay.load.remote(str(latest.folder / "replay"))
        self.step = latest.step
        self._recorder.rewind(self.step)
        logger.info("restored step %d, policy version %d", self.step, learner.policy_version)

    async def _roll_back(self, learner: LearnerGroup, error: LearnerDied) -> None:
        """Learner, ledger and buffer go back to one cut; engines are set to its version."""
        self._num_learner_restarts += 1
        if self._saver is not None:
            await self._saver.cancel()
        latest = await asyncio.to_thread(checkpoint.latest, self._folder / "checkpoints")
        if self._num_learner_restarts > self._config.run.max_learner_restarts or latest is None:
            why = (
                "there is no whole checkpoint"
                if latest is None
                else "run.max_learner_restarts is used up"
            )
            raise LearnerDied(f"the learner died at step {self.step} and {why}: {error}") from error
        logger.warning("the learner died at step %d, rolling back: %s", self.step, error)
        assert self._fleet is not None, "start comes first"
        assert self._publisher is not None, "start comes first"
        if self._side_evaluation is not None:
            await self._side_evaluation.cancel()
        await self._publisher.close()
        await learner.restart()
        await self._fleet.abort()
        await self._restore(learner, latest)
        self._make_publisher()
        await self._publish()
